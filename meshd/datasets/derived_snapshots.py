"""Snapshots derived from snapshots: select, rename, relabel, filter, join and concat.

Law: deriving requires read access to everything the base snapshot names. An expression is evaluated once
over the pinned content; the selected samples are part of the hash of the new snapshot.
"""

from __future__ import annotations

import asyncio
import hashlib
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from meshd.core.api_errors import in_progress
from meshd.core.sample_locations import PinnedObjects
from meshd.telemetry import metrics
from meshd.util.async_tasks import LongRunningCalls, StillRunningError
from meshwire.dataset.build_snapshot import BytesColumn, EmptySnapshotError, LabelColumn, SnapshotBuild
from meshwire.dataset.derive_snapshot import (
    join_snapshots,
    keep_samples,
    parse_names,
    parse_relabels,
    parse_renames,
    relabel_classes,
    relative_names,
    rename_fields,
    select_fields,
)
from meshwire.dataset.expression_parser import format_value, parse_expression
from meshwire.dataset.paged_snapshot import PagedSnapshot
from meshwire.plan.mix import concat_snapshots, parse_hashes
from meshwire.strict_json import PlanError, checked_hash, checked_object, required_field, shown_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from meshd.auth.dataset_access import DatasetAccess
    from meshd.auth.identity import Caller
    from meshd.core.document_store import DocumentStore
    from meshd.datasets.archives.archive_service import ArchiveService
    from meshd.datasets.bucket_incarnations import SnapshotIncarnations
    from meshd.datasets.snapshot_capacity import SnapshotCapacity
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.api import ObjectStore
    from meshd.util.async_tasks import CallProgress
    from meshwire.dataset.build_snapshot import Snapshot
    from meshwire.dataset.expression_evaluation import Value
    from meshwire.dataset.expression_parser import Expression

DERIVATIONS = ("select", "rename", "relabel", "filter", "join", "concat", "pages")
OWN_NAMES = ("key", "name", "stem", "size", "index")
MAX_VALUE_BYTES = 1 << 20
"""Limit of a field's content in an expression; longer content evaluates to none."""
_AT_A_TIME = 1024
_FAR_AT_A_TIME = 256  # samples at a time if content comes from other nodes
_SIZE = "_size"


class Derivation(msgspec.Struct, frozen=True):
    """A derivation: `way` and its value. `on`: for a join, the expressions of both sides (empty: by name)."""

    base: str
    way: str
    value: Any
    on: tuple[str, ...] = ()


def parse_derivation(document: Mapping[str, Any]) -> Derivation:
    """Parses {"from", one of DERIVATIONS, "on"?}. Raises PlanError."""
    value = checked_object(dict(document), "", ("from", "on", *DERIVATIONS))
    ways = [way for way in DERIVATIONS if way in value]
    if len(ways) != 1:
        raise PlanError(
            "", f"give exactly one of {', '.join(DERIVATIONS)} with `from`; apply several one by one"
        )
    on = value.get("on", [])
    sides = [on, on] if isinstance(on, str) else on
    if not isinstance(sides, list) or len(sides) not in (0, 2) or (sides and ways != ["join"]):
        raise PlanError("on", "for a join: expected an expression, or a list of a left and a right one")
    base = checked_hash(required_field(value, "from", ""), "from")
    return Derivation(base, ways[0], value[ways[0]], tuple(str(side) for side in sides))


