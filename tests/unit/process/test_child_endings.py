"""How a child of the supervisor ended, in words that say where to look on."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
from typing import TYPE_CHECKING

import pytest

from meshd.process.child_process import ChildReporter, ChildSpec, _run, describe_exit

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
