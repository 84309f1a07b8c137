"""Shard encoding: the pieces that make up any range of a tar or TFRecord shard.

Law: sizes and ETags follow from the members' names, sizes and ETags; only the requested bytes of a shard
are computed. A TFRecord is one `tf.Example` with the sample's files as features by extension. An int64
feature always takes ten bytes, so sizes are known without reading the file.
https://www.tensorflow.org/tutorials/load_data/tfrecord, tensorflow/core/example/{example,feature}.proto
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from meshwire.checksums.crc import crc32c
from meshwire.dataset.fields import sample_key
from meshwire.formats.tar import BLOCK, END, padding, tar_member_header
from meshwire.strict_json import shown_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


class SourceObject(NamedTuple):
    """A file of the source: an object, or the `size` bytes from `offset` within one, which are the archive
    member `name`. `modified` in ms since 1970.
    """

    key: str
    etag: str
    size: int
    modified: int = 0
    name: str = ""
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a shard: `length` bytes of generated `data`, from `offset` of an object, from `offset` of a
    whole file converted to a number (`told`), or from `offset` of the masked CRC-32C of other pieces
    (`summed`)."""

    data: bytes = b""
    object: SourceObject | None = None
    offset: int = 0
    length: int = 0
    summed: tuple[Piece, ...] = ()
    told: str = ""


def literal_piece(data: bytes) -> Piece:
    return Piece(data, length=len(data))


def object_piece(item: SourceObject) -> Piece:
    """Return a piece that is a whole file."""
    return Piece(object=item, offset=item.offset, length=item.size)


def cut_piece(piece: Piece, at: int, first: int, end: int) -> Iterator[Piece]:
    """Yield the part within [first, end) of a piece that starts at `at`."""
    start, stop = max(first, at), min(end, at + piece.length)
    if start >= stop:
        return
    skip, length = start - at, stop - start
    if length == piece.length:
        yield piece
    elif piece.object is None and not piece.summed:
        yield Piece(piece.data[skip : skip + length], length=length)
    else:
        yield replace(piece, offset=piece.offset + skip, length=length)


def member_name(member: SourceObject, prefix: str) -> str:
    """Return the name of a file in a shard: its key below the view's folder, or its name in the archive
    that holds it."""
    return member.name or member.key[prefix.rfind("/") + 1 :].lstrip("/") or member.key


@dataclass(frozen=True)
class Shard:
    """One shard: `members` in order, in units (of one or several members) that start at `starts`; `size` in
    bytes."""

    key: str
    members: tuple[SourceObject, ...]
    prefix: str
    starts: tuple[int, ...] = field(default=(), repr=False)
    size: int = 0

    content_type: ClassVar[str] = "application/octet-stream"

    @property
    def form(self) -> bytes:
        """What determines the bytes besides the members."""
        return b""

    @cached_property
    def etag(self) -> str:
        """ETag that changes with any member; it has the form of a multipart ETag because no MD5 is known."""
        hasher = hashlib.sha256(self.form + f"{self.prefix}\0".encode())
        for member in self.members:
            hasher.update(f"{member.key}\0{member.etag}\0{member.size}\0".encode())
            if member.name:
                hasher.update(f"{member.name}\0{member.offset}\0".encode())
        return f"{hasher.hexdigest()[:32]}-{max(1, len(self.members))}"

    @cached_property
    def modified(self) -> int:
        """Modification time of the newest member, in ms since 1970."""
        return max((member.modified for member in self.members), default=0)

    def pieces(self, offset: int, length: int) -> Iterator[Piece]:
        """Yield the pieces of the bytes [offset, offset + length) of the shard, in order."""
        end = min(offset + length, self.size)
        for number in range(max(0, bisect_right(self.starts, offset) - 1), len(self.starts)):
            at = self.starts[number]
            if at >= end:
                return
            for piece in self.unit_pieces(number):
                yield from cut_piece(piece, at, offset, end)
                at += piece.length

    def unit_pieces(self, number: int) -> Iterable[Piece]:
        """Return the pieces from `starts[number]` to the next start."""
        raise NotImplementedError

    def with_members(self, members: Sequence[SourceObject]) -> Shard:
        """Return the same shard with other members in place of these."""
        raise NotImplementedError


class TarShard(Shard):
    """A tar, including its end-of-archive marker. Each member is a unit, and so is the end marker."""

    content_type: ClassVar[str] = "application/x-tar"

    @classmethod
    def from_members(cls, key: str, members: Sequence[SourceObject], prefix: str) -> TarShard:
        sizes = [_member_size(member_name(member, prefix), member.size) for member in members]
        starts = tuple(itertools.accumulate(sizes, initial=0))
        return cls(key, tuple(members), prefix, starts, starts[-1] + len(END))

    def with_members(self, members: Sequence[SourceObject]) -> TarShard:
        return TarShard.from_members(self.key, members, self.prefix)

    def unit_pieces(self, number: int) -> Iterable[Piece]:
        if number == len(self.members):
            return (literal_piece(END),)
        member = self.members[number]
        header = tar_member_header(member_name(member, self.prefix), member.size)
        return literal_piece(header), object_piece(member), literal_piece(bytes(padding(member.size)))


def _member_size(name: str, size: int) -> int:
    """Return the bytes of header, file and padding."""
    if len(name) <= 100 and size < 1 << 32 and name.isascii():
        return BLOCK + size + -size % BLOCK
    return len(tar_member_header(name, size)) + size + padding(size)


