"""Views of kind `shards`: a bucket's objects as tar files, laid out in a fixed way.

Law: a layout is a pure function of the view's document and the source's (key, ETag, size) list; the bytes of
every shard follow from it and the objects' bytes. Files of one sample (WebDataset's naming) never part.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from meshwire.documents import (
    MAX_INTEGER,
    PlanError,
    canonical_json,
    checked_integer,
    checked_number,
    checked_object,
    checked_text,
)
from meshwire.fields import sample_key
from meshwire.permutations import Feistel
from meshwire.randomness import derive_key
from meshwire.tars import BLOCK, END, member_header, padding
from meshwire.viewfields import checked_match, checked_prefix, checked_source

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DEFAULT_COUNT = 1000
_SHUFFLE, _SPLIT = 0x736869657773, 0x73706C6974
_DIGITS = 6
_UNIT = 1 << 64


@dataclass(frozen=True)
class ShardsView:
    """Objects under `prefix` whose keys end in one of `match` (empty: all), as tars of `count` samples, or of
    about `size` bytes of files (one of the two is 0).

    `shuffle`: the seed of a permutation of all samples; None keeps stored order. `split`: names and shares of
    disjoint parts, each a folder of its own; a sample's part depends on its name alone. Shards are called
    `name-000000.tar`.
    """

    source: str
    prefix: str = ""
    match: tuple[str, ...] = ()
    count: int = _DEFAULT_COUNT
    size: int = 0
    shuffle: int | None = None
    split: tuple[tuple[str, float], ...] = ()
    name: str = "shard"
    kind: Literal["shards"] = "shards"

    def to_json(self) -> bytes:
        """The canonical document."""
        document: dict[str, Any] = {
            "kind": self.kind,
            "source": self.source,
            "prefix": self.prefix,
            "match": list(self.match),
            "shuffle": self.shuffle,
            "split": dict(self.split),
            "name": self.name,
        }
        document |= {"size": self.size} if self.size else {"count": self.count}
        return canonical_json(document)

    def takes(self, key: str) -> bool:
        """Whether an object goes into a shard."""
        return key.startswith(self.prefix) and (not self.match or key.endswith(self.match))


def parse_shards(document: Mapping[str, Any], bucket: str) -> ShardsView:
    """Raises PlanError with the path of the bad field."""
    known = ("kind", "source", "prefix", "match", "count", "size", "shuffle", "split", "name")
    document = checked_object(dict(document), "", known)
    if "count" in document and "size" in document:
        raise PlanError("size", "give count (samples) or size (bytes), not both")
    size = checked_integer(document["size"], "size", 1 << 10, 1 << 50) if "size" in document else 0
    count = checked_integer(document.get("count", _DEFAULT_COUNT), "count", 1, 1 << 32)
    shuffle = document.get("shuffle")
    name = checked_text(document.get("name", "shard"), "name", at_most=64)
    if _NAME.fullmatch(name) is None:
        raise PlanError("name", "expected letters, digits, - and _")
    return ShardsView(
        checked_source(document, bucket),
        checked_prefix(document),
        checked_match(document),
        0 if size else count,
        size,
        None if shuffle is None else checked_integer(shuffle, "shuffle", 0, MAX_INTEGER),
        _parse_split(document.get("split", {})),
        name,
    )


def _parse_split(value: Any) -> tuple[tuple[str, float], ...]:
    if not isinstance(value, dict) or len(value) > 16:
        raise PlanError("split", 'expected at most 16 names with shares, as {"train": 0.9, "val": 0.1}')
    for name in value:
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise PlanError("split", f"{name!r} is no folder name of letters, digits, - and _")
    shares = tuple((name, checked_number(share, f"split.{name}", 0.0, 1.0)) for name, share in value.items())
    if shares and abs(sum(share for _, share in shares) - 1.0) > 1e-9:
        raise PlanError("split", "the shares must add up to 1")
    return tuple(sorted(shares))


# --- layouts --------------------------------------------------------------------------------------------


class SourceObject(NamedTuple):
    """An object of the source. `size` in bytes, `modified` in ms since 1970."""

    key: str
    etag: str
    size: int
    modified: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a shard: bytes made here, or `length` bytes from `offset` of an object."""

    data: bytes = b""
    object: SourceObject | None = None
    offset: int = 0
    length: int = 0


