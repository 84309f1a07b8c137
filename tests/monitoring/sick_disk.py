"""A file system over a directory that fails as a disk does, while a file in that directory says so: `slow`,
each fsync takes longer; `broken`, each is an error of the device.

`python -m tests.monitoring.sick_disk SOURCE MOUNT` serves it until unmounted (tests.support.fuse_mount)."""

from __future__ import annotations

import errno
import os
import sys
import time

from mfusepy import FUSE

from tests.support.fuse_file_system import PassThrough

SECONDS = 1.5  # of a slow fsync


class SickDisk(PassThrough):
    """PassThrough with an fsync that is slow, or fails: of data files only, since the index would end the
    process."""

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        if os.path.exists(self._at("/slow")):
            time.sleep(SECONDS)
        if os.path.exists(self._at("/broken")) and path.endswith(".tar"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().fsync(path, datasync, fh)


def main() -> None:
    source, mount = sys.argv[1:]
    FUSE(SickDisk(source), mount, foreground=True, fsname="sick", nothreads=False)


if __name__ == "__main__":
    main()
