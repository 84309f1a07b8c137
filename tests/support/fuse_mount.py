"""Mounts the file system of `fuse_file_system`, from a process of its own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from ctypes.util import find_library
from typing import TYPE_CHECKING

from tests.support.required import missing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def require_fuse() -> None:
    """File systems in user space can be mounted; skips the module where not, fails in CI."""
    if not os.path.exists("/dev/fuse") or os.geteuid() != 0 or shutil.which("umount") is None:
        missing("fuse", "these tests take root and /dev/fuse")
    if importlib.util.find_spec("mfusepy") is None:
        missing("mfusepy", "pip install mfusepy")
    if find_library("fuse3") is None:
        missing("libfuse3", "apt install libfuse3-3")


@contextmanager
def mounted(source: Path, mount: Path, *options: str, module: str = "") -> Iterator[int]:
    """Serve `source` at `mount` from a process of its own, whose id this is; unmounted and ended afterwards.
    `module`: another file system than `fuse_file_system`."""
    served_by = module or "tests.support.fuse_file_system"
    command = [sys.executable, "-m", served_by, str(source), str(mount), *options]
    with subprocess.Popen(command) as process:
        try:
            end = time.monotonic() + 30
            while not os.path.ismount(mount):
                assert process.poll() is None, "the file system did not start"
                assert time.monotonic() < end, "the file system was not mounted in time"
                time.sleep(0.05)
            yield process.pid
        finally:
            # By force, since a mount namespace that another process has made meanwhile has the mount, too.
            subprocess.run(["umount", "-f", "-l", str(mount)], check=False, timeout=30)
            try:
                process.wait(timeout=120)
            except subprocess.TimeoutExpired:  # a file of it is still open
                process.kill()
                raise
