"""TFRecord shards: a record a sample, a `tf.Example` whose features are the sample's files by extension.

Law: as for tars, sizes follow from names and sizes alone. A record is length (8 bytes, little endian), masked
CRC-32C of that, the message, masked CRC-32C of the message (4 bytes each); the message is
`Example{features: Features{feature: map<string, Feature>}}`, its keys in order, each a list of one: of bytes,
or, where the view says so, of the number that a file spells. An int64 takes ten bytes whatever it is (a
varint may end with idle groups), so that numbers have a size without being read.
https://www.tensorflow.org/tutorials/load_data/tfrecord, tensorflow/core/example/{example,feature}.proto
"""

from __future__ import annotations

import itertools
import math
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from meshwire.crcs import crc32c
from meshwire.documents import shown
from meshwire.fields import sample_key
from meshwire.shardforms import Piece, Shard, SourceObject, made, member_name, taken

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

NAME_FEATURE: Final = "__key__"
"""The sample's name: its files' without their extensions."""
DATA_FEATURE: Final = "data"
"""The file of a sample that has no extension."""
_FRAME: Final = 8 + 4 + 4
_FIRST, _SECOND, _THIRD = b"\x0a", b"\x12", b"\x1a"  # length-delimited fields
_LISTS: Final = {"": _FIRST, "float": _SECOND, "int64": _THIRD}
_LENGTHS: Final = {"float": 4, "int64": 10}
MAX_NUMBER: Final = 64
"""Bytes of a file that spells a number."""
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


class NumberError(ValueError):
    """A file that spells no number of its kind."""


def converted(kind: str, text: bytes) -> bytes:
    """The number a file spells (decimal, white space around it is fine) as a `float` (little endian) or an
    `int64` (a varint of ten bytes). Raises NumberError."""
    spelt = text.strip()
    try:
        if len(spelt) > MAX_NUMBER or b"_" in spelt:
            raise NumberError
        return _float(float(spelt)) if kind == "float" else _int64(int(spelt))
    except (ValueError, OverflowError) as error:
        raise NumberError(f"{shown(spelt)} is no {kind}") from error


def _float(number: float) -> bytes:
    if not math.isfinite(number):
        raise NumberError
    return struct.pack("<f", number)


def _int64(number: int) -> bytes:
    if not -(1 << 63) <= number < 1 << 63:
        raise NumberError
    number %= 1 << 64
    return bytes((number >> 7 * group & 0x7F) | (0x80 if group < 9 else 0) for group in range(10))


def _delimited(size: int) -> int:
    """Bytes of a length-delimited field of `size` bytes, its tag and length included."""
    return 1 + max(1, -(-size.bit_length() // 7)) + size


class _Feature(NamedTuple):
    """A file (as the number that it spells, where `kind` says so), or a value made here."""

    name: bytes
    value: SourceObject | bytes
    kind: str = ""

    @property
    def size(self) -> int:
        if self.kind:
            return _LENGTHS[self.kind]
        return self.value.size if isinstance(self.value, SourceObject) else len(self.value)

    def sizes(self) -> tuple[int, int, int]:
        """Of the list, the Feature and the map's entry."""
        values = _delimited(self.size)
        feature = _delimited(values)
        return values, feature, _delimited(len(self.name)) + _delimited(feature)

    def pieces(self) -> Iterator[Piece]:
        values, feature, entry = self.sizes()
        head = [_FIRST, varint(entry), _FIRST, varint(len(self.name)), self.name]
        head += [_SECOND, varint(feature), _LISTS[self.kind], varint(values)]
        head += [_FIRST, varint(self.size)]
        if isinstance(self.value, bytes):
            yield made(b"".join([*head, self.value]))
        else:
            yield made(b"".join(head))
            number = Piece(object=self.value, length=self.size, told=self.kind)
            yield number if self.kind else taken(self.value)


def _features(
    name: str, files: Iterable[tuple[str, SourceObject]], kinds: Mapping[str, str]
) -> list[_Feature]:
    """In order of their names; of two files of one extension the last counts, as when a tar is unpacked."""
    found: dict[str, SourceObject | bytes] = {NAME_FEATURE: name.encode()}
    found |= {sample_key(file)[1] or DATA_FEATURE: item for file, item in files}
    return [_Feature(key.encode(), found[key], kinds.get(key, "")) for key in sorted(found)]


def _message_size(features: Sequence[_Feature]) -> int:
    return _delimited(sum(_delimited(feature.sizes()[2]) for feature in features))


@dataclass(frozen=True)
class TfrecordShard(Shard):
    """A file of records; a sample is a unit. `firsts`: the first member of each; `kinds`: extensions of files
    that spell numbers, with `int64` or `float`."""

    firsts: tuple[int, ...] = field(default=(), repr=False)
    kinds: tuple[tuple[str, str], ...] = ()

    @property
    def form(self) -> bytes:
        return b"tfrecord\0" + "".join(f"{name}={kind}\0" for name, kind in self.kinds).encode()

    @classmethod
    def of(
        cls,
        key: str,
        samples: Sequence[Sequence[SourceObject]],
        prefix: str,
        kinds: tuple[tuple[str, str], ...] = (),
    ) -> TfrecordShard:
        members = tuple(itertools.chain.from_iterable(samples))
        firsts = tuple(itertools.accumulate((len(files) for files in samples), initial=0))
        shard = cls(key, members, prefix, firsts=firsts, kinds=kinds)
        sizes = [_FRAME + _message_size(shard._features(number)) for number in range(len(samples))]
        starts = tuple(itertools.accumulate(sizes, initial=0))
        return cls(key, members, prefix, starts[:-1], starts[-1], firsts, kinds)

    def _features(self, number: int) -> list[_Feature]:
        files = self.members[self.firsts[number] : self.firsts[number + 1]]
        named = [(member_name(item, self.prefix), item) for item in files]
        return _features(sample_key(named[0][0])[0], named, dict(self.kinds))

    def of_others(self, members: Sequence[SourceObject]) -> TfrecordShard:
        samples = [members[first:end] for first, end in itertools.pairwise(self.firsts)]
        return TfrecordShard.of(self.key, samples, self.prefix, self.kinds)

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
