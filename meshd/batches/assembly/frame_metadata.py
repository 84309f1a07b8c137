"""Metadata and size of frames that are not built yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.batches.assembly.frame_buffer import fixed_specs
from meshd.batches.assembly.frame_rows import count_rows
from meshd.core.frame_address import FrameAddress
from meshwire.dataset.build_snapshot import LabelColumn
from meshwire.frame.tensor_frame import FRAME_VERSION, frame_layout

if TYPE_CHECKING:
    from meshd.core.frame_address import Address
    from meshd.core.plan_record import Plan
    from meshwire.dataset.build_snapshot import Snapshot


def block_metadata(block: str) -> dict[str, str]:
    """Return the metadata of the frame of a block."""
    return {"version": FRAME_VERSION, "block": block}


def metadata_of(address: Address) -> dict[str, str]:
    """Return the metadata of a frame, without checksums."""
    values: dict[str, object] = {"version": FRAME_VERSION, "plan": address.plan, "epoch": address.epoch}
    if isinstance(address, FrameAddress):
        values |= {name: getattr(address, name) for name in ("step", "rank", "world", "batch", "origin")}
    return {name: str(value) for name, value in values.items()}


def planned_size(plan: Plan, snapshot: Snapshot, address: FrameAddress) -> int | None:
    """Return the size of a frame in bytes, or None if it depends on the data.

    It does with ragged fields and when bad samples are dropped. Raises BatchError InvalidPlan, TooLarge.
    """
    if plan.spec.on_bad == "drop" or any(output.shape is None for output in plan.outputs.values()):
        return None
    if plan.within:  # a packed row has only the fields of the pack
        return frame_layout(fixed_specs(plan, (), count_rows(address, plan)), metadata_of(address)).size
    labels = sorted(name for name, column in snapshot.fields.items() if isinstance(column, LabelColumn))
    return frame_layout(fixed_specs(plan, labels, count_rows(address, plan)), metadata_of(address)).size
