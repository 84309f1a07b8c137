"""Creates packed plans: measures all sample lengths once by rendering them, then lays out the rows.

Law: lengths belong to the inner plan (snapshot, ops), so other packings of it do not measure again.
Measured parts are durable: a repeated request resumes where the last one stopped, also after kill -9.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from meshd.batches.assembly.direct_rows import direct_dtypes, direct_lengths
from meshd.batches.assembly.frame_rows import pack_row_bounds
from meshd.batches.assembly.packed_rows import pack_table_key
from meshd.batches.assembly.sequence_renderer import SequenceRenderer
from meshd.batches.assembly.stored_sequence_format import BAD, PART
from meshd.core.api_errors import BatchError, in_progress
from meshd.core.plan_record import FieldOutput
from meshd.transform import registry
from meshd.util.async_tasks import LongRunningCalls, StillRunningError
from meshwire.dataset.build_snapshot import LabelColumn
from meshwire.frame.columns import ColumnReader, ColumnWriter
from meshwire.plan.plan_spec import PlanSpec, plan_hash
from meshwire.plan.sequence_packing import pack_rows
from meshwire.plan.shuffle import ShuffleSpec
from meshwire.strict_json import PlanError, suggestion

if TYPE_CHECKING:
    from meshd.batches.assembly.stored_sequence_format import SequenceSet
    from meshd.batches.assembly.stored_sequences import StoredSequences
    from meshd.core.document_store import DocumentStore
    from meshd.core.frame_address import FrameSource
    from meshd.core.plan_record import Plan
    from meshd.util.async_tasks import CallProgress
    from meshwire.dataset.build_snapshot import Snapshot
    from meshwire.frame.columns import Integers
    from meshwire.plan.sequence_packing import Pack, PackTable

_KIND, _VERSION = "shardmesh.lengths", 1
_TABLES = 4


class PackPlanner:
    """Creates packed plans for a worker. `stored` keeps what is rendered to be measured."""

    def __init__(self, catalog: DocumentStore, frames: FrameSource, stored: StoredSequences) -> None:
        self._catalog, self._stored = catalog, stored
        self._renderer = SequenceRenderer(frames)
        self._long: LongRunningCalls[Plan] = LongRunningCalls("packs")
        self._tables: OrderedDict[tuple[str, Pack], PackTable] = OrderedDict()  # for other seeds and orders

    def __repr__(self) -> str:
        return f"<PackPlanner, {self._long!r}>"

    def check_spec(self, snapshot: Snapshot, spec: PlanSpec) -> None:
        """Raises PlanError for a spec that cannot be packed, before any op is built."""
        pack = spec.pack
        assert pack is not None
        if snapshot.pieces():
            raise PlanError(
                "pack.fields", "fields that are put together from several chunks cannot be packed"
            )
        unknown = [name for name in pack.fields if name not in snapshot.fields]
        if unknown:
            hint = suggestion(unknown[0], snapshot.fields)
            raise PlanError("pack.fields", f"the dataset has no field {unknown[0]!r}{hint}")
        labels = [name for name, column in snapshot.fields.items() if isinstance(column, LabelColumn)]
        left = sorted({*snapshot.fields, *labels} - {*pack.fields} | {*labels} & {*pack.fields})
        if left:
            raise PlanError(
                "pack.fields",
                f"a packed row holds many samples and cannot carry {left[0]!r}; select the packed fields",
            )
        for index, op in enumerate(spec.ops):
            if registry.find(op.op, op.version, f"ops[{index}]").random:
                raise PlanError(
                    f"ops[{index}]", f"{op.op!r} is random; packed rows must be the same in every epoch"
                )

    async def plan_packed(self, within: Plan, snapshot: Snapshot, spec: PlanSpec) -> Plan:
        """Return the packed plan over the inner plan `within`, which renders single samples.

        Lays out the rows. Raises PlanError; BatchError: BadSample (by `on_bad`, `max_bad`), Busy (still
        measuring: retry).
        """
        pack = spec.pack
        assert pack is not None
        for name in pack.fields:
            output = within.outputs[name]
            if output.shape is not None or output.ndim != 1 or output.dtype == "bool":
                raise PlanError(
                    "pack.fields", f"{name!r} is {output.describe()}; only ragged sequences can be packed"
                )
            _check_value(pack, output.dtype)
        spec = replace(spec, ops=within.spec.ops)
        digest = plan_hash(snapshot.hash, spec)
        await self._catalog.add_plan(within)
        if self._catalog.is_gone(pack_table_key(digest)):
            self._long.discard_result(digest)
        try:
            return await self._long.run_or_wait(
                digest, partial(self._make_plan, within, snapshot, spec, digest)
            )
        except StillRunningError as error:
            message = f"the {snapshot.samples} samples are being measured for packing, {error}"
            raise in_progress(message, error.progress) from None

    async def _make_plan(
        self, within: Plan, snapshot: Snapshot, spec: PlanSpec, digest: str, progress: CallProgress
    ) -> Plan:
        pack = spec.pack
        assert pack is not None
        dtypes = direct_dtypes(within, pack.fields)
        if dtypes is None:
            sequences = await self._stored.describe(within, snapshot, pack.fields)
            lengths = await self._lengths(sequences, progress)
        else:
            lengths = await asyncio.to_thread(direct_lengths, snapshot, pack.fields, dtypes)
        _check_bad(lengths, snapshot, spec, within)
        table = self._tables.get((within.hash, pack))
        if table is None:
            table = await asyncio.to_thread(pack_rows, np.maximum(lengths, 0), snapshot.shard_starts, pack)
        self._tables[within.hash, pack] = table
        if len(self._tables) > _TABLES:
            self._tables.popitem(last=False)
        if not table.rows:
            raise BatchError("NoSuchKey", "every sample is empty: nothing to pack", help="check the ops")
        bounds = pack_row_bounds(table, spec)
        if bounds is not None and not np.diff(bounds).all():
            part = int(np.flatnonzero(np.diff(bounds) == 0)[0])
            raise PlanError(f"mix.parts[{part}]", "all its samples are empty; remove it from the mix")
        await self._catalog.put_shared(pack_table_key(digest), await asyncio.to_thread(table.to_bytes))
        outputs = {name: FieldOutput(within.outputs[name].dtype, (pack.length,)) for name in pack.fields}
        outputs |= {name: FieldOutput("int32", (pack.length,)) for name in pack.numbers}
        return replace(
            within,
            hash=digest,
            samples=table.rows,
            spec=spec,
            outputs=dict(sorted(outputs.items())),
            within=within.hash,
        )

    async def _lengths(self, sequences: SequenceSet, progress: CallProgress) -> Integers:
        """Return the lengths of all samples in elements, with BAD for bad samples."""
        found, samples = [], int(sequences.starts[-1])
        for number, start in enumerate(range(0, samples, PART)):
            key = f"lengths/{sequences.plan.hash}/{'-'.join(sequences.fields)}/{number:06d}"
            count = min(PART, samples - start)
            document = self._catalog.read_document(key)
            if document is None:
                part = await self._measure_lengths(sequences, range(start, start + count), progress)
                await self._catalog.write_document(key, _to_bytes(part), once=True)
            else:
                part = _from_bytes(document, count)
            found.append(part)
            progress.done = (start + count) / samples
        return np.concatenate(found)

    async def _measure_lengths(
        self, sequences: SequenceSet, samples: range, progress: CallProgress
    ) -> Integers:
        """Return the lengths of a part, and store its sequences chunk by chunk."""
        first, last = sequences.chunks_of(np.array([samples.start, samples.stop - 1])).tolist()
        found = []

        def rendered(end: int) -> None:
            progress.done = end / int(sequences.starts[-1])

        for chunk in range(first, last + 1):
            stored = await self._stored.find(sequences, [chunk])
            if stored:
                found.append(stored[chunk].index.lengths)
            else:
                some = sequences.samples_in(chunk)
                lengths, columns = await self._renderer.render(sequences, some, rendered)
                await self._stored.store(sequences, chunk, lengths, columns)
                found.append(lengths)
        return np.concatenate(found)


def _check_value(pack: Pack, dtype: str) -> None:
    kind = np.dtype(dtype)
    if kind.kind in "iu" and not np.iinfo(kind).min <= pack.value <= np.iinfo(kind).max:
        raise PlanError("pack.value", f"{pack.value} does not fit into {dtype}")


def _check_bad(lengths: Integers, snapshot: Snapshot, spec: PlanSpec, within: Plan) -> None:
    """Apply `on_bad` and `max_bad` to the whole dataset. Raises BatchError BadSample."""
    bad = np.flatnonzero(lengths == BAD)
    allowed = 0 if spec.on_bad == "raise" else max(1, int(spec.max_bad * lengths.size))
    if bad.size > allowed:
        name = snapshot.sample_name(int(bad[0]))
        raise BatchError(
            "BadSample",
            f"{bad.size} of {lengths.size} samples cannot be packed, {allowed} allowed; the first is {name}",
            help=f"see why with: mesh bad ls {within.hash}; fields packed together must be equally long",
            detail={"key": name, "bad": int(bad.size), "plan": within.hash},
        )


def _to_bytes(lengths: Integers) -> bytes:
    writer = ColumnWriter(_KIND, _VERSION, {})
    writer.add_integers("lengths", lengths + 1)  # starts at 0, so the integers are narrower
    return writer.to_bytes()


def _from_bytes(document: bytes, count: int) -> Integers:
    reader = ColumnReader(document, _KIND, _VERSION)
    return reader.read_integers("lengths", low=0, high=1 << 40, count=count) - 1


def inner_spec(spec: PlanSpec) -> PlanSpec:
    """Return the spec of the inner plan: the same ops on single samples in no order; bad ones are masked."""
    return PlanSpec(spec.ops, 0, ShuffleSpec("none"), "pad", "mask", 1.0)
