"""Preflight: prepares a few samples from across a dataset before a job starts.

Law: it changes nothing, and registers the same plan as `ds[i]`. A condition that would fail every batch
raises an error with cause and fix; anything else that looks wrong becomes a note.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from meshsdk.byte_sizes import format_size
from meshsdk.client.read_costs import fetch_disk_cost
from meshsdk.datasets.batch import Ragged
from meshsdk.datasets.default_order import find_order
from meshsdk.errors import BadSampleError, ConfigurationError, InvalidPlanError, PreflightError
from meshsdk.ops.annotation_ops import JOINT_OPS
from meshwire.formats.content_sniffing import ContentHint, identify_content, identify_numbers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshsdk.client.native_api import FieldSchema
    from meshsdk.client.read_costs import DiskCost
    from meshsdk.datasets.default_order import Order
    from meshsdk.datasets.sample_sequence import SampleSequence

ROWS = 8
_AHEAD = 4
_LOOKED_AT = 4096
_OF_OP = re.compile(r"ops\[(\d+)\]")
_SOUND_FIX = (
    "cut windows of one length (ops.window with pad=0), pad them (ops.pad_to), or take Ragged.padded() and "
    "buckets=mesh.LengthBuckets"
)
_ARRAYS = {"npy", "npz", "safetensors"}  # ops with a `shape` argument that makes rows dense
_UNTOLD = "the first sample does not tell"  # the node's error if it cannot complete an op's arguments


@dataclass(frozen=True, slots=True)
class Preflight:
    """The result of a preflight; `print(flight)` summarizes it in a few lines.

    Attributes:
        samples: number of samples of the dataset.
        schema: dtype and shape of each field of a row.
        rows: number of samples that were tried.
        row_bytes: size of a prepared row; an average if fields are ragged.
        batch_bytes: size of a rank's largest batch; 0 without a batch size.
        seconds: duration of the preflight.
        bad: the error of each sample that could not be prepared.
        notes: what looks wrong, and what to do about it.
        disk_cost: what orders cost the rotational disks of the node that answered (DiskCost); None if it has
            none, or no sample of this dataset on them.
        order: the order of a loader without `shuffle`.
    """

    samples: int
    schema: Mapping[str, FieldSchema]
    rows: int
    row_bytes: int
    batch_bytes: int
    seconds: float
    bad: tuple[str, ...]
    notes: tuple[str, ...]
    disk_cost: DiskCost | None = None
    order: Order | None = None

    def __str__(self) -> str:
        good = self.rows - len(self.bad)
        ragged = any(field.shape is None for field in self.schema.values())
        mean = f" on average, over the {good} tried" if ragged else ""
        each = f"; a rank's batch takes {format_size(self.batch_bytes)}" if self.batch_bytes else ""
        plain = self.order is None or (self.order.shuffle is True and self.disk_cost is None)
        return "\n".join(
            [
                f"{self.samples} samples; {good} of {self.rows} tried can be prepared",
                *(f"  {name}: {field}" for name, field in self.schema.items()),
                f"  a row takes {format_size(self.row_bytes)}{mean}{each}",
                *(f"note: {note}" for note in self.notes),
                *([] if plain else [f"a loader without shuffle= has {self.order}"]),
                *([] if self.disk_cost is None else [str(self.disk_cost)]),
            ]
        )


def preflight(
    ds: SampleSequence, global_batch: int | None = None, *, world: int = 1, rows: int = ROWS
) -> Preflight:
    """Prepare `rows` samples, evenly spread over the dataset.

    Raises PreflightError if no sample can be prepared or a batch does not fit in memory, ConfigurationError
    for an invalid batch or world size, and the errors of registering the plan: InvalidPlanError, AccessError,
    SnapshotChangedError, DeadlineError.
    """
    began = time.monotonic()
    _check_batch(global_batch, world)
    packing = ds.packing
    if packing is not None:
        ds = ds.unpacked()
    ds = ds.quiet()
    order = find_order(ds, None, global_batch)
    schema = _schema(ds)
    if packing is not None:
        _check_packing(ds, packing["fields"], schema)
    picks = sorted({int(pick) for pick in np.linspace(0, len(ds) - 1, min(max(rows, 1), len(ds)))})
    found, bad = _prepare_rows(ds, picks)
    if not found:
        raise _fatal_error(ds, picks, bad)
    row_bytes = round(sum(map(_bytes_of, found)) / len(found))
    batch_bytes = 0 if global_batch is None else -(-global_batch // world) * row_bytes
    _check_memory(batch_bytes)
    notes = [
        *ds.plan().notes,
        *_bad_notes(bad, len(picks)),
        *_raw_notes(ds, found[0]),
        *_ragged_notes(ds, schema, found),
    ]
    if global_batch is not None and global_batch > len(ds):
        notes.append(f"global_batch={global_batch} is more than the {len(ds)} samples: most rows are padding")
    messages = tuple(str(error) for error in bad.values())
    # The order of a mix depends on its weights, which the estimate does not know.
    cost = None if ds.mixing else fetch_disk_cost(ds.client.transport, ds.snapshot.hash, global_batch)
    seconds = time.monotonic() - began
    return Preflight(
        len(ds), schema, len(picks), row_bytes, batch_bytes, seconds, messages, tuple(notes), cost, order
    )


def _schema(ds: SampleSequence) -> Mapping[str, FieldSchema]:
    try:
        return ds.schema()
    except InvalidPlanError as error:
        if _UNTOLD not in str(error):
            raise
        found = _OF_OP.match(str(error))
        ops = [op for number, op in enumerate(ds.ops) if found and number == int(found[1])]
        hints = "".join(
            _hint(ds, 0, name, op.op, str(error)) for op in ops for name in op.all_fields if name in ds.fields
        )
        raise PreflightError(f"{error}{hints}") from error


def _check_batch(batch: int | None, world: int) -> None:
    if world < 1:
        raise ConfigurationError(f"world={world}: expected the number of ranks, at least 1")
    if batch is not None and batch < world:
        raise ConfigurationError(
            f"global_batch={batch} is less than {world} ranks, so some would get no row: raise it"
        )


def _prepare_rows(
    ds: SampleSequence, picks: Sequence[int]
) -> tuple[list[Mapping[str, Any]], dict[int, BadSampleError]]:
    """Return the rows, and the errors of bad samples; sends one request unless a sample is bad."""
    try:
        return list(ds.__getitems__(picks)), {}
    except BadSampleError:
        pass
    found: list[Mapping[str, Any]] = []
    bad: dict[int, BadSampleError] = {}
    for pick in picks:
        try:
            found.append(ds[pick])
        except BadSampleError as error:
            bad[pick] = error
    return found, bad


def _fatal_error(
    ds: SampleSequence, picks: Sequence[int], bad: Mapping[int, BadSampleError]
) -> PreflightError:
    pick, error = next(iter(bad.items()))
    count = (
        "its only sample cannot" if len(picks) == 1 else f"none of {len(picks)} samples from across it can"
    )
    field, op = str(error.detail.get("field", "")), error.detail.get("op", "")
    reason = error.detail.get("error", str(error))
    hint = _hint(ds, pick, field, op, reason) if _meets_stored(ds, field, op) else ""
    name = error.detail.get("key", pick)
    message = f"{op} of {field!r} fails for {name}: {reason}." if op else f"{reason}."
    return PreflightError(f"{ds.snapshot.source}: {count} be prepared. {message}{hint}")


def _meets_stored(ds: SampleSequence, field: str, op: str) -> bool:
    """Return whether the op that failed is the field's first, so that the stored form may be the cause."""
    first = next((each.op for each in ds.ops if field in each.all_fields), op)
    return field in ds.fields and first == op


