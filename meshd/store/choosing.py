"""Walks over the names of some slots only: what one node of a mesh lists.

Law: a listing over such a walk is the listing of a store that has only those names. Outside of what is listed
nothing is passed over: a walk that has left `within` ends there.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.store.ordered import Runs


class AnyWalk(Protocol):
    """What listings need of `ordered.Walk`."""

    @property
    def key(self) -> bytes | None: ...

    @property
    def value(self) -> Any: ...

    def seek(self, start: bytes) -> None: ...

    def next(self) -> None: ...


class AnyRuns(Protocol):
    """What listings need of `ordered.Runs`."""

    def seek(self, start: bytes) -> None: ...

    def take(self, count: int) -> list[tuple[bytes, bytes]]: ...


def chooser(slots: bytes) -> Callable[[bytes], bool]:
    """Whether a stored name (`bucket NUL key`) lies in one of `slots`: a byte a slot, 0 or not. The same hash
    as `meshwire.cluster.placement.slot_of`."""
    mask, blake2b = len(slots) - 1, hashlib.blake2b

    def chosen(name: bytes) -> bool:
        digest = blake2b(name, digest_size=8, person=b"mesh-name").digest()
        return slots[int.from_bytes(digest, "big") & mask] != 0

    return chosen


class ChosenWalk:
    """A walk that stands at chosen names only. `tail`: bytes behind a name in the table's keys."""

    def __init__(self, walk: AnyWalk, chosen: Callable[[bytes], bool], within: bytes, tail: int = 0) -> None:
        self._walk, self._chosen, self._within, self._tail = walk, chosen, within, tail
        self._settle()

    @property
    def key(self) -> bytes | None:
        return self._walk.key

    @property
    def value(self) -> Any:
        return self._walk.value

    def seek(self, start: bytes) -> None:
        """To the first chosen name ≥ `start`."""
        self._walk.seek(start)
        self._settle()

    def next(self) -> None:
        """To the following chosen name."""
        self._walk.next()
        self._settle()

    def _settle(self) -> None:
        walk, tail = self._walk, self._tail
        while (key := walk.key) is not None and key.startswith(self._within):
            if self._chosen(key[:-tail] if tail else key):
                return
            walk.next()


class ChosenRuns:
    """The same for a walk by the run."""

    def __init__(self, runs: Runs, chosen: Callable[[bytes], bool], within: bytes) -> None:
        self._runs, self._chosen, self._within = runs, chosen, within

    def seek(self, start: bytes) -> None:
        """To the first name ≥ `start`."""
        self._runs.seek(start)

    def take(self, count: int) -> list[tuple[bytes, bytes]]:
        """The next `count` chosen pairs, fewer only at the end."""
        found: list[tuple[bytes, bytes]] = []
        while len(found) < count:
            wanted = count - len(found)
            run = self._runs.take(wanted)
            found += [pair for pair in run if self._chosen(pair[0])]
            if len(run) < wanted or not run[-1][0].startswith(self._within):
                break
        return found
