"""CRC-32C and CRC-64/NVME from awscrt.

Law: awscrt is imported on the first checksum. The import takes 30 ms, and a training process has nothing
to checksum before its first batch arrives.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Buffer = bytes | bytearray | memoryview


@cache
def load_awscrt() -> Any:
    """`awscrt.checksums`."""
    return import_module("awscrt.checksums")


def crc32c(data: Buffer, previous: int = 0) -> int:
    """Of the bytes whose sum is `previous`, and then `data`."""
    found: int = load_awscrt().crc32c(data, previous)
    return found


def crc64nvme(data: Buffer, previous: int = 0) -> int:
    """Of the bytes whose sum is `previous`, and then `data`."""
    found: int = load_awscrt().crc64nvme(data, previous)
    return found
