"""Views of kind `shards`: their documents, and the layout of samples as tar or TFRecord shards.

Law: a layout is a pure function of the document, the source's files (key, ETag, size) and, if its
expressions read files, their bytes; the bytes of every shard follow. The files of a sample stay in one
shard.
Law: a field with its default value is not written, so old documents keep their meaning when fields are
added.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import numpy as np

from meshwire.dataset.archive_paths import archive_kind
from meshwire.dataset.expression_parser import format_value, parse_expression, sort_key
from meshwire.formats.shard_encoding import TarShard, TfrecordShard
from meshwire.http_values.percent_encoding import encode
from meshwire.plan.keyed_random import derive_key
from meshwire.plan.shuffle import Feistel
from meshwire.strict_json import (
    MAX_INTEGER,
    PlanError,
    canonical_json,
    checked_choice,
    checked_integer,
    checked_number,
    checked_object,
    checked_text,
    join_path,
)
from meshwire.views.sample_groups import EXPRESSION_NAMES, Evaluation, check_names, group_samples
from meshwire.views.view_fields import checked_match, checked_prefix, checked_source

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from meshwire.dataset.expression_parser import Value
    from meshwire.formats.shard_encoding import Shard, SourceObject
    from meshwire.views.sample_groups import Sample


Format = Literal["tar", "tfrecord"]
Samples = Literal["objects", "archives"]
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DEFAULT_COUNT = 1000
_SHUFFLE, _SPLIT = 0x736869657773, 0x73706C6974
_DIGITS = 6
_UNIT = 1 << 64
_EXPRESSIONS: Final = ("where", "group", "sort", "split_by")


@dataclass(frozen=True)
class ShardsView:
    """Objects under `prefix` whose keys end in one of `match` (empty: all), in shards of `count` samples,
    or of about `size` bytes of files (one of the two is 0).

    `shuffle`: the seed of a permutation of all samples; None keeps stored order. `split`: names and shares
    of disjoint parts, each a folder of its own; a sample's part depends only on its name. Shards are named
    `name-000000.tar` (or `.tfrecord`, by `format`).

    Expressions over a sample (`meshwire.views.sample_groups`), empty if not used: `where` excludes samples
    for which it is false; `group`: one folder per value; `sort`: order by value; `split_by`: samples with the
    same value are in the same part. `samples` "archives": the samples are members of archives instead of
    objects, and `match` applies to members. `features`: extensions of files that contain a number as text,
    with `int64` or `float`: their type in a TFRecord.
    """

    source: str
    prefix: str = ""
    match: tuple[str, ...] = ()
    count: int = _DEFAULT_COUNT
    size: int = 0
    shuffle: int | None = None
    split: tuple[tuple[str, float], ...] = ()
    name: str = "shard"
    format: Format = "tar"
    samples: Samples = "objects"
    where: str = ""
    group: str = ""
    sort: str = ""
    split_by: str = ""
    features: tuple[tuple[str, str], ...] = ()
    kind: Literal["shards"] = "shards"

    def to_json(self) -> bytes:
        """Encode the canonical document."""
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
        later = {"format": "tar", "samples": "objects", **dict.fromkeys(_EXPRESSIONS, "")}
        document |= {key: getattr(self, key) for key in later if getattr(self, key) != later[key]}
        document |= {"features": dict(self.features)} if self.features else {}
        return canonical_json(document)

    def includes_key(self, key: str) -> bool:
        """Whether an object belongs to the view: as a file, or as an archive of files."""
        if not key.startswith(self.prefix):
            return False
        return archive_kind(key) is not None if self.samples == "archives" else self.includes_file(key)

    def includes_file(self, name: str) -> bool:
        """Whether a file with this key, or name in its archive, goes into a shard."""
        return not self.match or name.endswith(self.match)

    @property
    def expression_names(self) -> frozenset[str]:
        """All names in the expressions."""
        texts = [text for text in (self.where, self.group, self.sort, self.split_by) if text]
        return frozenset(name for text in texts for name in parse_expression(text).names)

    @property
    def reads_files(self) -> bool:
        """Whether an expression reads the content of files."""
        return bool(self.expression_names.difference(EXPRESSION_NAMES))

    @property
    def keeps_positions(self) -> bool:
        """Whether a replaced object keeps its position in the layout, whatever its new content."""
        return (
            self.samples == "objects"
            and not self.size
            and self.expression_names <= {"key", "stem", "ext", "files"}
        )


_KNOWN = (
    *("kind", "source", "prefix", "match", "count", "size", "shuffle", "split", "name"),
    *("format", "samples", "features", *_EXPRESSIONS),
)


def parse_shards(document: Mapping[str, Any], bucket: str) -> ShardsView:
    """Parse a document. Raises PlanError with the path of the bad field."""
    document = checked_object(dict(document), "", _KNOWN)
    if "count" in document and "size" in document:
        raise PlanError("size", "give count (samples) or size (bytes), not both")
    size = checked_integer(document["size"], "size", 1 << 10, 1 << 50) if "size" in document else 0
    count = checked_integer(document.get("count", _DEFAULT_COUNT), "count", 1, 1 << 32)
    shuffle = document.get("shuffle")
    name = checked_text(document.get("name", "shard"), "name", at_most=64)
    if _NAME.fullmatch(name) is None:
        raise PlanError("name", "expected letters, digits, - and _")
    split = _parse_split(document.get("split", {}))
    where, group, sort, split_by = [_parse_expression(document, field) for field in _EXPRESSIONS]
    if sort and shuffle is not None:
        raise PlanError("sort", "samples can be sorted or shuffled, not both; leave out sort or shuffle")
    if split_by and not split:
        raise PlanError(
            "split_by", 'split_by needs the parts as well: set split, such as {"train": 0.9, "val": 0.1}'
        )
    form = cast("Format", checked_choice(document.get("format", "tar"), "format", ("tar", "tfrecord")))
    features = _parse_features(document.get("features", {}))
    if features and form != "tfrecord":
        raise PlanError("features", 'only TFRecords have features; set "format": "tfrecord" as well')
    return ShardsView(
        checked_source(document, bucket),
        checked_prefix(document),
        checked_match(document),
        0 if size else count,
        size,
        None if shuffle is None else checked_integer(shuffle, "shuffle", 0, MAX_INTEGER),
        split,
        name,
        form,
        cast(
            "Samples", checked_choice(document.get("samples", "objects"), "samples", ("objects", "archives"))
        ),
        where,
        group,
        sort,
        split_by,
        features,
    )


def _parse_features(value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict) or len(value) > 64:
        raise PlanError("features", 'expected at most 64 extensions with kinds, such as {"cls": "int64"}')
    for name, kind in value.items():
        checked_text(name, "features", at_most=100)
        checked_choice(kind, join_path("features", name), ("int64", "float"))
    return tuple(sorted((name.removeprefix(".").lower(), kind) for name, kind in value.items()))


def _parse_expression(document: Mapping[str, Any], field: str) -> str:
    text = checked_text(document.get(field, ""), field)
    if text:
        check_names(parse_expression(text, field), field)
    return text


def _parse_split(value: Any) -> tuple[tuple[str, float], ...]:
    if not isinstance(value, dict) or len(value) > 16:
        raise PlanError("split", 'expected at most 16 names with shares, such as {"train": 0.9, "val": 0.1}')
    for name in value:
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise PlanError("split", f"{name!r} is not a folder name of letters, digits, - and _")
    shares = tuple((name, checked_number(share, f"split.{name}", 0.0, 1.0)) for name, share in value.items())
    if shares and abs(sum(share for _, share in shares) - 1.0) > 1e-9:
        raise PlanError("split", "the shares must add up to 1")
    return tuple(sorted(shares))


# --- layout -----------------------------------------------------------------------------------------------


def split_part(view: ShardsView, stem: str) -> str:
    """Return the part of the split that a sample belongs to. It depends only on the sample's name (or its
    `split_by` value), so new data moves no sample."""
    digest = hashlib.blake2b(stem.encode(), digest_size=8, key=_SPLIT.to_bytes(8, "big")).digest()
    point, bound = int.from_bytes(digest) / _UNIT, 0.0
    for name, share in view.split:
        bound += share
        if point < bound:
            return name
    return view.split[-1][0] if view.split else ""


def shuffle_permutation(seed: int, samples: int) -> Feistel:
    """Return the order of the samples of one part."""
    return Feistel(samples, derive_key(seed, _SHUFFLE))


def shard_name(view: ShardsView, number: int) -> str:
    """Return the name of a part's shard, without folder and ending."""
    return f"{view.name}-{number:0{_DIGITS}d}"


