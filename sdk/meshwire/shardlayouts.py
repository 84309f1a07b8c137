"""Layouts of shard views: which samples, in which order, cut where.

Law: a layout is a pure function of the view's document, the source's files (key, ETag, size) and, where its
expressions ask for them, their bytes; the bytes of every shard follow from it and the files' bytes. Files of
one sample never part.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from meshwire.expressions import order_key, parse_expression, spelled
from meshwire.percents import encode
from meshwire.samples import Evaluation, gathered
from meshwire.shardforms import TarShard
from meshwire.shardviews import part_of, shard_name, shuffled
from meshwire.tfrecords import TfrecordShard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from meshwire.expressions import Value
    from meshwire.samples import Sample
    from meshwire.shardforms import Shard, SourceObject
    from meshwire.shardviews import ShardsView

_MAX_FOLDER: Final = 200


class ShardLayout:
    """All shards of a view, by key; `keys` in order."""

    def __init__(self, shards: Iterable[Shard]) -> None:
        self.shards = {shard.key: shard for shard in sorted(shards, key=lambda shard: shard.key)}
        self.keys = list(self.shards)

    def place(self, text: str) -> int:
        """Where in `keys` the first stands that does not sort before `text`."""
        return bisect_left(self.keys, text)

    def __repr__(self) -> str:
        return f"<ShardLayout of {len(self.shards)} shards>"


def lay_out(
    view: ShardsView, files: Iterable[SourceObject], evaluation: Evaluation | None = None
) -> ShardLayout:
    """The layout of these files of the source, in stored order: objects by key, members as their archive
    has them."""
    evaluation = evaluation or Evaluation()
    samples = gathered(_taken(view, files))
    if view.where:
        where = parse_expression(view.where, "where")
        samples = [sample for sample in samples if evaluation.value(where, sample)]
    if view.sort:
        sort = parse_expression(view.sort, "sort")
        samples.sort(key=lambda sample: order_key(evaluation.value(sort, sample)))
    folders: dict[str, list[Sample]] = {}
    homes = Folders(view, evaluation)
    for sample in samples:
        folders.setdefault(homes.folder(sample), []).append(sample)
    return ShardLayout(shard for folder, found in folders.items() for shard in _shards(view, folder, found))


def _taken(view: ShardsView, files: Iterable[SourceObject]) -> list[SourceObject]:
    prefix, ends = view.prefix, view.match or ("",)  # every name ends in nothing
    if view.samples == "archives":
        takes = lru_cache(view.takes)  # asked of one archive after the other
        return [item for item in files if item.name.endswith(ends) and takes(item.key)]
    return [item for item in files if item.key.startswith(prefix) and item.key.endswith(ends)]


class Folders:
    """Which folder a sample's shard is in: its part of the split, then its group."""

    def __init__(self, view: ShardsView, evaluation: Evaluation) -> None:
        self._view, self._evaluation = view, evaluation
        self._group = parse_expression(view.group, "group") if view.group else None
        self._by = parse_expression(view.split_by, "split_by") if view.split_by else None

    def folder(self, sample: Sample) -> str:
        part = f"{self._part(sample)}/" if self._view.split else ""
        if self._group is None:
            return part
        return f"{part}{_folder(self._evaluation.value(self._group, sample))}/"

    def _part(self, sample: Sample) -> str:
        by = self._by
        told = sample.stem if by is None else spelled(self._evaluation.value(by, sample))
        return part_of(self._view, told)


def _folder(value: Value) -> str:
    """A group's folder: its value, percent-encoded where that would be no name. A `/` makes folders."""
    names = [encode(name) if name.strip(".") else "%2E" * len(name) for name in spelled(value).split("/")]
    folder = "/".join(name or "empty" for name in names)
    if len(folder) <= _MAX_FOLDER:
        return folder
    digest = hashlib.sha256(folder.encode()).hexdigest()[:16]
    return f"{folder[: _MAX_FOLDER - 17]}~{digest}"


def _shards(view: ShardsView, folder: str, samples: Sequence[Sample]) -> Iterator[Shard]:
    order: Iterable[int] = range(len(samples))
    if view.shuffle is not None:
        order = shuffled(view.shuffle, len(samples)).many(np.arange(len(samples))).tolist()
    for number, taken in enumerate(_filled(view, (samples[index] for index in order))):
        yield _shard(view, folder + shard_name(view, number), taken)


def _shard(view: ShardsView, name: str, samples: Sequence[Sample]) -> Shard:
    if view.format == "tfrecord":
        files = [sample.files for sample in samples]
        return TfrecordShard.of(f"{name}.tfrecord", files, view.prefix, view.features)
    members = [item for sample in samples for item in sample.files]
    return TarShard.of(f"{name}.tar", members, view.prefix)


def _filled(view: ShardsView, samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Samples until a shard has its count, or its size."""
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
