"""Nodes of tests are forked from a process that has loaded everything: they are as executed ones."""

from __future__ import annotations

import ast
import os
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.bounded_wait import await_true
from tests.support.daemons import Daemon
from tests.support.fork_server import SERVERS, ForkServers, forked_from, launch

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
READERS = {
    "meshd/util/failpoints.py",
    "meshd/transform/builtin/token_sequences.py",
    "meshd/telemetry/metric_registry.py",  # its clock is asked for times that never jump only
    "meshd/telemetry/tracing.py",  # a clock that jumps would move times in traces, and nothing else
}
"""`forking.become` sees to the first two."""


@pytest.fixture(scope="module")
def servers() -> Iterator[ForkServers]:
    """Apart from those of the session: they are looked into."""
    with ForkServers() as servers:
        yield servers


@pytest.fixture(autouse=True)
def _no_process_left() -> None:
    """The processes that nodes are forked from live as long as the module."""


def shared(pid: int) -> set[str]:
    """Memory that processes share, by its number."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return set(re.findall(r" rw-s \S+ \S+ (\d+) +/dev/zero \(deleted\)$", maps, re.MULTILINE))


def outcome(arguments: list[str], own: dict[str, str], tmp_path: Path) -> tuple[int, str, str]:
    """Exit code, output, last line of errors."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MESHD_")}
    with (tmp_path / "errors").open("wb") as errors:
        process = launch(arguments, clean | own, errors)
    assert process.stdout is not None
    try:
        code = process.wait(60)
    finally:
        process.kill()  # unless it has ended
        with process.stdout:
            said = process.stdout.read().decode()
    return code, said, (tmp_path / "errors").read_text().strip().rpartition("\n")[2]


@pytest.mark.parametrize(
    ("arguments", "own"),
    [
        (["serve", "--listen", "nonsense"], {}),
        (["serve"], {"MESHD_FAILPOINTS": "nonsense"}),
        (["serve"], {"MESHD_WORKERS": "few"}),
        (["serve", "--help"], {}),
        (["inspect", "record"], {}),
        (["nonsense"], {}),
    ],
)
def test_it_says_and_ends_as_if_it_were_executed(
    servers: ForkServers, tmp_path: Path, arguments: list[str], own: dict[str, str]
) -> None:
    if arguments == ["serve"]:
        arguments = [*arguments, "--data-dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0"]
    with forked_from(None):
        expected = outcome(arguments, own, tmp_path)
    with forked_from(servers):
        assert [outcome(arguments, own, tmp_path) for _ in range(SERVERS)] == [expected] * SERVERS


def test_how_it_ended_is_told_and_nothing_of_it_stays(servers: ForkServers) -> None:
    with forked_from(servers), Daemon.start() as daemon:
        process, pid, children = daemon._process, daemon.pid, daemon.children()
        assert process is not None
        assert process.poll() is None
        assert {"worker-0", "transform-0"} <= children.keys()
        daemon.kill()
        assert (process.poll(), process.returncode) == (-9, -9)
        assert not Path(f"/proc/{pid}").exists()
        process.terminate()  # does nothing: the number may be another's
        daemon.up()
        assert daemon.stop() == 0


def test_it_prints_where_and_runs_in_the_folder_it_is_told(servers: ForkServers, tmp_path: Path) -> None:
    folder, log = tmp_path / "folder", tmp_path / "log"
    folder.mkdir()
    with forked_from(servers), log.open("wb") as out:
        arguments = ["serve", "--data-dir", "here", "--listen", "127.0.0.1:0"]
        process = launch(arguments, dict(os.environ), out, stdout=out, folder=folder)
        try:
            await_true(lambda: "meshd ready" in log.read_text())
            assert process.stdout is None
            assert Path(f"/proc/{process.pid}/cwd").resolve() == folder
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()  # unless it has ended
    assert (folder / "here").is_dir()


def test_several_threads_learn_how_it_ended(servers: ForkServers) -> None:
    with forked_from(servers), Daemon.start() as daemon:
        process = daemon._process
        assert process is not None
        with ThreadPoolExecutor(4) as threads:
            told = [threads.submit(process.wait, 60) for _ in range(4)]
            assert process.poll() is None  # at once, whoever waits
            process.kill()
            assert [each.result(60) for each in told] == [-9] * 4
        assert process.poll() == -9


def test_what_processes_of_a_node_share_is_no_other_nodes(servers: ForkServers) -> None:
    with forked_from(servers), Daemon.start() as one, Daemon.start() as two, Daemon.start() as three:
        found = [shared(node.pid) for node in (one, two, three)]
        assert all(found)
        for mine, others in combinations([*found, *map(shared, servers.pids)], 2):
            assert mine.isdisjoint(others)
        assert shared(one.children()["worker-0"]) & found[0]
        assert {len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in servers.pids} == {1}


def test_modules_that_read_the_environment_as_they_load_are_known() -> None:
    """Of `meshd serve` all others do when they are called."""
    sources = [*(ROOT / "meshd").rglob("*.py"), *(ROOT / "sdk" / "meshwire").rglob("*.py")]
    reading = {str(path.relative_to(ROOT)) for path in sources if reads_as_it_loads(path)}
    assert {path for path in reading if not path.startswith("tests/support/")} == READERS


def reads_as_it_loads(path: Path) -> bool:
    def looks(node: ast.AST) -> bool:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return False
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "SystemClock":
            return True  # it looks for one that jumps
        return any(map(looks, ast.iter_child_nodes(node)))

    return looks(ast.parse(path.read_text()))
