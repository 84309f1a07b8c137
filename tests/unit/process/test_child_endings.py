"""How a child of the supervisor ended, in words that say where to look on."""

from __future__ import annotations

import signal

import pytest

from meshd.process.child_process import describe_exit


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
