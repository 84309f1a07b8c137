"""A reader of TFRecords and `tf.Example` that shares nothing with the writer."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def _shifted(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


TABLE = [_shifted(byte) for byte in range(256)]


@lru_cache(maxsize=256)  # by content: readers see the same records again and again
def crc_by_table(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def check_mask(stored: bytes, data: bytes) -> None:
    """Undo the mask: `rotated = (m - delta) mod 2³²`, then rotate left by 15."""
    rotated = (struct.unpack("<I", stored)[0] - 0xA282EAD8) % (1 << 32)
    assert ((rotated >> 17) | (rotated << 15)) & 0xFFFFFFFF == crc_by_table(data)


def records(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        check_mask(data[at + 8 : at + 12], data[at : at + 8])
        body = data[at + 12 : at + 12 + size]
        check_mask(data[at + 12 + size : at + 16 + size], body)
        yield body
        at += 16 + size
    assert at == len(data)


def message(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(field number, bytes) of length-delimited fields."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        tag = number()
        assert tag & 7 == 2
        size = number()
        assert at + size <= len(data)
        yield tag >> 3, data[at : at + size]
        at += size


def one(data: bytes, field: int) -> bytes:
    ((number, value),) = message(data)
    assert number == field
    return value


def features(data: bytes) -> dict[str, bytes | int | float]:
    """The one value of each feature of a `tf.Example`."""
    found: dict[str, bytes | int | float] = {}
    for field, entry in message(one(data, 1)):
        assert field == 1
        (key_field, key), (value_field, feature) = message(entry)
        assert (key_field, value_field) == (1, 2)
        ((kind, values),) = message(feature)
        found[key.decode()] = _VALUES[kind](one(values, 1))
    return found


def example(data: bytes) -> dict[str, bytes]:
    """The features of one that has bytes only."""
    found = features(data)
    assert all(isinstance(value, bytes) for value in found.values())
    return {name: value for name, value in found.items() if isinstance(value, bytes)}


def _number(data: bytes) -> int:
    assert [byte >= 0x80 for byte in data] == [True] * (len(data) - 1) + [False]
    value = sum((byte & 0x7F) << 7 * group for group, byte in enumerate(data))
    return value - (1 << 64) if value >= 1 << 63 else value


_VALUES: dict[int, Callable[[bytes], bytes | int | float]] = {
    1: bytes,
    2: lambda data: float(struct.unpack("<f", data)[0]),
    3: _number,
}