@dataclass(frozen=True)
class Shard:
    """One tar: `members` in order, each with the offset of its header; `size` in bytes, the end mark
    included."""

    key: str
    members: tuple[SourceObject, ...]
    prefix: str
    starts: tuple[int, ...] = field(default=(), repr=False)
    size: int = 0

    @classmethod
    def of(cls, key: str, members: Sequence[SourceObject], prefix: str) -> Shard:
        sizes = [_header_size(_member_name(m, prefix), m.size) + m.size + padding(m.size) for m in members]
        starts = tuple(itertools.accumulate(sizes, initial=0))
        return cls(key, tuple(members), prefix, starts, starts[-1] + len(END))

    @property
    def etag(self) -> str:
        """Changes with any member; shaped like that of a multipart object, for no MD5 of it is known."""
        hasher = hashlib.sha256(f"{self.prefix}\0".encode())
        for member in self.members:
            hasher.update(f"{member.key}\0{member.etag}\0{member.size}\0".encode())
        return f"{hasher.hexdigest()[:32]}-{max(1, len(self.members))}"

    @property
    def modified(self) -> int:
        """Of the newest member, in ms since 1970."""
        return max((member.modified for member in self.members), default=0)

    def pieces(self, offset: int, length: int) -> Iterator[Piece]:
        """The bytes [offset, offset + length) of the tar, in order; only what overlaps is worked out."""
        end = min(offset + length, self.size)
        for number in range(max(0, bisect_right(self.starts, offset) - 1), len(self.members)):
            if self.starts[number] >= end:
                return
            yield from self._member(number, offset, end)
        yield from _cut(Piece(END, length=len(END)), self.starts[-1], offset, end)

    def _member(self, number: int, offset: int, end: int) -> Iterator[Piece]:
        member, at = self.members[number], self.starts[number]
        header = member_header(_member_name(member, self.prefix), member.size)
        yield from _cut(Piece(header, length=len(header)), at, offset, end)
        yield from _cut(Piece(object=member, length=member.size), at + len(header), offset, end)
        blank = bytes(padding(member.size))
        yield from _cut(Piece(blank, length=len(blank)), at + len(header) + member.size, offset, end)


def _cut(piece: Piece, at: int, first: int, end: int) -> Iterator[Piece]:
    """What of a piece that begins at `at` lies in [first, end)."""
    start, stop = max(first, at), min(end, at + piece.length)
    if start >= stop:
        return
    skip, length = start - at, stop - start
    if piece.object is None:
        yield Piece(piece.data[skip : skip + length], length=length)
    else:
        yield Piece(object=piece.object, offset=skip, length=length)


def _member_name(member: SourceObject, prefix: str) -> str:
    """The key below the view's folder."""
    return member.key[prefix.rfind("/") + 1 :].lstrip("/") or member.key


def _header_size(name: str, size: int) -> int:
    if len(name) <= 100 and size < 1 << 32 and name.isascii():
        return BLOCK
    return len(member_header(name, size))


class ShardLayout:
    """All shards of a view, by key in order."""

    def __init__(self, shards: Iterable[Shard]) -> None:
        self.shards = {shard.key: shard for shard in sorted(shards, key=lambda shard: shard.key)}

    def __repr__(self) -> str:
        return f"<ShardLayout of {len(self.shards)} shards>"


def lay_out(view: ShardsView, objects: Iterable[SourceObject]) -> ShardLayout:
    """The layout of these objects of the source, given in key order."""
    samples = _samples(view, objects)
    parts: dict[str, list[tuple[SourceObject, ...]]] = {name: [] for name, _ in view.split or (("", 1.0),)}
    for stem, sample in samples:
        parts[part_of(view, stem)].append(sample)
    return ShardLayout(shard for part, found in parts.items() for shard in _shards(view, part, found))


def _samples(view: ShardsView, objects: Iterable[SourceObject]) -> list[tuple[str, tuple[SourceObject, ...]]]:
    """(name, files) of each sample, in the order of their first files."""
    found: dict[str, list[SourceObject]] = {}
    for item in objects:
        if view.takes(item.key):
            found.setdefault(sample_key(item.key)[0], []).append(item)
    return [(stem, tuple(files)) for stem, files in found.items()]


def part_of(view: ShardsView, stem: str) -> str:
    """The part of the split a sample belongs to: by its name, so that new data moves none."""
    if not view.split:
        return ""
    digest = hashlib.blake2b(stem.encode(), digest_size=8, key=_SPLIT.to_bytes(8, "big")).digest()
    point, bound = int.from_bytes(digest) / _UNIT, 0.0
    for name, share in view.split:
        bound += share
        if point < bound:
            return name
    return view.split[-1][0]


def shuffled(seed: int, samples: int) -> Feistel:
    """The order of so many samples of one part."""
    return Feistel(samples, derive_key(seed, _SHUFFLE))


def _shards(view: ShardsView, part: str, samples: Sequence[tuple[SourceObject, ...]]) -> Iterator[Shard]:
    order: Iterable[int] = range(len(samples))
    if view.shuffle is not None:
        permutation = shuffled(view.shuffle, len(samples))
        order = (permutation.one(position) for position in range(len(samples)))
    folder = f"{part}/" if part else ""
    for number, members in enumerate(_filled(view, (samples[index] for index in order))):
        yield Shard.of(f"{folder}{shard_name(view, number)}.tar", members, view.prefix)


def shard_name(view: ShardsView, number: int) -> str:
    """The name of a part's shard, without folder and ending."""
    return f"{view.name}-{number:0{_DIGITS}d}"


def _filled(view: ShardsView, samples: Iterable[tuple[SourceObject, ...]]) -> Iterator[list[SourceObject]]:
    """Samples until a shard has its count, or its size."""
    members: list[SourceObject] = []
    count = size = 0
    for sample in samples:
        members += sample
        count += 1
        size += sum(item.size for item in sample)
        if count == view.count or (view.size and size >= view.size):
            yield members
            members, count, size = [], 0, 0
    if members:
        yield members
