"""How a child of the supervisor ended, in words that say where to look on."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
from typing import TYPE_CHECKING

import pytest

from meshd.process.child_process import (
    Child,
    ChildReporter,
    ChildSpec,
    _run,
    describe_exit,
    fork_child,
    was_in_snapshot,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (signal.SIGKILL, "killed by SIGKILL (perhaps by the kernel, out of memory: see dmesg)"),
        (signal.SIGBUS, "killed by SIGBUS (a memory-mapped file could not be read: the index)"),
        (signal.SIGSEGV, "killed by SIGSEGV"),
        (3 << 8, "exit code 3"),
    ],
)
def test_of_its_wait_status(status: int, words: str) -> None:
    assert describe_exit(status) == words


def test_a_transform_process_maps_no_index() -> None:
    assert "a data file could not be read" in describe_exit(signal.SIGBUS, "transform")
    assert "the index" in describe_exit(signal.SIGBUS, "worker")
    assert describe_exit(signal.SIGSEGV, "transform") == "killed by SIGSEGV"


def place(path: str) -> str:
    return f'  File "{path}", line 7 in f'


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([], False),
        (["/opt/meshd/lib/python3.11/ctypes/__init__.py"], False),
        (["/usr/lib/numpy/f.py", "/opt/meshd/lib/meshwire/dataset/paged_columns.py"], True),
        (["/src/meshd/datasets/snapshot_pages.py", "/src/meshd/store/store.py"], True),
        (["/src/meshd/store/index/index.py", "/src/meshd/datasets/service.py"], False),
        (["/src/meshd/control/embedded.py", "/src/meshwire/names.py"], False),
    ],
)
def test_of_where_a_fault_was(frames: list[str], expected: bool) -> None:
    trace = ["Fatal Python error: Bus error", "", "Current thread 0x1 (most recent call first):"]
    trace += map(place, frames)
    assert was_in_snapshot(trace) is expected
    assert ("a memory-mapped page of a snapshot" in describe_exit(signal.SIGBUS, "worker", trace)) is expected


def test_a_child_tells_where_a_fault_was() -> None:
    def body(reporter: ChildReporter) -> None:
        reporter.report_ready()
        os.kill(os.getpid(), signal.SIGBUS)

    child = Child(ChildSpec("worker-0", body), *fork_child(ChildSpec("worker-0", body), ()))
    _, status = os.waitpid(child.pid, 0)
    assert child.read_reports() == [{"state": "ready"}]
    os.close(child.pipe)
    assert os.WTERMSIG(status) == signal.SIGBUS
    assert "Fatal Python error: Bus error" in child.trace
    assert any(f'"{__file__}"' in line and line.endswith("in body") for line in child.trace)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)
    os.close(writing)


def test_a_file_of_another_user_is_told_in_a_sentence(
    pipe: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    """After one start as root, or a backup that root has restored."""

    def body(_: ChildReporter) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/srv/data/extents/DISK")

    with caplog.at_level(logging.DEBUG):
        assert _run(ChildSpec("recovery", body), ChildReporter(pipe[1])) == 1
    told = json.loads(os.read(pipe[0], 4096))["reason"]
    assert told.startswith("/srv/data/extents/DISK: Permission denied; ")
    assert "chown -R" in told
    assert not caplog.records  # no stack


def test_a_defect_has_its_stack_in_the_log(pipe: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    def body(_: ChildReporter) -> None:
        raise KeyError("odd")

    assert _run(ChildSpec("recovery", body), ChildReporter(pipe[1])) == 1
    assert json.loads(os.read(pipe[0], 4096))["reason"] == "KeyError: 'odd'"
    assert caplog.records[0].exc_info is not None
