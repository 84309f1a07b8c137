"""Layout of a Zarr view: its arrays, its metadata, and the block of samples behind every chunk.

Law: a layout is a pure function of the view, the snapshot and the output types of the ops; it renders
nothing. A block is named by its ops and source bytes (ETags, offsets), so a changed object renames only
its own block.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from meshd.core.frame_address import BlockAddress
from meshd.core.plan_record import Plan
from meshd.core.sample_locations import own_columns
from meshd.transform import registry
from meshd.transform.compiler import asset_digests
from meshwire.dataset.build_snapshot import LabelColumn
from meshwire.dataset.derive_snapshot import content_digest, referenced_objects, slice_field
from meshwire.plan.plan_spec import canonical_spec
from meshwire.strict_json import PlanError, canonical_json
from meshwire.views.zarr_view import ZarrArray, is_zarr_dtype, metadata_objects, status_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwire.dataset.build_snapshot import Snapshot
    from meshwire.views.zarr_view import ZarrView

_VERSION = 1  # version of the bytes of a block
BLOCK_NAME = 40  # digits
_LABELS = 4096  # labels per chunk, which are cheap to generate
_CHUNK_BYTES = 1 << 30
_CLASSES = 10_000  # maximum of classes that are named in the attributes


class FieldPlan(msgspec.Struct, frozen=True):
    """How one bytes field is rendered: its ops as a plan of their own."""

    name: str
    plan: Plan
    random: bool

    @classmethod
    def for_field(cls, whole: Plan, name: str) -> FieldPlan:
        ops = tuple(op.for_field(name) if op.fields else op for op in whole.spec.ops if name in op.all_fields)
        spec = replace(whole.spec, ops=ops)
        output = whole.outputs[name]
        said = {"version": _VERSION, "shape": output.shape, "dtype": output.dtype}
        digest = hashlib.sha256(canonical_spec(spec) + canonical_json(said)).hexdigest()
        plan = Plan(digest, "", whole.bucket, 0, spec, {name: output}, asset_digests(spec))
        random = any(registry.find(op.op, op.version, "").random for op in ops)
        return cls(name, plan, random)

    def block_address(self, snapshot: Snapshot, samples: range) -> BlockAddress:
        """Return the address of the block for a run of samples."""
        part = slice_field(snapshot, self.name, samples)
        plan = replace(self.plan, samples=len(samples))
        return BlockAddress(
            plan.hash,
            self.block_name(snapshot, samples),
            plan.to_bytes(),
            part.to_bytes(),
            self._first(samples),
        )

    def block_name(self, snapshot: Snapshot, samples: range) -> str:
        """Return the name of a block: its ops and source bytes, and its position if an op is random."""
        hasher = hashlib.sha256(f"{self.plan.hash}/{self._first(samples)}/".encode())
        hasher.update(content_digest(snapshot, self.name, samples))
        return hasher.hexdigest()[:BLOCK_NAME]

    def _first(self, samples: range) -> int:
        return samples.start if self.random else 0


@dataclass(frozen=True)
class ZarrLayout:
    """A view's arrays. `works`: field plans by the name of the array; a `status` array has that of its field.

    `modified`: time of the source's newest object, in ms since 1970.
    """

    snapshot: Snapshot
    arrays: Mapping[str, ZarrArray]
    works: Mapping[str, FieldPlan]
    modified: int

    @cached_property
    def _names(self) -> dict[tuple[str, int], bytes]:
        return {}

    @cached_property
    def verified(self) -> dict[tuple[str, int], object]:
        """The store's revision at which a stored object (array, number) last had all its sources."""
        return {}

    @cached_property
    def metadata(self) -> Mapping[str, bytes]:
        """Every `zarr.json` by key."""
        attributes = {"source": self.snapshot.source, "snapshot": self.snapshot.hash}
        return metadata_objects(list(self.arrays.values()), attributes)

    def label(self, name: str) -> LabelColumn:
        """Return the values of an array of labels, which no op renders."""
        column = self.snapshot.fields[name]
        assert isinstance(column, LabelColumn)
        return column

    def etag(self, array: ZarrArray, number: int) -> str:
        """Return the ETag of a chunk or shard, shaped like a multipart object's: the MD5 is not known."""
        hasher = hashlib.sha256(f"{array.name}/{array.dtype}/{array.chunk}/{array.shard}/".encode())
        for chunk in array.held(number):
            hasher.update(self._content(array, chunk))
        return f"{hasher.hexdigest()[:32]}-{len(array.held(number))}"

    def _content(self, array: ZarrArray, chunk: int) -> bytes:
        name = array.name, chunk
        found = self._names.get(name)
        if found is None:
            found = self._names[name] = self._block_name(array, array.rows(chunk))
        return found

    def _block_name(self, array: ZarrArray, rows: range) -> bytes:
        work = self.works.get(array.name)
        if work is None:
            return hashlib.sha256(self.label(array.name).values[rows.start : rows.stop].tobytes()).digest()
        return work.block_name(self.snapshot, rows).encode()

    def source_objects(self, array: ZarrArray, number: int) -> list[int]:
        """Return the numbers of the source objects of a chunk or shard."""
        held, work = array.held(number), self.works.get(array.name)
        if work is None:
            return []
        rows = range(array.rows(held[0]).start, array.rows(held[-1]).stop)
        return referenced_objects(self.snapshot, [work.name], rows)


