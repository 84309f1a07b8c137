"""The pin of the snapshot that an index had when it was opened."""

from __future__ import annotations

import errno
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

from meshd.store.index import checkpoint
from meshd.store.index.checkpoint import OpeningPin

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_it_ends_although_the_checkpoint_could_not_be_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it stays, LMDB frees no page that was in use when it began."""
    aborted = threading.Event()
    env = SimpleNamespace(begin=lambda: SimpleNamespace(abort=aborted.set))
    answers: list[object] = [
        SimpleNamespace(number=2),
        OSError(errno.EMFILE, "Too many open files"),
        SimpleNamespace(number=1),
    ]

    def read(_: Path) -> object:
        answer = answers.pop()
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(checkpoint, "read_checkpoint", read)
    monkeypatch.setattr(checkpoint, "_POLL_SECONDS", 0.01)
    pin = OpeningPin(env, tmp_path)
    assert aborted.wait(20)
    pin.close()
