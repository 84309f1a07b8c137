"""A file system in user space above a directory, as odd as some real ones: it tells
no size and has no Unix sockets. `python -m tests.support.fuse_file_system SOURCE MOUNT [OPTION[=VALUE]]…`
serves it until unmounted, with these options of a mount. It needs root, /dev/fuse and libfuse 3.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

from mfusepy import FUSE, Operations

_FIELDS = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_ino", "st_blocks")
_TIMES = ("st_atime", "st_mtime", "st_ctime")


class PassThrough(Operations):  # type: ignore[misc]
    """The operations of mfusepy over the files below `source`. File handles are descriptors. `mknod`, which
    makes sockets, is not among them, and neither is `statfs`: the answers are ENOSYS and zeros."""

    use_ns = True

    def __init__(self, source: str) -> None:
        self._source = source.rstrip("/")

    def _at(self, path: str) -> str:
        return self._source + path

    def init_with_config(self, conn: Any, config: Any) -> None:
        """Remove files at once when they are unlinked, open ones too, and keep the source's inode numbers."""
        config.hard_remove = 1
        config.use_ino = 1

    def getattr(self, path: str | None, fh: int | None = None) -> dict[str, int]:
        found = os.fstat(fh) if fh is not None else os.lstat(self._at(path or ""))
        attributes: dict[str, int] = {name: getattr(found, name) for name in _FIELDS}
        return attributes | {name: getattr(found, f"{name}_ns") for name in _TIMES}

    def readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, int], int]]:
        place = self._at(path)
        names = [".", "..", *os.listdir(place)]
        found = [(name, os.lstat(f"{place}/{name}")) for name in names]
        return [(name, {"st_mode": each.st_mode, "st_ino": each.st_ino}, 0) for name, each in found]

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._at(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._at(path))
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._at(path))
        return 0

    def rename(self, old: str, new: str) -> int:
        os.rename(self._at(old), self._at(new))
        return 0

    def link(self, target: str, source: str) -> int:
        os.link(self._at(source), self._at(target))
        return 0

    def symlink(self, target: str, source: str) -> int:
        os.symlink(source, self._at(target))
        return 0

    def readlink(self, path: str) -> str:
        return os.readlink(self._at(path))

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._at(path), mode)
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        os.chown(self._at(path), uid, gid, follow_symlinks=False)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        if times is None:
            os.utime(self._at(path), follow_symlinks=False)
        else:
            os.utime(self._at(path), ns=times, follow_symlinks=False)
        return 0

    def open(self, path: str, flags: int) -> int:
        return os.open(self._at(path), flags & ~os.O_APPEND)

    def create(self, path: str, mode: int, fi: object = None) -> int:
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._at(path) if fh is None else fh, length)
        return 0

    def fallocate(self, path: str, mode: int, offset: int, size: int, fh: int) -> int:
        if mode:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        os.posix_fallocate(fh, offset, size)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        (os.fdatasync if datasync else os.fsync)(fh)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0


def main() -> None:
    source, mount, *given = sys.argv[1:]
    options = {name: value or True for name, _, value in (each.partition("=") for each in given)}
    FUSE(PassThrough(source), mount, foreground=True, fsname="odd", nothreads=False, **options)


if __name__ == "__main__":
    main()
