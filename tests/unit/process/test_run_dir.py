"""Where the sockets of a node's processes lie."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from meshd.config import ConfigError, NodeSettings, StoreSettings
from meshd.process import run_dir
from meshd.process.run_dir import prepare_run_dir
from meshd.rpc.unix_messages import listen

if TYPE_CHECKING:
    import socket
    from pathlib import Path


@pytest.fixture
def settings(tmp_path: Path) -> NodeSettings:
    return NodeSettings("n", StoreSettings.at(tmp_path / "data"))


@pytest.fixture
def without_sockets(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Directories on file systems that refuse Unix sockets, as FUSE without mknod does."""
    refusing: list[Path] = []

    def refused(path: Path) -> socket.socket:
        if any(path.is_relative_to(each) for each in refusing):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        return listen(path)

    monkeypatch.setattr(run_dir, "listen", refused)
    return refusing


def test_it_is_in_the_data_directory_and_empty(settings: NodeSettings) -> None:
    (settings.run_dir / "left" / "of").mkdir(parents=True)
    (settings.run_dir / "coordinator.sock").touch()
    found = prepare_run_dir(settings, {})
    assert found == settings
    assert [each.name for each in found.run_dir.iterdir()] == ["metrics"]


@pytest.mark.parametrize("name", ["RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"])
def test_sockets_go_where_sockets_can_be(
    settings: NodeSettings, without_sockets: list[Path], tmp_path: Path, name: str
) -> None:
    without_sockets.append(settings.store.data_dir)
    found = prepare_run_dir(settings, {name: str(tmp_path / "run")})
    assert found.run_dir.parent == tmp_path / "run"
    assert found.run_dir.stat().st_mode & 0o777 == 0o700
    assert found.metrics_dir.parent == found.coordinator_socket.parent == found.run_dir
    (warning,) = found.start_warnings
    assert str(settings.run_dir) in warning
    assert "Function not implemented" in warning
    assert prepare_run_dir(settings, {name: str(tmp_path / "run")}) == found  # the same after a restart
    other = NodeSettings("n", StoreSettings.at(tmp_path / "other"))
    without_sockets.append(tmp_path / "other")
    assert prepare_run_dir(other, {name: str(tmp_path / "run")}).run_dir != found.run_dir


def test_nowhere(settings: NodeSettings, without_sockets: list[Path], tmp_path: Path) -> None:
    without_sockets.append(tmp_path)
    with pytest.raises(ConfigError, match="set TMPDIR to a directory on a local file system"):
        prepare_run_dir(settings, {"XDG_RUNTIME_DIR": str(tmp_path)})


def test_a_link_in_its_place_is_not_followed(
    settings: NodeSettings, without_sockets: list[Path], tmp_path: Path
) -> None:
    without_sockets.append(settings.store.data_dir)
    env = {"XDG_RUNTIME_DIR": str(tmp_path / "run")}
    place = prepare_run_dir(settings, env).run_dir
    precious = tmp_path / "precious" / "file"
    precious.parent.mkdir()
    precious.touch()
    (place / "metrics").rmdir()
    place.rmdir()
    place.symlink_to(precious.parent)
    with pytest.raises(ConfigError, match="belongs to another user"):
        prepare_run_dir(settings, env)
    assert precious.exists()
