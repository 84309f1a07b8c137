"""Placement migration: from a bucket's current homes to the planned ones, by steps (decision 0026). Pure.

Law: a copy is removed only when every planned home that answers has as much, or a load fetched everything.
A pinned copy stays, also one whose daemon does not answer now, until every planned home has the whole source.
Without a complete plan nothing is removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

_ENOUGH: Final = 0.95
"""Share of a copy that counts as complete; entries that a cache evicted must not block a migration."""


@dataclass(frozen=True, slots=True)
class BucketState:
    """`homes`: the bucket's present homes. `planned`: None before there is a plan. `held`: bytes on each
    daemon that answers. `source`: total bytes, if known. `unplaced`: the plan lacks copies. `was_loaded`: a
    load of everything succeeded since the homes became these. `pinned`: every home is to have all of it."""

    homes: tuple[str, ...]
    planned: Collection[str] | None
    held: Mapping[str, int]
    source: int | None = None
    unplaced: bool = False
    was_loaded: bool = False
    pinned: bool = False

    @property
    def pinned_bytes(self) -> int:
        """Bytes that every home is to have; 0 without that promise, or while the source is unknown."""
        return (self.source or 0) if self.pinned else 0


@dataclass(frozen=True, slots=True)
class MigrationStep:
    """What to do next. `homes`: the homes to set. `behind`: planned homes that hold less than a copy to be
    removed. `load`: load everything onto the homes, because a whole copy existed. `release`: daemons that
    drop what they hold."""

    homes: tuple[str, ...]
    behind: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    load: bool = False
    release: tuple[str, ...] = ()

    @property
    def moving(self) -> bool:
        """Whether a copy stays until another is complete."""
        return bool(self.leaving)


def plan_migration(seen: BucketState) -> MigrationStep:
    """Return the next step of a migration."""
    if not seen.planned:
        return MigrationStep(seen.homes)
    planned, enough = tuple(sorted(seen.planned)), _ENOUGH * seen.pinned_bytes
    most = max(_most(seen, planned), seen.pinned_bytes)
    behind = tuple(name for name in planned if name in seen.held and seen.held[name] < _ENOUGH * most)
    lacking = [name for name in planned if seen.held.get(name, 0) < enough]  # or silent, while pinned
    whole = seen.source is not None and most >= _ENOUGH * seen.source > 0
    stay = seen.unplaced or (bool(behind or lacking) and not seen.was_loaded)
    leaving = tuple(
        name
        for name in seen.homes
        if name not in planned and stay and (seen.unplaced or seen.held.get(name, seen.pinned_bytes) > 0)
    )
    homes = tuple(sorted({*planned, *leaving}))
    answers = any(name in seen.held for name in homes)
    release = tuple(sorted(name for name, size in seen.held.items() if size and name not in homes))
    return MigrationStep(
        homes,
        behind,
        leaving,
        load=bool(behind) and whole and not seen.was_loaded,
        release=release if answers and (seen.was_loaded or not lacking) else (),
    )


def _most(seen: BucketState, planned: Collection[str]) -> int:
    """Return the bytes of the largest copy to be removed, or else of the largest copy; for a bucket without
    homes, of all shares together."""
    if not seen.homes:
        return sum(seen.held.values())
    going = [name for name in seen.homes if name not in planned]
    return max((seen.held.get(name, 0) for name in going or seen.homes), default=0)


def describe_migration(before: Sequence[str], now: MigrationStep) -> str:
    """Describe the change for an event; empty if nothing changes."""
    if set(before) == set(now.homes):
        return ""
    come = sorted(set(now.homes) - set(before))
    gone = sorted(set(before) - set(now.homes))
    words = [f"kept on {', '.join(come)}" if come else "", f"no longer on {', '.join(gone)}" if gone else ""]
    until = f"{', '.join(now.leaving)} until the others are complete" if now.leaving else ""
    return "; ".join(filter(None, (*words, until)))
