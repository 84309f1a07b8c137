"""The size of a frame that is not built: known where every tensor's shape is.

Law: lays out what drafting lays out, and nothing else, so that the two cannot differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.assembly.assembler import count_rows, metadata_of
from meshd.assembly.drafting import fixed_specs
from meshwire.frames import layout
from meshwire.snapshots import LabelColumn

if TYPE_CHECKING:
    from meshd.assembly.addressing import FrameAddress
    from meshd.assembly.plans import Plan
    from meshwire.snapshots import Snapshot


def planned_size(plan: Plan, snapshot: Snapshot, address: FrameAddress) -> int | None:
    """In bytes; None when it depends on the data: ragged fields, or bad samples that are dropped. Raises
    BatchError InvalidPlan, TooLarge."""
    if plan.spec.on_bad == "drop" or any(output.shape is None for output in plan.outputs.values()):
        return None
    if plan.within:  # a packed row has the pack's fields only
        return layout(fixed_specs(plan, (), count_rows(address, plan)), metadata_of(address)).size
    labels = sorted(name for name, column in snapshot.fields.items() if isinstance(column, LabelColumn))
    return layout(fixed_specs(plan, labels, count_rows(address, plan)), metadata_of(address)).size