_MAX_FOLDER: Final = 200


class ShardLayout:
    """All shards of a view, by key; `keys` in order."""

    def __init__(self, shards: Iterable[Shard]) -> None:
        self.shards = {shard.key: shard for shard in sorted(shards, key=lambda shard: shard.key)}
        self.keys = list(self.shards)

    def position_of(self, text: str) -> int:
        """Return the index in `keys` of the first key that does not sort before `text`."""
        return bisect_left(self.keys, text)

    def __repr__(self) -> str:
        return f"<ShardLayout of {len(self.shards)} shards>"


def lay_out_shards(
    view: ShardsView, files: Iterable[SourceObject], evaluation: Evaluation | None = None
) -> ShardLayout:
    """Lay out these files of the source, given in stored order: objects by key, members in archive order."""
    evaluation = evaluation or Evaluation()
    samples = group_samples(_matching_files(view, files))
    if view.where:
        where = parse_expression(view.where, "where")
        samples = [sample for sample in samples if evaluation.evaluate(where, sample)]
    if view.sort:
        sort = parse_expression(view.sort, "sort")
        samples.sort(key=lambda sample: sort_key(evaluation.evaluate(sort, sample)))
    folders: dict[str, list[Sample]] = {}
    homes = FolderNames(view, evaluation)
    for sample in samples:
        folders.setdefault(homes.folder_of(sample), []).append(sample)
    return ShardLayout(shard for folder, found in folders.items() for shard in _shards(view, folder, found))


