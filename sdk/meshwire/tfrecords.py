"""TFRecord shards: a record a sample, a `tf.Example` whose features are the sample's files by extension.

Law: as for tars, sizes follow from names and sizes alone. A record is length (8 bytes, little endian), masked
CRC-32C of that, the message, masked CRC-32C of the message (4 bytes each); the message is
`Example{features: Features{feature: map<string, Feature>}}`, its keys in order, each a `bytes_list` of one.
https://www.tensorflow.org/tutorials/load_data/tfrecord, tensorflow/core/example/{example,feature}.proto
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from awscrt.checksums import crc32c

from meshwire.fields import sample_key
from meshwire.shardforms import Piece, Shard, SourceObject, made, member_name, taken

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

NAME_FEATURE: Final = "__key__"
"""The sample's name: its files' without their extensions."""
DATA_FEATURE: Final = "data"
"""The file of a sample that has no extension."""
_FRAME: Final = 8 + 4 + 4
_FIRST, _SECOND = b"\x0a", b"\x12"  # length-delimited fields 1 and 2
_MASK: Final = 0xA282EAD8


def masked(crc: int) -> bytes:
    """A CRC-32C as it stands in a TFRecord: rotated and moved, so that sums of sums do not go wrong."""
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


def varint(value: int) -> bytes:
    """protobuf's base 128."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _delimited(size: int) -> int:
    """Bytes of a length-delimited field of `size` bytes, its tag and length included."""
    return 1 + max(1, -(-size.bit_length() // 7)) + size


class _Feature(NamedTuple):
    """A file, or a value made here."""

    name: bytes
    value: SourceObject | bytes

    @property
    def size(self) -> int:
        return self.value.size if isinstance(self.value, SourceObject) else len(self.value)

    def sizes(self) -> tuple[int, int, int]:
        """Of the BytesList, the Feature and the map's entry."""
        values = _delimited(self.size)
        feature = _delimited(values)
        return values, feature, _delimited(len(self.name)) + _delimited(feature)

    def pieces(self) -> Iterator[Piece]:
        values, feature, entry = self.sizes()
        head = [_FIRST, varint(entry), _FIRST, varint(len(self.name)), self.name]
        head += [_SECOND, varint(feature), _FIRST, varint(values), _FIRST, varint(self.size)]
        if isinstance(self.value, bytes):
            yield made(b"".join([*head, self.value]))
        else:
            yield made(b"".join(head))
            yield taken(self.value)


def _features(name: str, files: Iterable[tuple[str, SourceObject]]) -> list[_Feature]:
    """In order of their names; of two files of one extension the last counts, as when a tar is unpacked."""
    found: dict[str, SourceObject | bytes] = {NAME_FEATURE: name.encode()}
    found |= {sample_key(file)[1] or DATA_FEATURE: item for file, item in files}
    return [_Feature(key.encode(), found[key]) for key in sorted(found)]


def _message_size(features: Sequence[_Feature]) -> int:
    return _delimited(sum(_delimited(feature.sizes()[2]) for feature in features))


@dataclass(frozen=True)
class TfrecordShard(Shard):
    """A file of records; a sample is a unit. `firsts`: the first member of each."""

    firsts: tuple[int, ...] = field(default=(), repr=False)

    form: ClassVar[bytes] = b"tfrecord\0"

    @classmethod
    def of(cls, key: str, samples: Sequence[Sequence[SourceObject]], prefix: str) -> TfrecordShard:
        members = tuple(itertools.chain.from_iterable(samples))
        firsts = tuple(itertools.accumulate((len(files) for files in samples), initial=0))
        shard = cls(key, members, prefix, firsts=firsts)
        sizes = [_FRAME + _message_size(shard._features(number)) for number in range(len(samples))]
        starts = tuple(itertools.accumulate(sizes, initial=0))
        return cls(key, members, prefix, starts[:-1], starts[-1], firsts)

    def _features(self, number: int) -> list[_Feature]:
        files = self.members[self.firsts[number] : self.firsts[number + 1]]
        named = [(member_name(item, self.prefix), item) for item in files]
        return _features(sample_key(named[0][0])[0], named)

    def unit(self, number: int) -> Iterable[Piece]:
        features = self._features(number)
        size = _message_size(features)
        total = sum(_delimited(feature.sizes()[2]) for feature in features)
        message = [made(_FIRST + varint(total))]
        for feature in features:
            message += feature.pieces()
        length = struct.pack("<Q", size)
        yield made(length + masked(crc32c(length)))
        yield from message
        yield Piece(length=4, summed=tuple(message))
