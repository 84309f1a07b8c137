"""Locks of files: of one holder, who may be waited for."""

from __future__ import annotations

import fcntl
import os
import threading
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

from meshd.util.file_locks import lock_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[], int]]:
    """Opens one file, each time anew."""
    fds: list[int] = []

    def one() -> int:
        fds.append(os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT))
        return fds[-1]

    yield one
    for fd in fds:
        os.close(fd)


def test_a_lock_that_is_held_is_refused(opened: Callable[[], int]) -> None:
    holder, other = opened(), opened()
    assert lock_file(holder, fcntl.LOCK_SH)
    assert lock_file(other, fcntl.LOCK_SH)
    assert not lock_file(other, fcntl.LOCK_EX)
    fcntl.flock(holder, fcntl.LOCK_UN)
    assert lock_file(other, fcntl.LOCK_EX)


def test_a_holder_that_ends_is_waited_for(opened: Callable[[], int]) -> None:
    holder, other = opened(), opened()
    assert lock_file(holder, fcntl.LOCK_EX)
    ending = threading.Timer(0.2, fcntl.flock, (holder, fcntl.LOCK_UN))
    ending.start()
    try:
        assert lock_file(other, fcntl.LOCK_EX, 60.0)
        assert ending.finished.is_set()
    finally:
        ending.join(30)


def test_nobody_waits_for_a_holder_that_lives(opened: Callable[[], int]) -> None:
    holder, other, asked = opened(), opened(), Mock(return_value=False)
    assert lock_file(holder, fcntl.LOCK_EX)
    assert not lock_file(other, fcntl.LOCK_EX, 3600.0, asked)
    asked.assert_called_once_with()
