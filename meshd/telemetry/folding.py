"""Files of metrics, one a process and kind: those of processes that are gone become one.

Law: counts are added up, of a gauge the latest value stays, live gauges go: what a scrape would have made of
the files. Invariant: a scrape sees a count once, for it reads while nobody folds (a lock in the directory).
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from prometheus_client.mmap_dict import MmapedDict

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GONE: Final = "gone"  # in place of a process id
_LOCK: Final = "lock"
_log = logging.getLogger("meshd.metrics")


@contextmanager
def reading(directory: Path) -> Iterator[None]:
    """Nobody folds meanwhile. Waits for one that does: milliseconds."""
    with _locked(directory, fcntl.LOCK_SH):
        yield


def fold(directory: Path) -> None:
    """Make the files of all processes that are gone one a kind. For one process alone, the supervisor.

    Does not wait for those who read: what is left is folded the next time.
    """
    try:
        with _locked(directory, fcntl.LOCK_EX | fcntl.LOCK_NB):
            for kind, paths in _gone(directory).items():
                _fold(directory / f"{kind}_{GONE}.db", paths)
    except BlockingIOError:
        return
    except (
        OSError,
        RuntimeError,
        ValueError,
        struct.error,
    ) as error:
        # A full disk, say: they stay, and nothing is lost.
        _log.warning("files of metrics stay as they are", extra={"why": str(error)})


@contextmanager
def _locked(directory: Path, how: int) -> Iterator[None]:
    lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, how)
        yield
    finally:
        os.close(lock)


def _gone(directory: Path) -> dict[str, list[Path]]:
    """The files of processes that are gone, by kind."""
    found: dict[str, list[Path]] = {}
    for path in directory.glob("*.db"):
        kind, _, pid = path.stem.rpartition("_")
        if pid.isdigit() and not _lives(int(pid)):
            found.setdefault(kind, []).append(path)
    return found


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # somebody else's, that has its number by now: another time
    return True


def _fold(target: Path, paths: list[Path]) -> None:
    if not target.name.startswith("gauge_live"):
        known = [target] if target.exists() else []
        values = _sums([*known, *paths], latest=target.name.startswith("gauge_"))
        fresh = target.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        _write(fresh, values)
        fresh.replace(target)
    for path in paths:
        path.unlink()


def _sums(paths: list[Path], *, latest: bool) -> dict[str, tuple[float, float]]:
    """(value, time) by the name of the series."""
    found: dict[str, tuple[float, float]] = {}
    for path in paths:
        for key, value, stamp, _ in MmapedDict.read_all_values_from_file(path):
            before, then = found.get(key, (0.0, 0.0))
            if not latest:
                found[key] = (before + value, 0.0)
            elif stamp >= then:
                found[key] = (value, stamp)
    return found


def _write(path: Path, values: dict[str, tuple[float, float]]) -> None:
    """By way of memory: on a full disk writing to a mapped file would end the process (SIGBUS), not fail."""
    draft = os.memfd_create("metrics")
    try:
        file = MmapedDict(f"/proc/self/fd/{draft}")
        for key, (value, stamp) in values.items():
            file.write_value(key, value, stamp)
        file.close()
        with open(draft, "rb", closefd=False) as made:
            path.write_bytes(made.read())
    finally:
        os.close(draft)
