"""The `mesh` command in this process, against the daemon of these tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from meshsdk.cli import run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.daemons import Daemon


@pytest.fixture
def mesh(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs a command line in this process; gives stdout, or stderr when it is to fail with `code`."""
    monkeypatch.setenv("MESH_ENDPOINT", daemon.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", daemon.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", daemon.secret_key)

    def call(*arguments: object, code: int = 0) -> str:
        capfd.readouterr()
        found = run([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert found == code, out + err
        return out if code == 0 else err

    return call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "in"
    for name in ("a.txt", "sub/b.txt", "sub/deep/c d.txt"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return root
