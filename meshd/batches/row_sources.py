"""Sources of the rows of a batch: which sample each row is, and which bytes of which objects it is made of.

It computes the same slice and the same order as the batch itself, so that a row and its description agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshd.batches.assembly.frame_rows import slice_of
from meshd.core.api_errors import BatchError
from meshwire.dataset.build_snapshot import LabelColumn
from meshwire.plan.epoch_order import snapshot_order
from meshwire.plan.plan_spec import step_count

if TYPE_CHECKING:
    from meshd.auth.identity import Caller
    from meshd.batches.service import BatchService
    from meshd.core.document_store import DocumentStore
    from meshd.core.frame_address import FrameAddress
    from meshwire.dataset.build_snapshot import Snapshot

MAX_ROWS = 4096
"""Rows of one description."""


class RowSources:
    """Describes the rows of batches. One per worker."""

    def __init__(self, batches: BatchService, catalog: DocumentStore) -> None:
        self._batches, self._catalog = batches, catalog

    def __repr__(self) -> str:
        return "<RowSources>"

    async def describe(self, caller: Caller, address: FrameAddress) -> dict[str, Any]:
        """Return `steps` of the epoch and `rows`: of each, `position` in the epoch, `sample`, its `name`,
        whether it is a `pad` row, `labels` (number and name of the class) and `sources` (bucket, key, offset
        and length) by field.

        Raises BatchError NoSuchPlan, AccessDenied, BadRequest (a packed plan; too many rows), InvalidPlan.
        """
        plan = await self._batches.plan(caller, address.plan)
        if plan.within:
            raise BatchError(
                "BadRequest",
                "a row of a packed plan is not a sample, so that it has no one source",
                detail={"within": plan.within},
            )
        piece = slice_of(plan, address)
        if len(piece) > MAX_ROWS:
            raise BatchError("BadRequest", f"a description has at most {MAX_ROWS} rows, not {len(piece)}")
        snapshot = await self._catalog.snapshot(plan.snapshot)
        samples = snapshot_order(plan.spec, snapshot, address.epoch).samples_at(piece.positions)
        numbers = zip(piece.positions.tolist(), samples.tolist(), piece.pad.tolist(), strict=True)
        return {
            "steps": step_count(plan.positions, address.batch, address.origin, plan.spec.tail),
            "samples": plan.positions,
            "rows": [
                {"position": position, "sample": sample, "pad": pad, **_sources(snapshot, sample)}
                for position, sample, pad in numbers
            ],
        }


def _sources(snapshot: Snapshot, sample: int) -> dict[str, Any]:
    labels: dict[str, Any] = {}
    sources: dict[str, Any] = {}
    for name, column in sorted(snapshot.fields.items()):
        if isinstance(column, LabelColumn):
            number = int(column.values_at(sample))
            classes = column.classes
            known = 0 <= number < len(classes)
            labels[name] = {"value": number, "class": classes[number] if known else ""}
            continue
        place = int(column.objects_at(sample))
        sources[name] = {
            "bucket": snapshot.objects.bucket_of(place),
            "key": snapshot.objects.keys[place],
            "offset": int(column.offsets_at(sample)),
            "length": int(column.lengths_at(sample)),
            "size": int(snapshot.objects.sizes[place]),
        }
    return {"name": snapshot.sample_name(sample), "labels": labels, "sources": sources}