def build_zarr_layout(view: ZarrView, snapshot: Snapshot, plan: Plan, modified: int) -> ZarrLayout:
    """Build the layout of a view. Raises PlanError if a field cannot become an array."""
    for name in snapshot.fields:
        if status_name(name) in snapshot.fields:
            raise PlanError(
                f"fields.{status_name(name)}", f"the name is reserved for the status of the rows of {name!r}"
            )
    if snapshot.pieces():
        raise PlanError("fields", "a field is put together from several chunks; use a view of batches")
    if plan.pairs is not None:
        raise PlanError("ops", "mixing needs the rows of a batch, but the rows of an array are samples")
    if set(own_columns(snapshot)) != set(plan.outputs):
        raise PlanError("ops", "the ops change the set of fields; use ops that take one field each")
    for index, op in enumerate(plan.spec.ops):
        found = registry.find(op.op, op.version, f"ops[{index}]")
        if op.fields and (found.random or found.is_multi_field):
            raise PlanError(
                f"ops[{index}].fields",
                f"each array is rendered on its own, but {op.op} takes several fields at once; use a view of "
                "batches, or a plan",
            )
    arrays: dict[str, ZarrArray] = {}
    works: dict[str, FieldPlan] = {}
    for name, column in snapshot.fields.items():
        if isinstance(column, LabelColumn):
            arrays[name] = _labels(name, column, snapshot.samples)
            continue
        array = _array(view, name, plan, snapshot.samples)
        arrays[name], works[name] = array, FieldPlan.for_field(plan, name)
        if view.on_bad == "mask":
            status = replace(array, name=status_name(name), dtype="uint8", row=(), dimensions=())
            arrays[status.name], works[status.name] = status, works[name]
    return ZarrLayout(snapshot, dict(sorted(arrays.items())), works, modified)


def _labels(name: str, column: LabelColumn, samples: int) -> ZarrArray:
    attributes = {"classes": list(column.classes)} if len(column.classes) <= _CLASSES else {}
    return ZarrArray(name, "int64", (), samples, _LABELS, attributes=attributes)


def _array(view: ZarrView, name: str, plan: Plan, samples: int) -> ZarrArray:
    output = plan.outputs[name]
    if output.shape is None:
        raise PlanError(
            f"fields.{name}",
            "its samples differ in shape, but the rows of an array must not; add ops that give them one "
            "shape, such as `decode` and `resize` with size=[224, 224]",
        )
    if not is_zarr_dtype(output.dtype):
        raise PlanError(f"fields.{name}", f"Zarr has no {output.dtype}; add `cast`")
    dimensions = tuple(f"{name}_{axis}" for axis in _axes(output.shape))
    array = ZarrArray(name, output.dtype, output.shape, samples, view.chunk, view.shard, dimensions)
    if array.chunk_bytes > _CHUNK_BYTES:
        raise PlanError(
            "chunk", f"a chunk of {name!r} would have {array.chunk_bytes} bytes; use fewer samples"
        )
    return array


def _axes(shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return the names of the axes for xarray."""
    if len(shape) == 3 and shape[2] in (1, 3, 4):
        return ("y", "x", "channel")
    if len(shape) == 3 and shape[0] in (1, 3, 4):
        return ("channel", "y", "x")
    return tuple(str(axis) for axis in range(len(shape)))