def _hint(ds: SampleSequence, pick: int, field: str, op: str, reason: str) -> str:
    """Return what a field's stored bytes look like and which op to use; "" if `op` is that op, or the reason
    says so already."""
    seen = _content_hint(ds, ds.unmapped()[pick][field])
    if seen is None or f"ops.{op}(" in seen.fix or seen.fix in reason:
        return ""
    return f" {field!r} is {seen.what}: {seen.fix.format(field=field)}."


def _content_hint(ds: SampleSequence, data: Any) -> ContentHint | None:
    if ds.snapshot.kind == "zarr":  # the output of its codecs looks like compressed files
        place = f"{ds.snapshot.source.rstrip('/')}/ARRAY/zarr.json"
        return ContentHint(
            "part of a Zarr array",
            f"put ops.zarr_chunk({{field!r}}, {place!r}) before any other op (for rows: ops.zarr)",
        )
    if not isinstance(data, np.ndarray):
        return None
    begins = bytes(data[:_LOOKED_AT])
    return identify_content(begins) or identify_numbers(ds.snapshot.kind, begins)


def _bytes_of(row: Mapping[str, Any]) -> int:
    return sum(np.asarray(value).nbytes for value in row.values() if not isinstance(value, Ragged))


def _check_packing(ds: SampleSequence, packed: Sequence[str], schema: Mapping[str, FieldSchema]) -> None:
    left = [name for name in ds.fields if name not in packed]
    if left:
        chosen = ", ".join(map(repr, packed))
        raise PreflightError(
            f"a packed row holds many samples and cannot carry {left[0]!r}: "
            f"ds.select({chosen}).pack({chosen}, …)"
        )
    dense = [name for name in packed if schema[name].shape is not None]
    if dense:
        raise PreflightError(f"{dense[0]!r} is {schema[dense[0]]}; only ragged sequences can be packed")