class DerivedSnapshots:
    """Derives snapshots from snapshots, for a worker."""

    def __init__(
        self,
        store: ObjectStore,
        catalog: DocumentStore,
        readers: DatasetAccess,
        archives: ArchiveService,
        objects: RemoteObjects,
        births: SnapshotIncarnations,
        capacity: SnapshotCapacity,
    ) -> None:
        self._store, self._catalog, self._readers, self._archives = store, catalog, readers, archives
        self._objects, self._births, self._capacity = objects, births, capacity
        self._long: LongRunningCalls[SnapshotBuild] = LongRunningCalls("structures")

    def __repr__(self) -> str:
        return f"<DerivedSnapshots, {self._long!r}>"

    async def derive_snapshot(self, caller: Caller, request: Derivation) -> SnapshotBuild:
        """Return the derived snapshot.

        Raises PlanError, EmptySnapshotError; BatchError NoSuchSnapshot, AccessDenied, SnapshotChanged, Busy
        (still running: retry).
        """
        base = await self._snapshot(caller, request.base)
        if request.way == "select":
            names = parse_names(request.value, "select")
            return SnapshotBuild(await asyncio.to_thread(select_fields, base, names), 0, ())
        if request.way == "rename":
            renames = parse_renames(request.value, "rename")
            return SnapshotBuild(await asyncio.to_thread(rename_fields, base, renames), 0, ())
        if request.way == "relabel":
            return await asyncio.to_thread(relabel_classes, base, parse_relabels(request.value, "relabel"))
        if request.way == "join":
            return await self._join(caller, base, request)
        if request.way == "concat":
            return await self._concatenate(caller, base, request.value)
        if request.way == "pages":
            return await self._patiently(f"pages {base.hash}", lambda _: _without_pages(base, request.value))
        chosen = parse_expression(request.value, "filter", known_names(base))
        return await self._patiently(
            f"filter {base.hash} {chosen.text}", lambda p: self._filter(base, chosen, p)
        )

    async def _snapshot(self, caller: Caller, digest: str) -> Snapshot:
        snapshot = await self._catalog.snapshot(digest)
        if isinstance(snapshot, PagedSnapshot):  # what is derived from it has columns of all samples
            self._capacity.require_room(snapshot.samples, len(snapshot.fields), snapshot.source)
        await self._readers.require_snapshot(caller, snapshot)
        await self._births.require_valid(caller, digest, snapshot.objects.buckets, f"snapshots/{digest}")
        return snapshot

    async def _patiently(self, key: str, work: Callable[[CallProgress], Any]) -> SnapshotBuild:
        try:
            return await self._long.run_or_wait(hashlib.sha256(key.encode()).hexdigest(), work)
        except StillRunningError as error:
            raise in_progress(f"the snapshot is not ready yet: {error}", error.progress) from None

    async def _filter(self, base: Snapshot, chosen: Expression, progress: CallProgress) -> SnapshotBuild:
        values = await self._evaluate_samples(base, chosen, progress)
        kept = np.flatnonzero(np.fromiter((bool(value) for value in values), np.bool_, base.samples))
        if not kept.size:
            told = await self._describe_first(base, chosen, progress)
            raise EmptySnapshotError("filter", f"none of the {base.samples} samples is left{told}")
        snapshot = await asyncio.to_thread(keep_samples, base, kept)
        return SnapshotBuild(snapshot, base.samples - snapshot.samples, ())

    async def _describe_first(self, base: Snapshot, chosen: Expression, progress: CallProgress) -> str:
        """Describe the values of an expression's names for the first sample, for an error message.

        The values are shown as an expression writes them: a label as the name of its class, the content of
        a file as text.
        """
        first = await asyncio.to_thread(keep_samples, base, np.zeros(1, np.int64))
        told = []
        for name in sorted(chosen.names):
            value = (await self._evaluate_samples(first, parse_expression(f"`{name}`"), progress))[0]
            if value is not None:
                told.append(
                    f"{name} == {shown_value(value) if isinstance(value, str) else format_value(value)}"
                )
        return f"; for the first sample, {' and '.join(told)}" if told else ""

    async def _join(self, caller: Caller, left: Snapshot, request: Derivation) -> SnapshotBuild:
        right = await self._snapshot(caller, checked_hash(request.value, "join"))
        if not request.on:
            names = (
                await asyncio.to_thread(relative_names, left),
                await asyncio.to_thread(relative_names, right),
            )
            return await asyncio.to_thread(join_snapshots, left, right, *names)
        on = [
            parse_expression(text, "on", known_names(side))
            for text, side in zip(request.on, (left, right), strict=True)
        ]
        return await self._patiently(
            f"join {left.hash} {right.hash} {request.on}", partial(self._join_by, (left, right), on)
        )

    async def _concatenate(self, caller: Caller, first: Snapshot, value: Any) -> SnapshotBuild:
        hashes = parse_hashes(value, "concat")
        parts = [first, *[await self._snapshot(caller, digest) for digest in hashes]]

        async def work(_: CallProgress) -> SnapshotBuild:
            return SnapshotBuild(await asyncio.to_thread(concat_snapshots, parts), 0, ())

        return await self._patiently(f"concat {first.hash} {hashes}", work)

    async def _join_by(
        self, sides: tuple[Snapshot, Snapshot], on: Sequence[Expression], progress: CallProgress
    ) -> SnapshotBuild:
        keys = []
        for side, expression in zip(sides, on, strict=True):
            values = await self._evaluate_samples(side, expression, progress)
            keys.append([None if value is None else format_value(value) for value in values])
        return await asyncio.to_thread(join_snapshots, *sides, *keys)

    async def _evaluate_samples(
        self, snapshot: Snapshot, expression: Expression, progress: CallProgress
    ) -> list[Value]:
        """Return the value of an expression for every sample, in order."""
        pinned = PinnedObjects(self._store, snapshot, self._archives, self._objects)
        scope = _Scope(snapshot, pinned, expression.names)
        found: list[Value] = []
        turn = _AT_A_TIME if self._objects.single_node or not scope.contents else _FAR_AT_A_TIME
        try:
            for start in range(0, snapshot.samples, turn):
                some = range(start, min(start + turn, snapshot.samples))
                if scope.contents:
                    await pinned.prepare(list(some), expression.names, MAX_VALUE_BYTES)
                found += await asyncio.to_thread(_evaluate, expression, scope, some)
                pinned.close()
                metrics.samples_evaluated.inc(len(some))
                progress.done = len(found) / snapshot.samples
        finally:
            pinned.close()
        return found


