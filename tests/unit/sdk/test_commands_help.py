"""The help of `mesh` and `meshd`: every command has an example, every list says what each does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner

from meshd.cli import meshd
from meshsdk.cli import mesh
from meshsdk.cli.command_index import ALTERNATIVES

if TYPE_CHECKING:
    from collections.abc import Iterator


def _commands(
    command: click.Command, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path[-1])
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _commands(below, (*path, name))


COMMANDS = {
    " ".join(path): command for root in (mesh, meshd) for path, command in _commands(root, (str(root.name),))
}


def _help(path: str) -> str:
    root, *words = path.split()
    done = CliRunner().invoke(mesh if root == "mesh" else meshd, [*words, "--help"], terminal_width=78)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(("old", "new"), [("plan", "plans"), ("snapshot", "snapshots")])
def test_an_earlier_command_works_with_a_notice(old: str, new: str) -> None:
    done, wanted = (CliRunner().invoke(mesh, [word, "ls", "--help"]) for word in (old, new))
    assert (done.exit_code, done.stdout) == (0, wanted.stdout)
    assert f"`mesh {old}` is deprecated: use `mesh {new}`" in done.stderr
    assert not wanted.stderr
    assert old not in mesh.list_commands(click.Context(mesh))


@pytest.mark.parametrize(
    "path", [path for path, command in COMMANDS.items() if not isinstance(command, click.Group)]
)
def test_a_command_has_an_example(path: str) -> None:
    also = {path, path.replace("mesh job start ", "mesh ")}  # the same commands by another name
    told = _help(path).partition("\n")[2]
    assert any(re.search(rf"^ *(.*\| )?{name}( |$)", told, re.MULTILINE) for name in also), told


@pytest.mark.parametrize(
    "path", [path for path, command in COMMANDS.items() if isinstance(command, click.Group)]
)
def test_a_list_of_commands_leaves_no_sentence_unfinished(path: str) -> None:
    listed = re.findall(r"^  [a-z]+  +\S.*$", _help(path), re.MULTILINE)
    assert listed
    assert not [line for line in listed if line.endswith("...")]


def test_what_was_meant_is_told() -> None:
    assert "Did you mean 'view'?" in CliRunner().invoke(mesh, ["vieww"]).output
    told = CliRunner().invoke(mesh, ["users"])
    assert (told.exit_code, "No such command 'users'. Use: meshd admin --help" in told.output) == (2, True)
    assert ALTERNATIVES.keys().isdisjoint(mesh.list_commands(click.Context(mesh)))
    assert "Did you mean 'serve'?" in CliRunner().invoke(meshd, ["serv"]).output


def test_an_example_s_bucket_is_said_with_its_scheme() -> None:
    assert "write s3://photos" in CliRunner().invoke(mesh, ["mb", "photos"]).output
    assert "write s3://BUCKET/KEY" in CliRunner().invoke(mesh, ["ls", "./photos"]).output


@pytest.mark.parametrize("words", [["fsck"], ["inspect", "stats"], ["inspect", "record", "photos", "a.jpg"]])
def test_a_store_that_is_not_named_is_asked_for(words: list[str]) -> None:
    done = CliRunner().invoke(meshd, words)
    assert (done.exit_code, "as in --data-dir ./data" in done.output) == (2, True), done.output


def test_both_tell_their_version() -> None:
    for command in (mesh, meshd):
        assert re.search(r"version \d+\.\d+", CliRunner().invoke(command, ["--version"]).output)


@pytest.mark.parametrize(("words", "found"), [("mesh vi", "plain,view"), ("mesh cp ./a", "file,./a")])
def test_words_are_completed(words: str, found: str) -> None:
    env = os.environ | {
        "_MESH_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    line = [sys.executable, "-c", "from meshsdk.cli import main; main()"]
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.split() == [found], done.stderr


def test_help_of_all_imports_no_command() -> None:
    code = "import sys; from meshsdk.cli import run; run(['--help']); print('numpy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.endswith("\nFalse\n")


@pytest.mark.parametrize(("module", "name"), [("meshsdk", "mesh"), ("meshd", "meshd")])
def test_commands_run_as_modules(module: str, name: str) -> None:
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith(f"Usage: {name} ")