def _check_memory(batch_bytes: int) -> None:
    free = _free_memory()
    if free and _AHEAD * batch_bytes > free:
        raise PreflightError(
            f"a rank's batch takes {batch_bytes >> 20} MiB and a loader holds {_AHEAD}, but this machine has "
            f"only {free >> 20} MiB free: lower global_batch, use more ranks, or make rows smaller on the "
            "nodes (ops.center_crop, ops.resize, uint8 instead of float32)"
        )


def _free_memory() -> int:
    """Return the available memory in bytes; 0 if the system does not report it."""
    try:
        with open("/proc/meminfo") as file:
            found = next(line for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 0
    return int(found.split()[1]) << 10


def _bad_notes(bad: Mapping[int, BadSampleError], tried: int) -> list[str]:
    if not bad:
        return []
    first = next(iter(bad.values()))
    return [
        f"{len(bad)} of {tried} samples are bad, the first: {first.detail.get('key', '')}: "
        f"{first.detail.get('error', first)}. A loader substitutes up to max_bad (0.01) of its rows and "
        "raises beyond that: repair them, filter them out, or set on_bad and max_bad"
    ]


def _raw_notes(ds: SampleSequence, row: Mapping[str, Any]) -> list[str]:
    """Return notes on bytes fields without any op whose content is recognized."""
    mapped = {name for op in ds.ops for name in op.all_fields}
    notes = []
    for name, field in ds.snapshot.fields.items():
        if field.kind != "bytes" or name in mapped:
            continue
        seen = _content_hint(ds, row.get(name))
        if seen is not None:
            notes.append(f"{name!r} has no op and is {seen.what}: {seen.fix.format(field=name)}")
    return notes


def _is_sound(ds: SampleSequence, name: str) -> bool:
    return any(op.op == "decode_audio" and name in op.all_fields for op in ds.ops)


def _ragged_notes(
    ds: SampleSequence, schema: Mapping[str, FieldSchema], rows: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return notes on arrays of several dimensions, such as images, that are delivered ragged.

    Boxes and keypoints are not among them: samples have different numbers of objects.
    """
    notes = []
    annotations = {op.field for op in ds.ops if op.op in JOINT_OPS}
    for name, field in schema.items():
        if name in annotations:
            continue
        shapes = sorted({str(list(np.shape(row[name]))) for row in rows if name in row})
        if field.shape is not None or np.ndim(rows[0].get(name, 0)) < 2 or not prod(np.shape(rows[0][name])):
            continue
        last = [op.op for op in ds.ops if name in op.all_fields][-1:]
        if len(shapes) > 1:
            remark = (
                f"has rows of different shapes, such as {' and '.join(shapes[:2])}, and is delivered ragged: "
            )
            last_fix = _SOUND_FIX if _is_sound(ds, name) else "crop or resize it to one size"
            notes.append(f"{name!r} {remark}{last_fix}")
        elif len(rows) > 1:
            remark = (
                f"is delivered ragged: all rows tried are {shapes[0]}, but no op guarantees that all rows are"
            )
            fix = f"pass shape={shapes[0]} to ops.{last[0]}" if set(last) & _ARRAYS else "crop or resize it"
            fix = _SOUND_FIX if _is_sound(ds, name) else fix
            notes.append(f"{name!r} {remark}. For a dense tensor, {fix}")
    return notes
