"""Writes TFRecords of `tf.Example` as TensorFlow does, for tests and examples.

Law: shares the frame checksum with the readers and nothing else.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from awscrt.checksums import crc32c

from meshwire.formats.shard_encoding import encode_varint, masked_crc

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class BytesList:
    values: Sequence[bytes]

    def feature(self) -> bytes:
        return _field(1, b"".join(_field(1, value) for value in self.values))


@dataclass(frozen=True)
class FloatList:
    values: Sequence[float]

    def feature(self, *, packed: bool = True) -> bytes:
        numbers = [struct.pack("<f", value) for value in self.values]
        return _field(2, _field(1, b"".join(numbers)) if packed else b"".join(b"\x0d" + n for n in numbers))


@dataclass(frozen=True)
class Int64List:
    values: Sequence[int]

    def feature(self, *, packed: bool = True) -> bytes:
        numbers = [encode_varint(value % (1 << 64)) for value in self.values]
        return _field(3, _field(1, b"".join(numbers)) if packed else b"".join(b"\x08" + n for n in numbers))


def _field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2]) + encode_varint(len(value)) + value


def example(features: Mapping[str, BytesList | FloatList | Int64List | bytes]) -> bytes:
    """A `tf.Example`; bytes stand for a Feature message as it is."""
    entries = []
    for name, values in features.items():
        feature = values if isinstance(values, bytes) else values.feature()
        entries.append(_field(1, _field(1, name.encode()) + _field(2, feature)))
    return _field(1, b"".join(entries))


def record(message: bytes) -> bytes:
    """A record of a file of TFRecords."""
    length = struct.pack("<Q", len(message))
    return length + masked_crc(crc32c(length)) + message + masked_crc(crc32c(message))
