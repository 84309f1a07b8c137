"""The SDK without `shardmesh-tools`: commands and hooks say how to install it; all else works."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from meshsdk import tools_package
from meshsdk.cli import run
from meshsdk.cli.command_index import CHAPTERS, TOOLS
from meshsdk.errors import ConfigurationError
from meshsdk.tools_package import COMMANDS, LOADER_HOOKS, find_tool, load_tool

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
INSTALL = "run pip install 'shardmesh[tools]', or pip install ./tools in a clone of Shardmesh"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An environment in which no package has entry points."""
    find_tool.cache_clear()
    monkeypatch.setattr(tools_package, "entry_points", lambda **_: ())
    yield
    find_tool.cache_clear()


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("doctor", ["--steps", "3", "--", "python", "train.py", "--help"]),
        ("top", ["--once"]),
        ("top", ["--help"]),
        ("cache", ["simulate", "--epochs", "3"]),
        ("cache", []),
    ],
)
def test_a_command_says_how_to_install_it(
    command: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, *words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == f"mesh: mesh {command} needs the package shardmesh-tools: {INSTALL}\n"


@pytest.mark.usefixtures("bare")
def test_a_program_gets_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--json"]) == 2
    told: dict[str, Any] = json.loads(capsys.readouterr().err)
    assert told["error"] == "ConfigurationError"
    assert told["message"].endswith(INSTALL)


@pytest.mark.usefixtures("bare")
def test_the_help_of_all_lists_them_with_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in ("doctor", "top", "cache", "ls"))


@pytest.mark.usefixtures("bare")
def test_a_hook_is_none_or_says_how_to_install_it() -> None:
    assert find_tool(LOADER_HOOKS, "nvtx") is None
    with pytest.raises(
        ConfigurationError, match=r"^a trace needs the package shardmesh-tools: run pip install"
    ):
        load_tool(LOADER_HOOKS, "trace", "a trace")


def test_every_entry_point_is_one_that_the_sdk_looks_up_and_can_be_loaded() -> None:
    registered = tomllib.loads((ROOT / "tools" / "pyproject.toml").read_text())["project"]["entry-points"]
    listed = {name: module for chapter in CHAPTERS.values() for name, (module, _) in chapter.items()}
    commands = {name for name, module in listed.items() if module == TOOLS}
    assert set(registered) == {COMMANDS, LOADER_HOOKS}
    assert set(registered[COMMANDS]) == commands
    assert set(registered[LOADER_HOOKS]) == {"doctor", "nvtx", "trace"}
    for group, points in registered.items():
        assert {each.name: each.value for each in entry_points(group=group)} == points
        assert all(callable(each.load()) for each in entry_points(group=group))


def test_a_job_that_is_not_examined_imports_no_tool() -> None:
    code = (
        "import sys, meshsdk; from meshsdk.loader import loader, loader_setup; from meshsdk.cli import run; "
        "run(['--help']); print([name for name in sys.modules if name.startswith('meshtools')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.endswith("\n[]\n")
