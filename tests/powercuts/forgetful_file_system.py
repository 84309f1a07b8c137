"""A file system in user space that has a power cut when it is unmounted: what was not synced is forgotten, or
half of it.

`python -m tests.powercuts.forgetful_file_system SOURCE MOUNT --seed N` serves what is below SOURCE at MOUNT.
When it is unmounted, SOURCE becomes what a disk would have after the power failed:

- *Bytes*. A file has what it had at its last sync, with any of the sectors of 512 bytes over it that were
  written since, in any subset, and any length between the two.
- *Names*. A directory has the entries of its last sync, with some of the changes since, in their order. A
  file that was created and synced in a directory that was not, may be gone; so may a directory with all that
  is in it.

Law: deterministic by seed, for the same order of calls. POSIX allows all of this to be forgotten.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import shutil
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mfusepy import FUSE

from tests.powercuts.power_cut import PAGE, Change, FileState, PowerCut, record
from tests.support.fuse_file_system import PassThrough

if TYPE_CHECKING:
    from collections.abc import Callable

_DATA: Final = ".tar"
_LATE: Final = 0.02
"""Seconds between the sync of an index and those that come late."""
_SPACE: Final = (
    "f_bsize",
    "f_frsize",
    "f_blocks",
    "f_bfree",
    "f_bavail",
    "f_files",
    "f_ffree",
    "f_favail",
    "f_flag",
    "f_namemax",
)


class Forgetful(PassThrough):
    """`ignored`: ends of paths whose syncs do nothing, as faults of a daemon; `/` for directories. `late`:
    ends of paths whose syncs happen only after an index has been synced. `off`: a file; once it is there, the
    power has failed, and no sync succeeds, not even one that is under way.
    `failing`: the number of the sync that fails. `delay`: seconds that a sync takes. `capacity`: bytes that
    it has, 0 for those of the disk below. `read_errors`: the share of reads of data files that fail; `flips`:
    how many of their bits are others after the cut. `journal`: a sync of any file keeps all names, as ext4
    and XFS do. `trigger`: a file; once it is there, the next sync of a single page of an index fails.
    `record`: a folder for what there was before the cut, and the cut."""

    def __init__(
        self,
        source: str,
        limbo: str,
        *,
        seed: int,
        ignored: tuple[str, ...] = (),
        late: tuple[str, ...] = (),
        off: str = "",
        failing: int = 0,
        delay: float = 0.0,
        capacity: int = 0,
        read_errors: float = 0.0,
        flips: int = 0,
        journal: bool = False,
        trigger: str = "",
        record: str = "",
    ) -> None:
        super().__init__(source)
        self._record = record
        self._capacity, self._used = capacity, _used(source) if capacity else 0
        self._trigger = trigger
        self._read_errors, self._flips, self._journal = read_errors, flips, journal
        self._limbo, self._chance = limbo, random.Random(seed)
        self._ignored, self._failing, self._delay = ignored, failing, delay
        self._late, self._off = late, off
        self._owed: list[Callable[[], None]] = []
        self._syncs = 0
        self._lock = threading.RLock()
        self._files: dict[int, FileState] = {}
        self._directories: dict[str, list[Change]] = {}
        self._kept: dict[int, str] = {}  # inodes without a name that a cut may bring back

    # --- bytes

    def _state(self, fh: int) -> FileState:
        found = os.fstat(fh)
        return self._files.setdefault(found.st_ino, FileState(found.st_size))

    def _keep_pages(self, fh: int, offset: int, size: int) -> None:
        """Keep what the disk has of these bytes, before they are written over."""
        state = self._state(fh)
        for page in range(offset // PAGE, (offset + size - 1) // PAGE + 1):
            if page not in state.before:
                now = os.pread(fh, PAGE, page * PAGE) if page * PAGE < state.size else b""
                state.before[page] = state.lost.pop(page, now)

    def create(self, path: str, mode: int, fi: object = None) -> int:
        with self._lock:
            existed = os.path.lexists(self._at(path))
            fh = super().create(path, mode, fi)
            if not existed:
                ino = os.fstat(fh).st_ino
                self._files[ino] = FileState()
                self._change(path, None, ino)
            return fh

    def open(self, path: str, flags: int) -> int:
        with self._lock:
            reads = os.O_RDWR if flags & os.O_ACCMODE else os.O_RDONLY  # what is written over is read first
            fh = super().open(path, reads | flags & ~(os.O_TRUNC | os.O_ACCMODE | os.O_SYNC))
            if flags & os.O_TRUNC:
                self.truncate(path, 0, fh)
            return fh

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        with self._lock:
            if data:
                self._grow(fh, offset + len(data))
                self._keep_pages(fh, offset, len(data))
            return super().write(path, data, offset, fh)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        with self._lock:
            if path.endswith(_DATA) and self._read_errors and self._chance.random() < self._read_errors:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(path, size, offset, fh)

    def _grow(self, fh: int, size: int) -> None:
        """Take the space that a file of this size needs beyond what it has."""
        more = max(0, size - os.fstat(fh).st_size)
        if self._capacity and more and self._used + more > self._capacity:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._used += more

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        with self._lock:
            own = os.open(self._at(path), os.O_RDWR) if fh is None else fh
            try:
                size = os.fstat(own).st_size
                if length < size:
                    self._keep_pages(own, length, size - length)
                else:
                    self._grow(own, length)
                    self._state(own)
                os.ftruncate(own, length)
                self._used -= max(0, size - length)
            finally:
                if fh is None:
                    os.close(own)
            return 0

    def fallocate(self, path: str, mode: int, offset: int, size: int, fh: int) -> int:
        with self._lock:
            self._state(fh)
            return super().fallocate(path, mode, offset, size, fh)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        if self._delay:
            time.sleep(self._delay)
        with self._lock:
            self._require_power()
            if path.endswith(self._ignored):
                return 0
            state = self._state(fh)
            if path.endswith(self._late):
                self._owed.append(partial(_synced, state, [*state.before], os.fstat(fh).st_size))
                return 0
            commits = _is_meta(path, state)
            self._syncs += 1
            if self._syncs == self._failing or self._is_triggered(path, state):
                state.lost |= state.before
                state.before.clear()
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            state.before.clear()
            state.size = os.fstat(fh).st_size
            if self._journal:
                self._directories.clear()
        if commits and self._late:
            time.sleep(_LATE)
            with self._lock:
                self._require_power()
                while self._owed:
                    self._owed.pop()()
        return 0

    def _require_power(self) -> None:
        if self._off and os.path.exists(self._off):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _is_triggered(self, path: str, state: FileState) -> bool:
        """Whether this is the sync of a meta page that is to fail, once."""
        if not self._trigger or not _is_meta(path, state):
            return False
        try:
            os.unlink(self._at(self._trigger))
        except FileNotFoundError:
            return False
        return True

    # --- names

    def _inode(self, path: str) -> int | None:
        try:
            return os.lstat(self._at(path)).st_ino
        except FileNotFoundError:
            return None

    def _change(self, path: str, old: int | None, new: int | None) -> None:
        directory, _, name = path.rpartition("/")
        self._directories.setdefault(directory or "/", []).append(Change(name, old, new))

    def _keep_inode(self, path: str) -> None:
        """A cut may bring this name back: keep its file."""
        ino = self._inode(path)
        if ino is not None and ino not in self._kept and not os.path.isdir(self._at(path)):
            self._kept[ino] = f"{self._limbo}/{ino}"
            os.link(self._at(path), self._kept[ino], follow_symlinks=False)

    def unlink(self, path: str) -> int:
        with self._lock:
            self._keep_inode(path)
            self._change(path, self._inode(path), None)
            found = os.lstat(self._at(path))
            self._used -= found.st_size if found.st_nlink <= 2 else 0  # one of them is in limbo
            return super().unlink(path)

    def rename(self, old: str, new: str) -> int:
        with self._lock:
            moved, replaced = self._inode(old), self._inode(new)
            self._keep_inode(old)
            self._keep_inode(new)
            super().rename(old, new)
            self._change(new, replaced, moved)
            self._change(old, moved, None)
            return 0

    def mkdir(self, path: str, mode: int) -> int:
        with self._lock:
            super().mkdir(path, mode)
            self._directories.pop(path, None)  # of another one, which had this name
            self._change(path, None, self._inode(path))
            return 0

    def link(self, target: str, source: str) -> int:
        with self._lock:
            super().link(target, source)
            self._change(target, None, self._inode(target))
            return 0

    def mknod(self, path: str, mode: int, dev: int) -> int:
        os.mknod(self._at(path), mode, dev)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        with self._lock:
            self._require_power()
            if "/" not in self._ignored:
                self._directories.pop(path, None)
            return 0

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._at(path))
        told = {name: getattr(found, name) for name in _SPACE}
        if self._capacity:
            free = max(0, self._capacity - self._used) // found.f_frsize
            told |= {"f_blocks": self._capacity // found.f_frsize, "f_bfree": free, "f_bavail": free}
        return told

    # --- the cut

    def destroy(self, path: str) -> None:
        """The mount is gone: the power has failed."""
        with self._lock:
            cut = PowerCut(self._source, self._limbo, self._files, self._directories)
            outcome = cut.decide(self._chance, self._flips, _DATA)
            if self._record:
                record(Path(self._record), self._source, self._limbo, outcome)
            outcome.apply(self._source, self._limbo)


def _is_meta(path: str, state: FileState) -> bool:
    """Whether a sync of this file makes a transaction of an index visible."""
    return path.endswith("index/data.mdb") and set(state.before) <= {0, 1}


def _synced(state: FileState, pages: list[int], size: int) -> None:
    """These pages are on the disk now."""
    for page in pages:
        state.before.pop(page, None)
    state.size = size


def _used(source: str) -> int:
    """Bytes of the files below."""
    return sum(os.lstat(f"{base}/{name}").st_size for base, _, names in os.walk(source) for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("mount")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="END", help="syncs of these do nothing"
    )
    parser.add_argument(
        "--late", action="append", default=[], metavar="END", help="syncs of these come after the index's"
    )
    parser.add_argument("--off", default="", metavar="FILE", help="once it is there, no sync succeeds")
    parser.add_argument("--fail-sync", type=int, default=0, metavar="N", help="the Nth sync fails")
    parser.add_argument("--delay", type=float, default=0.0, metavar="SECONDS", help="that each sync takes")
    parser.add_argument("--capacity", type=int, default=0, metavar="BYTES", help="that it has")
    parser.add_argument(
        "--read-errors", type=float, default=0.0, metavar="SHARE", help="of reads of data fail"
    )
    parser.add_argument("--flips", type=int, default=0, metavar="N", help="bits of data flip at the cut")
    parser.add_argument("--journal", action="store_true", help="a sync of any file keeps all names")
    parser.add_argument(
        "--fail-meta-sync", default="", metavar="NAME", help="of an index, once this file is there"
    )
    parser.add_argument("--record", default="", metavar="FOLDER", help="for what was before the cut")
    asked = parser.parse_args()
    limbo = f"{asked.source}.limbo"
    shutil.rmtree(limbo, ignore_errors=True)
    os.mkdir(limbo)
    try:
        FUSE(
            Forgetful(
                asked.source,
                limbo,
                seed=asked.seed,
                ignored=tuple(asked.ignore),
                late=tuple(asked.late),
                off=asked.off,
                failing=asked.fail_sync,
                delay=asked.delay,
                capacity=asked.capacity,
                read_errors=asked.read_errors,
                flips=asked.flips,
                journal=asked.journal,
                trigger=asked.fail_meta_sync,
                record=asked.record,
            ),
            asked.mount,
            foreground=True,
            fsname="forgetful",
        )
    finally:
        shutil.rmtree(limbo, ignore_errors=True)


if __name__ == "__main__":
    main()