def known_names(snapshot: Snapshot) -> list[str]:
    """Return the names that an expression over the samples of a snapshot may use."""
    sizes = [f"{name}{_SIZE}" for name in _bytes_fields(snapshot)]
    return [*OWN_NAMES, *snapshot.fields, *(name for name in sizes if name not in snapshot.fields)]


def _bytes_fields(snapshot: Snapshot) -> list[str]:
    return [name for name, column in snapshot.fields.items() if isinstance(column, BytesColumn)]


def _evaluate(expression: Expression, scope: _Scope, samples: range) -> list[Value]:
    return [expression.evaluate(scope.values(sample)) for sample in samples]


class _Scope:
    """The values of an expression's names for one sample. `contents`: whether objects are read."""

    def __init__(self, snapshot: Snapshot, pinned: PinnedObjects, names: frozenset[str]) -> None:
        self._snapshot, self._pinned = snapshot, pinned
        self._makers = {name: self._maker(name) for name in names}
        self.contents = any(name in _bytes_fields(snapshot) for name in names)

    def values(self, sample: int) -> Mapping[str, object]:
        return {name: make(sample) for name, make in self._makers.items()}

    def _maker(self, name: str) -> Callable[[int], object]:
        column = self._snapshot.fields.get(name)
        if isinstance(column, LabelColumn):
            return lambda sample: column.classes[int(column.values_at(sample))]
        if column is not None:
            return lambda sample: self._content(column, sample)
        if name.endswith(_SIZE) and name.removesuffix(_SIZE) in self._snapshot.fields:
            return self._size([name.removesuffix(_SIZE)])
        if name == "size":
            return self._size(_bytes_fields(self._snapshot))
        if name == "name":
            return relative_names(self._snapshot).__getitem__
        if name == "stem":
            return lambda sample: self._snapshot.sample_name(sample).rpartition("/")[2]
        return float if name == "index" else self._snapshot.sample_name

    def _size(self, fields: Sequence[str]) -> Callable[[int], object]:
        total = np.zeros(self._snapshot.samples, np.int64)
        for name in fields:
            column = self._snapshot.fields[name]
            assert isinstance(column, BytesColumn)
            total = total + column.length
        return lambda sample: float(total[sample])

    def _content(self, column: BytesColumn, sample: int) -> bytes | None:
        length = int(column.lengths_at(sample))
        if length > MAX_VALUE_BYTES:
            return None
        return self._pinned.read_range(int(column.objects_at(sample)), int(column.offsets_at(sample)), length)


async def _without_pages(snapshot: Snapshot, pages: object) -> SnapshotBuild:
    """Return the snapshot as releases made it that do not know pages. Raises PlanError."""
    if pages is not False:
        raise PlanError("pages", f"expected false, got {shown_value(pages)}")
    if isinstance(snapshot, PagedSnapshot):
        snapshot = await asyncio.to_thread(snapshot.without_pages)
    return SnapshotBuild(snapshot, 0, ())
