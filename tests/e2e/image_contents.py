"""Checks that run inside an image, as its user, with what the image has: no pytest there.

`image_daemon.py` and `image_operator.py` are the programs.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pkgutil
import pwd
import subprocess
import sys
import sysconfig
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# No image has the libraries of training scripts, which adapters import, nor the reader of Parquet.
ABSENT = ("torch", "pyarrow", "pynvml")
SKIPPED = "meshsdk.adapters."
PATIENCE = 60.0


def import_everything(packages: Sequence[str]) -> int:
    """Import every module of the packages; return their number. Raises ImportError."""
    names = [
        module.name
        for package in packages
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
        if not module.name.endswith("__main__") and not module.name.startswith(SKIPPED)
    ]
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ABSENT:
                raise
    return len(names)


def load_libraries() -> int:
    """Load every shared library of the wheels and of Python; return their number. Raises OSError."""
    packages, dynamic = Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("stdlib"), "lib-dynload")
    found = [path for kind in ("*.so", "*.so.*") for path in (*packages.rglob(kind), *dynamic.glob(kind))]
    for path in found:
        ctypes.CDLL(str(path))
    return len(found)


def identity() -> dict[str, Any]:
    """Return the user of this process. Raises KeyError if it has no name."""
    user = pwd.getpwuid(os.getuid())
    return {"uid": os.getuid(), "gid": os.getgid(), "name": user.pw_name}


@contextmanager
def started(command: Sequence[str], env: Mapping[str, str]) -> Iterator[None]:
    """A process of the image. Raises RuntimeError if it ends early, or not with status 0 after SIGTERM."""
    process = subprocess.Popen(command, env={**os.environ, **env}, stdout=sys.stderr)
    try:
        yield
        ended = process.poll()
    finally:
        process.terminate()
        status = process.wait(PATIENCE)
    if ended is not None or status != 0:
        raise RuntimeError(f"{' '.join(command)} ended with status {status}")


def until_answered(url: str) -> str:
    """Wait until the URL answers with status 200; return the body. Raises RuntimeError."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                return str(response.read().decode())
        except OSError as error:
            if time.monotonic() > end:
                raise RuntimeError(f"{url}: {error}") from error
            time.sleep(0.1)
