"""CRC-32 from zlib-ng, CRC-32C and CRC-64/NVME from awscrt.

Law: the libraries are imported with the first checksum. awscrt takes 30 ms, and a training process has
nothing to checksum before its first batch arrives.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Buffer = bytes | bytearray | memoryview


@cache
def load_awscrt() -> Any:
    """Import and return `awscrt.checksums`."""
    return import_module("awscrt.checksums")


@cache
def _load_zlib_ng() -> Any:
    return import_module("zlib_ng.zlib_ng")


def crc32(data: Buffer, previous: int = 0) -> int:
    """Return the CRC-32 of `data`, continuing from the checksum `previous` of the bytes before it."""
    found: int = _load_zlib_ng().crc32(data, previous)
    return found


def crc32c(data: Buffer, previous: int = 0) -> int:
    """Return the CRC-32C of `data`, continuing from the checksum `previous` of the bytes before it."""
    found: int = load_awscrt().crc32c(data, previous)
    return found


def crc64nvme(data: Buffer, previous: int = 0) -> int:
    """Return the CRC-64/NVME of `data`, continuing from the checksum `previous` of the bytes before it."""
    found: int = load_awscrt().crc64nvme(data, previous)
    return found