NAME_FEATURE: Final = "__key__"
"""The name of the sample: the common stem of its files."""
DATA_FEATURE: Final = "data"
"""Feature name of a file without an extension."""
_FRAME: Final = 8 + 4 + 4
_FIRST, _SECOND, _THIRD = b"\x0a", b"\x12", b"\x1a"  # length-delimited fields
_LISTS: Final = {"": _FIRST, "float": _SECOND, "int64": _THIRD}
_LENGTHS: Final = {"float": 4, "int64": 10}
MAX_NUMBER: Final = 64
"""Maximum bytes of a file that contains a number as text."""
_MASK: Final = 0xA282EAD8


def masked_crc(crc: int) -> bytes:
    """Mask a CRC-32C as TFRecord requires: rotated and offset, so that a CRC of data that contains CRCs
    stays sound."""
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


def encode_varint(value: int) -> bytes:
    """Encode a protobuf base-128 varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class NumberError(ValueError):
    """A file does not contain a number of its kind."""


def convert_number(kind: str, text: bytes) -> bytes:
    """Convert the number in a file (decimal text, surrounding white space allowed) to a `float` (little
    endian) or an `int64` (a varint of ten bytes). Raises NumberError."""
    spelt = text.strip()
    try:
        if len(spelt) > MAX_NUMBER or b"_" in spelt:
            raise NumberError
        return _float(float(spelt)) if kind == "float" else _int64(int(spelt))
    except (ValueError, OverflowError) as error:
        raise NumberError(f"{shown_value(spelt)} is not a valid {kind}") from error


def _float(number: float) -> bytes:
    if not math.isfinite(number):
        raise NumberError
    return struct.pack("<f", number)


def _int64(number: int) -> bytes:
    if not -(1 << 63) <= number < 1 << 63:
        raise NumberError
    number %= 1 << 64
    return bytes((number >> 7 * group & 0x7F) | (0x80 if group < 9 else 0) for group in range(10))


def _delimited_size(size: int) -> int:
    """Return the bytes of a length-delimited field of `size` bytes, including tag and length."""
    return 1 + max(1, -(-size.bit_length() // 7)) + size


class _Feature(NamedTuple):
    """A feature: a file (converted to a number if `kind` is set), or a generated value."""

    name: bytes
    value: SourceObject | bytes
    kind: str = ""

    @property
    def size(self) -> int:
        if self.kind:
            return _LENGTHS[self.kind]
        return self.value.size if isinstance(self.value, SourceObject) else len(self.value)

    def sizes(self) -> tuple[int, int, int]:
        """Return the sizes of the list, the Feature and the map entry."""
        values = _delimited_size(self.size)
        feature = _delimited_size(values)
        return values, feature, _delimited_size(len(self.name)) + _delimited_size(feature)

    def pieces(self) -> Iterator[Piece]:
        values, feature, entry = self.sizes()
        head = [_FIRST, encode_varint(entry), _FIRST, encode_varint(len(self.name)), self.name]
        head += [_SECOND, encode_varint(feature), _LISTS[self.kind], encode_varint(values)]
        head += [_FIRST, encode_varint(self.size)]
        if isinstance(self.value, bytes):
            yield literal_piece(b"".join([*head, self.value]))
        else:
            yield literal_piece(b"".join(head))
            number = Piece(object=self.value, length=self.size, told=self.kind)
            yield number if self.kind else object_piece(self.value)


def _features(
    name: str, files: Iterable[tuple[str, SourceObject]], kinds: Mapping[str, str]
) -> list[_Feature]:
    """Return the features in order of name; of two files with the same extension the last counts, as when
    unpacking a tar."""
    found: dict[str, SourceObject | bytes] = {NAME_FEATURE: name.encode()}
    found |= {sample_key(file)[1] or DATA_FEATURE: item for file, item in files}
    return [_Feature(key.encode(), found[key], kinds.get(key, "")) for key in sorted(found)]


def _message_size(features: Sequence[_Feature]) -> int:
    return _delimited_size(sum(_delimited_size(feature.sizes()[2]) for feature in features))


@dataclass(frozen=True)
class TfrecordShard(Shard):
    """A TFRecord file; each sample is a unit. `firsts`: the first member of each sample; `kinds`:
    extensions of files that contain numbers as text, each with `int64` or `float`."""

    firsts: tuple[int, ...] = field(default=(), repr=False)
    kinds: tuple[tuple[str, str], ...] = ()

    @property
    def form(self) -> bytes:
        return b"tfrecord\0" + "".join(f"{name}={kind}\0" for name, kind in self.kinds).encode()

    @classmethod
    def from_samples(
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

    def with_members(self, members: Sequence[SourceObject]) -> TfrecordShard:
        samples = [members[first:end] for first, end in itertools.pairwise(self.firsts)]
        return TfrecordShard.from_samples(self.key, samples, self.prefix, self.kinds)

    def unit_pieces(self, number: int) -> Iterable[Piece]:
        features = self._features(number)
        size = _message_size(features)
        total = sum(_delimited_size(feature.sizes()[2]) for feature in features)
        message = [literal_piece(_FIRST + encode_varint(total))]
        for feature in features:
            message += feature.pieces()
        length = struct.pack("<Q", size)
        yield literal_piece(length + masked_crc(crc32c(length)))
        yield from message
        yield Piece(length=4, summed=tuple(message))
