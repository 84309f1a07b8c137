"""The stamps of deletions that writes in flight may have missed.

A deletion of a null version ends, in a rebuild, every null version with a lower stamp. A write that was
placed before it but commits after it must get a higher one, though it finds nothing that it replaces.

Law: used inside the index's write transaction. Invariant: bounded; what was dropped counts as a deletion of
every key, which costs the few writes in flight at that moment a new stamp and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshd.store.index import Index

_KEPT = 4096
_META = "graves"


class Graves:
    """One group's view; `settle` writes down what it added."""

    def __init__(self, index: Index, txn: Any) -> None:
        self._index = index
        known: list[int] = index.get_meta(_META, txn) or [0, 0]
        self._last, self._dropped = known
        self._changed = False

    def bury(self, txn: Any, name: bytes, stamp: int) -> None:
        """A null version of this key was removed by a deletion with this stamp."""
        self._index.graves.put(txn, name, stamp.to_bytes(8, "big"))
        self._last = max(self._last, stamp)
        self._changed = True

    def floor(self, txn: Any, name: bytes, stamp: int) -> int:
        """The stamp of a deletion that a write with `stamp` may have missed; 0 when there is none."""
        if stamp > self._last:
            return 0
        if stamp <= self._dropped:
            return self._dropped
        raw = self._index.graves.get(txn, name)
        return 0 if raw is None else int.from_bytes(raw, "big")

    def settle(self, txn: Any) -> None:
        """Before the commit."""
        if not self._changed:
            return
        if self._index.graves.count(txn) > _KEPT:
            txn.drop(self._index.graves.db, delete=False)
            self._dropped = self._last
        self._index.put_meta(txn, _META, (self._last, self._dropped))
