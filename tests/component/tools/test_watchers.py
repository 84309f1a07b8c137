"""Who watches a loader's loop: its trace, its page for `mesh top`, a profiler's ranges."""

from __future__ import annotations

import json
import multiprocessing
import os
import pty
import select
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from meshsdk import tools_package
from meshsdk.cli import run
from meshsdk.errors import ConfigurationError
from meshtools.top import loader_pages
from meshtools.traces.nvtx import NvtxRanges, nvtx_of
from tests.component.sdk import test_sdk_scripted
from tests.component.sdk.test_sdk_scripted import loader
from tests.support.bounded_wait import await_end
from tests.support.required import required_module

if TYPE_CHECKING:
    from pathlib import Path

    from tests.component.sdk.test_sdk_scripted import ScriptedMesh

scripted_server = test_sdk_scripted.scripted_server
undisturbed = test_sdk_scripted.undisturbed


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESH_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def check_rows(found: list[dict[str, Any]]) -> None:
    """The form's law: slices of a row nest or follow each other; every row has a name."""
    named = {event["tid"] for event in found if event["name"] == "thread_name"}
    rows: dict[int, list[dict[str, Any]]] = {}
    for event in found:
        assert event["ph"] in "MXi"
        if event["ph"] == "X":
            assert event["dur"] >= 0
            rows.setdefault(event["tid"], []).append(event)
    assert set(rows) <= named
    for slices in rows.values():
        slices.sort(key=lambda event: (event["ts"], -event["dur"]))
        open_until: list[int] = []
        for event in slices:
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            ends = event["ts"] + event["dur"]
            assert not open_until or ends <= open_until[-1]
            open_until.append(ends)


