"""crc32c and crc64nvme by awscrt, which is loaded with the first sum: that takes 30 ms, and a training
process has nothing to sum before its first batch is there.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Buffer = bytes | bytearray | memoryview


@cache
def library() -> Any:
    """`awscrt.checksums`."""
    return import_module("awscrt.checksums")


def crc32c(data: Buffer, previous: int = 0) -> int:
    """Of the bytes whose sum is `previous`, and then `data`."""
    found: int = library().crc32c(data, previous)
    return found


def crc64nvme(data: Buffer, previous: int = 0) -> int:
    """Of the bytes whose sum is `previous`, and then `data`."""
    found: int = library().crc64nvme(data, previous)
    return found
