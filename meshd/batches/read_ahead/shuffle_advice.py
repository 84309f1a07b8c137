"""ShuffleAdvisor: what a full shuffle costs this node's rotational disks, said when a plan is registered.

Law: it advises and changes nothing: the plan says which order is meant. A plan never waits long for advice.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from meshd.util.async_tasks import SingleFlight
from meshd.util.timeouts import timeout
from meshwire.plan.shuffle import ShuffleSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.batches.read_ahead.cost_estimator import ReadCostEstimator
    from meshwire.dataset.snapshot import Snapshot

_PATIENCE: Final = 3.0  # seconds that a registration waits for an estimate
_REMEMBERED: Final = 256  # snapshots
WORTHWHILE_RATIO: Final = 1.3
"""Disk time of a full shuffle, relative to that of blocks, below which it is fine."""
WORTHWHILE_SECONDS: Final = 5.0
"""Disk time that blocks must save per epoch."""


def blocks_save_enough(full_seconds: float, blocks_seconds: float, media_seconds: float) -> bool:
    """Return whether blocks save enough disk time per epoch, compared with a full shuffle. `media_seconds`:
    the time of the bytes alone."""
    least = max(blocks_seconds, media_seconds)
    return full_seconds > WORTHWHILE_RATIO * least and full_seconds - blocks_seconds >= WORTHWHILE_SECONDS


class ShuffleAdvisor:
    """Advises on the orders of plans; one per worker."""

    def __init__(self, estimator: ReadCostEstimator) -> None:
        self._estimator = estimator
        self._notes: OrderedDict[str, str] = OrderedDict()
        self._estimating: SingleFlight[str, str] = SingleFlight()

    def __repr__(self) -> str:
        return f"<ShuffleAdvisor, {len(self._notes)} snapshots weighed>"

    async def advise(self, snapshot: Snapshot, shuffle: ShuffleSpec, batch: int | None) -> str:
        """Return a note on the order of a plan; "" if there is nothing to say: the order is not a full
        shuffle, the disks are not rotational, blocks would save little, or an estimate takes too long."""
        if shuffle.kind != "global" or not self._estimator.has_rotational_disks:
            return ""
        note = self._notes.get(snapshot.hash)
        if note is None:
            note = ""
            try:
                async with timeout(_PATIENCE):
                    note, _ = await self._estimating.run(snapshot.hash, lambda: self._note(snapshot, batch))
            except TimeoutError:
                pass
            self._notes[snapshot.hash] = note
            while len(self._notes) > _REMEMBERED:
                self._notes.popitem(last=False)
        self._notes.move_to_end(snapshot.hash)
        return note

    async def _note(self, snapshot: Snapshot, batch: int | None) -> str:
        return note_on_orders(*await self._estimator.estimate_orders(snapshot, (ShuffleSpec(), None), batch))


def note_on_orders(full: Mapping[str, Any], blocks: Mapping[str, Any]) -> str:
    """Return the note for the costs of a full shuffle and of blocks, as `ReadCostEstimator` gives them."""
    if not blocks_save_enough(full["disk_seconds"], blocks["disk_seconds"], blocks["media_seconds"]):
        return ""
    return (
        f"an epoch with shuffle=True costs rotational disks {_cost(full)} for {full['media_seconds']:.0f} s "
        f"of bytes, if nothing is in memory; with shuffle=mesh.Blocks(shards={blocks['shuffle']['shards']}) "
        f"{_cost(blocks)}, and samples move {blocks['randomness']['distance']:.2f} times as far as in a full "
        "shuffle. ds.preflight() compares the orders"
    )


def _cost(order: Mapping[str, Any]) -> str:
    return f"{order['seeks']:,} seeks and {order['disk_seconds']:.0f} s"