def test_a_trace_has_every_wait_step_and_request(server: ScriptedMesh, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with loader(server, connections=3) as one:
        one.trace(path)
        steps = len(list(one)) + len(list(one))
    found = events(path)
    check_rows(found)
    slices = [event for event in found if event["ph"] == "X"]
    names = [event["name"] for event in slices]
    assert names.count("wait") == names.count("compute") == names.count("receive") == steps
    assert {event["args"]["epoch"] for event in slices if event["name"] == "wait"} == {0, 1}
    assert sum(event["args"]["rows"] for event in slices if event["name"] == "wait") == steps * 16
    loop = [event for event in slices if event["tid"] == 1 and event["args" if "args" in event else "name"]]
    assert len(loop) == 2 * steps


def test_a_trace_is_never_longer_than_its_limit(server: ScriptedMesh, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with loader(server, 2) as one:
        one.trace(path, limit=8192)
        list(one)
    assert 4096 < path.stat().st_size <= 8192
    assert events(path)[-1]["name"] == "the trace is full (8192 bytes)"
    check_rows(events(path))


def test_a_trace_of_each_rank_by_the_environment(
    server: ScriptedMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESH_TRACE", str(tmp_path / "trace.json"))
    for rank in range(2):
        with loader(server, rank=rank, world=2) as one:
            list(one)
        [name] = [event["args"]["name"] for event in events(tmp_path / f"trace.rank{rank}.json")[:1]]
        assert name.startswith(f"rank {rank} of 2")


def test_loaders_that_are_at_work_together_write_traces_of_their_own(
    server: ScriptedMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training and validation, as a rule; the name of one that has ended is used again."""
    path = tmp_path / "trace.json"
    with loader(server) as other, monkeypatch.context() as patch:
        patch.setenv("MESH_TRACE", str(path))
        with loader(server, 2) as training:
            list(training)
            for _ in range(2):
                with loader(server, 3) as validation:
                    list(validation)
            list(training)
        patch.delenv("MESH_TRACE")
        other.trace(path)
        with loader(server) as late, pytest.raises(ConfigurationError, match="another loader"):
            late.trace(path)
        list(other)
    assert sorted(file.name for file in tmp_path.glob("*.json")) == ["trace.2.json", "trace.json"]
    for name in ("trace.json", "trace.2.json"):
        check_rows(events(tmp_path / name))


def test_a_trace_that_nobody_closed_can_be_read(server: ScriptedMesh, tmp_path: Path) -> None:
    """The form allows the closing bracket to be missing."""
    path = tmp_path / "trace.json"
    with loader(server) as one:
        one.trace(path)
        list(one)
        check_rows(json.loads(path.read_text() + "]"))
        one.trace(None)
        check_rows(events(path))
        before = path.stat().st_size
        list(one)
    assert path.stat().st_size == before


def test_a_trace_that_cannot_be_written_says_so(server: ScriptedMesh, tmp_path: Path) -> None:
    with loader(server) as one:
        with pytest.raises(ConfigurationError, match="cannot be written"):
            one.trace(tmp_path / "no" / "trace.json")
        with pytest.raises(ConfigurationError, match="holds nothing"):
            one.trace(tmp_path / "trace.json", limit=10)


def test_a_loader_has_a_page_until_it_is_closed(server: ScriptedMesh, place: Path) -> None:
    with loader(server, report="mine") as one:
        assert list(loader_pages.read_pages([place])) == []
        batches = iter(one)
        next(batches)
        next(batches)
        [(job, found)] = loader_pages.read_pages([place])
        assert (job.pid, job.name, job.plan) == (os.getpid(), "mine", one.plan.hash)
        assert (found.samples, found.batches, found.step, found.steps) == (32, 2, 1, len(one))
        assert found.running > 0
        list(batches)
        [(_, found)] = loader_pages.read_pages([place])
        assert (found.samples, found.running) == (len(one) * 16, 0)
        assert found.seconds == pytest.approx(one.stats().seconds, rel=0.05)
        child = os.fork()
        if child == 0:
            one.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert len(list(place.iterdir())) == 1
    assert list(place.iterdir()) == []


def iterate(server: ScriptedMesh) -> None:
    one = loader(server)
    next(iter(one))
    HELD.append(one)  # it is not closed


HELD: list[Any] = []


def test_a_child_of_multiprocessing_takes_its_page_along(server: ScriptedMesh, place: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=iterate, args=(server,))
    child.start()
    await_end(child)
    assert child.exitcode == 0
    assert place.exists()
    assert list(place.iterdir()) == []


def test_top_on_a_terminal_until_it_is_interrupted(server: ScriptedMesh, place: Path) -> None:
    """Again and again, in place, and Ctrl-C is its proper end."""
    master, slave = pty.openpty()
    command = [sys.executable, "-c", "from meshsdk.cli import main; main()", "top", "-i", "0.1"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "140", "LINES": "40"}
    with loader(server, report="shown") as one:
        next(iter(one))
        process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)
        seen = b""
        while seen.count(b"cores, load") < 3 or b"shown" not in seen:
            readable, _, _ = select.select([master], [], [], 60)
            assert readable, seen
            seen += os.read(master, 65536)
    process.send_signal(signal.SIGINT)
    with suppress(OSError):
        while os.read(master, 65536):
            pass
    assert process.wait(60) == 0
    os.close(master)


def test_no_page_where_none_is_wanted(
    server: ScriptedMesh, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESH_TOP", "off")
    with loader(server) as one:
        next(iter(one))
        assert not place.exists()


def test_top_shows_the_job_and_its_node(
    server: ScriptedMesh, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESH_ENDPOINT", server.endpoint)
    with loader(server, report="mine") as one:
        batches = iter(one)
        next(batches)
        assert run(["top", "--json", "-i", "0.1"]) == 0
        found = json.loads(capsys.readouterr().out)
        [job] = [job for job in found["jobs"] if job["pid"] == os.getpid()]
        assert (job["name"], job["rank"], job["state"], job["step"]) == ("mine", 0, "computing", 0)
        assert 0 <= job["stall"] <= 1
        assert found["host"]["memory"] > 0
        [node] = found["nodes"]
        assert node["why"]  # this server has no figures of its own
        assert run(["top", "--once", "-i", "0.1"]) == 0
        shown = capsys.readouterr().out
    assert "mine" in shown
    assert "CPU" in shown


class Recorder:
    """torch.cuda.nvtx, as far as it is used."""

    def __init__(self) -> None:
        self.open: dict[int, str] = {}
        self.seen: list[str] = []

    def range_start(self, msg: str) -> int:
        self.seen.append(msg)
        self.open[len(self.seen)] = msg
        return len(self.seen)

    def range_end(self, range_id: int) -> None:
        del self.open[range_id]


def test_ranges_of_a_profiler_do_not_stay_open(server: ScriptedMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    cuda = type("Cuda", (), {"nvtx": recorder, "is_initialized": staticmethod(lambda: True)})
    with loader(server) as one:
        monkeypatch.setitem(sys.modules, "torch", type("Torch", (), {"cuda": cuda}))
        steps = len(list(one))
    assert recorder.seen[:3] == ["mesh wait", "mesh step 0", "mesh wait"]
    assert len(recorder.seen) == 2 * steps
    assert recorder.open == {}


def test_no_ranges_without_a_gpu() -> None:
    torch = required_module("torch")
    if torch.cuda.is_initialized():
        pytest.skip("this process uses a GPU")
    assert nvtx_of(torch) is None
    assert nvtx_of(None) is None
    assert isinstance(NvtxRanges(Recorder()), NvtxRanges)
    assert sys.modules["torch"] is torch


def test_without_the_tools_a_loader_works_and_a_trace_says_how_to_install_them(
    server: ScriptedMesh, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools_package, "entry_points", lambda **_: ())
    tools_package.find_tool.cache_clear()
    try:
        with loader(server) as one:
            next(iter(one))
            assert len(list(loader_pages.read_pages([place]))) == 1
            with pytest.raises(ConfigurationError, match=r"MESH_TRACE.*pip install 'shardmesh\[tools\]'"):
                one.trace(tmp_path / "trace.json")
            assert len(list(one)) > 0
            monkeypatch.setenv("MESH_DOCTOR", str(tmp_path))
            with pytest.raises(ConfigurationError, match=r"MESH_DOCTOR.*pip install 'shardmesh\[tools\]'"):
                iter(one)
    finally:
        tools_package.find_tool.cache_clear()
