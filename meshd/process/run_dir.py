"""The run directory: sockets and counters of the running processes, emptied at start.

It lies in the data directory, unless that is on a file system without Unix sockets (some FUSE and network
file systems); then it is where the system keeps such things.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from meshd.config import ConfigError
from meshd.rpc.unix_messages import listen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.config import NodeSettings

_PROBE: Final = "probe.sock"


def prepare_run_dir(settings: NodeSettings, env: Mapping[str, str]) -> NodeSettings:
    """Empty the run directory; return the settings, which name another one and warn if the data directory
    cannot hold sockets. Call while the lock of the data directory is held. Raises ConfigError."""
    _empty(settings.run_dir)
    why = _probe_sockets(settings.run_dir)
    if why is not None:
        elsewhere = _fallback(settings.store.data_dir, env)
        _empty(elsewhere)
        if (also := _probe_sockets(elsewhere)) is not None:
            raise ConfigError(
                f"neither {settings.run_dir} ({why}) nor {elsewhere} ({also}) can hold Unix sockets: set "
                "TMPDIR to a directory on a local file system"
            )
        warning = f"{settings.run_dir} cannot hold Unix sockets ({why}): they are in {elsewhere}"
        settings = replace(
            settings, moved_run_dir=elsewhere, start_warnings=(*settings.start_warnings, warning)
        )
    settings.metrics_dir.mkdir(parents=True, mode=0o700)
    return settings


def _empty(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = directory.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            for entry in list(os.scandir(directory)):  # removal may disturb the scan
                _remove(entry)
            return
    except OSError as error:
        raise ConfigError(f"cannot empty the directory {directory}: {error.strerror}") from error
    raise ConfigError(f"{directory} belongs to another user: remove it, or set TMPDIR to another place")


def _remove(entry: os.DirEntry[str]) -> None:
    if entry.is_dir(follow_symlinks=False):
        shutil.rmtree(entry.path)
    else:
        os.unlink(entry.path)


def _probe_sockets(directory: Path) -> str | None:
    """Return why a Unix socket cannot be in `directory`; None if it can."""
    try:
        listen(directory / _PROBE).close()
        (directory / _PROBE).unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _fallback(data_dir: Path, env: Mapping[str, str]) -> Path:
    """Return a directory of this data directory's own, in systemd's RuntimeDirectory, the user's run
    directory, or the directory of temporary files."""
    parents = (env.get("RUNTIME_DIRECTORY", "").partition(":")[0], env.get("XDG_RUNTIME_DIR", ""))
    parent = next((each for each in parents if each), tempfile.gettempdir())
    name = hashlib.blake2b(os.fsencode(data_dir.resolve()), digest_size=8).hexdigest()
    return Path(parent) / f"meshd-{os.geteuid()}-{name}"
