"""A data directory that others can read: told to those who can change that."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from meshd.process.serve import _warn_if_open

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
