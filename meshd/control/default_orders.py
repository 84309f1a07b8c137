"""Table of default orders: which order a loader without `shuffle` has on a snapshot, and why.

Law: the first order that is recorded for a snapshot stays, so that all ranks of a job have one order,
whichever node they ask. Invariant: the table keeps the latest 2,000 decisions.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from meshd.control.cached_topic import CachedTopic
from meshd.control.control_api import ABSENT, ControlError, VersionConflictError

if TYPE_CHECKING:
    from meshd.control.control_api import ControlStore

TOPIC: Final = "orders"
_KEPT: Final = 2000


class DefaultOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """A decision. `shards`: of a block; `reason`: in words; `distance` and `runs`: relative to a full
    shuffle."""

    decided_ms: int
    kind: Literal["global", "blocks"]
    reason: str
    shards: int = 0
    distance: float = 1.0
    runs: float = 1.0


_decode = msgspec.json.Decoder(DefaultOrder).decode


class DefaultOrderTable:
    """Default orders by snapshot. One per process."""

    def __init__(self, control: ControlStore) -> None:
        self._documents = CachedTopic(control, TOPIC, _decode)

    def __repr__(self) -> str:
        return f"<DefaultOrderTable {self._documents!r}>"

    async def find(self, snapshot: str) -> DefaultOrder | None:
        """Returns the recorded order of a snapshot, also if another node has just recorded it."""
        return await self._documents.get_fresh(snapshot)

    async def record(self, snapshot: str, order: DefaultOrder) -> DefaultOrder:
        """Records an order unless one is recorded; returns the one that is. Raises ControlError."""
        try:
            await self._documents.put(snapshot, order, expect=ABSENT)
        except VersionConflictError:
            found = await self.find(snapshot)
            if found is None:
                raise ControlError(f"the order of {snapshot} was just recorded by another node") from None
            return found
        await self._drop_oldest()
        return order

    async def _drop_oldest(self) -> None:
        known = self._documents.current()
        for name in sorted(known, key=lambda name: known[name].decided_ms)[: max(0, len(known) - _KEPT)]:
            with suppress(ControlError):
                await self._documents.delete(name, expect=self._documents.version(name))
