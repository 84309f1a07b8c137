"""What a start warns of: a data directory that others can read, a cache that memory cannot hold."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from meshd.process import memory_usage
from meshd.process.serve import _warn_if_open, _warn_of_frame_cache

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_warning_is_about_a_directory_of_ones_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    _warn_if_open(tmp_path)
    assert caplog.messages == []
    tmp_path.chmod(0o755)
    _warn_if_open(tmp_path)
    assert caplog.messages == ["other users can read the data directory; chmod 700 it"]
    caplog.clear()
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)  # as on a volume, whose modes are the kubelet's
    _warn_if_open(tmp_path)
    assert caplog.messages == []


def test_a_warning_is_about_a_cache_that_memory_cannot_hold(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_usage, "memory_room", lambda: memory_usage.MemoryRoom(1 << 30, 4 << 30))
    _warn_of_frame_cache(4 << 30)
    assert caplog.messages == []
    _warn_of_frame_cache(5 << 30)
    assert [message.partition(" ")[0] for message in caplog.messages] == ["frame-cache"]
    monkeypatch.setattr(memory_usage, "memory_room", lambda: None)  # the kernel does not report it
    _warn_of_frame_cache(5 << 30)
    assert len(caplog.messages) == 1