def _matching_files(view: ShardsView, files: Iterable[SourceObject]) -> list[SourceObject]:
    prefix, ends = view.prefix, view.match or ("",)  # every name ends with the empty string
    if view.samples == "archives":
        takes = lru_cache(view.includes_key)  # cached, because members of the same archive follow each other
        return [item for item in files if item.name.endswith(ends) and takes(item.key)]
    return [item for item in files if item.key.startswith(prefix) and item.key.endswith(ends)]


class FolderNames:
    """Determines the folder of a sample's shard: its part of the split, then its group."""

    def __init__(self, view: ShardsView, evaluation: Evaluation) -> None:
        self._view, self._evaluation = view, evaluation
        self._group = parse_expression(view.group, "group") if view.group else None
        self._by = parse_expression(view.split_by, "split_by") if view.split_by else None

    def folder_of(self, sample: Sample) -> str:
        part = f"{self._part(sample)}/" if self._view.split else ""
        if self._group is None:
            return part
        return f"{part}{_folder(self._evaluation.evaluate(self._group, sample))}/"

    def _part(self, sample: Sample) -> str:
        by = self._by
        told = sample.stem if by is None else format_value(self._evaluation.evaluate(by, sample))
        return split_part(self._view, told)


def _folder(value: Value) -> str:
    """Return a group's folder: its value, percent-encoded where it would not be a valid name. A `/` creates
    subfolders."""
    names = [
        encode(name) if name.strip(".") else "%2E" * len(name) for name in format_value(value).split("/")
    ]
    folder = "/".join(name or "empty" for name in names)
    if len(folder) <= _MAX_FOLDER:
        return folder
    digest = hashlib.sha256(folder.encode()).hexdigest()[:16]
    return f"{folder[: _MAX_FOLDER - 17]}~{digest}"


def _shards(view: ShardsView, folder: str, samples: Sequence[Sample]) -> Iterator[Shard]:
    order: Iterable[int] = range(len(samples))
    if view.shuffle is not None:
        order = shuffle_permutation(view.shuffle, len(samples)).samples_at(np.arange(len(samples))).tolist()
    for number, taken in enumerate(_fill_shards(view, (samples[index] for index in order))):
        yield _shard(view, folder + shard_name(view, number), taken)


def _shard(view: ShardsView, name: str, samples: Sequence[Sample]) -> Shard:
    if view.format == "tfrecord":
        files = [sample.files for sample in samples]
        return TfrecordShard.from_samples(f"{name}.tfrecord", files, view.prefix, view.features)
    members = [item for sample in samples for item in sample.files]
    return TarShard.from_members(f"{name}.tar", members, view.prefix)


def _fill_shards(view: ShardsView, samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Yield the samples of each shard, filled up to its count or size."""
    taken: list[Sample] = []
    size = 0
    for sample in samples:
        taken.append(sample)
        size += sample.size if view.size else 0
        if len(taken) == view.count or (view.size and size >= view.size):
            yield taken
            taken, size = [], 0
    if taken:
        yield taken
