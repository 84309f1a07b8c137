"""What clients of a mesh saw, and whether a correct store could have shown it to them.

Law: pure; times are any clock that all clients share. An operation that failed without an answer may have
taken place, at any time after it began; one that was refused has not. A key is not written again after such a
write, so that it never hides a later loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Outcome = Literal["done", "refused", "unknown"]
ABSENT: Final = ""
"""The value of a key that is not there."""


@dataclass(frozen=True, slots=True)
class Write:
    """`value` names what was put, ABSENT is a deletion."""

    key: str
    value: str
    began: float
    ended: float
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Read:
    """What a GET gave: the name of the value, or what the bytes were if they are nobody's."""

    key: str
    value: str
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Listing:
    """Every page of one listing, asked for between `began` and `ended`."""

    prefix: str
    keys: frozenset[str]
    began: float
    ended: float


@dataclass
class History:
    """Everything that happened, in no order. `chains`: keys changed by If-Match, whose value is the names of
    all changes, joined; `firsts`: keys made by If-None-Match."""

    writes: list[Write] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    listings: list[Listing] = field(default_factory=list)
    chains: list[Write] = field(default_factory=list)
    firsts: list[Write] = field(default_factory=list)

    def merge(self, other: History) -> None:
        """Takes in what another client saw."""
        for name in ("writes", "reads", "listings", "chains", "firsts"):
            getattr(self, name).extend(getattr(other, name))

    def counts(self) -> dict[str, int]:
        """How much was seen, and how much of it remained unknown."""
        every = [*self.writes, *self.chains, *self.firsts]
        return {
            "writes": len(every),
            "done": sum(w.outcome == "done" for w in every),
            "unknown": sum(w.outcome == "unknown" for w in every),
            "reads": len(self.reads),
            "listings": len(self.listings),
        }


def check(history: History, final: Mapping[str, str]) -> list[str]:
    """What is wrong, one line each; `final` is every key's value when all was quiet again."""
    by_key = _by_key(history.writes)
    faults = [fault for read in history.reads for fault in _check_read(read, by_key.get(read.key, ()))]
    for key, writes in by_key.items():
        end = Read(key, final.get(key, ABSENT), float("inf"), float("inf"))
        faults += [f"at the end {fault}" for fault in _check_read(end, writes)]
    for listing in history.listings:
        faults += _check_listing(listing, by_key)
    for key, writes in _by_key(history.chains).items():
        faults += _check_chain(key, writes, final.get(key, ABSENT))
    for key, writes in _by_key(history.firsts).items():
        faults += _check_first(key, writes, final.get(key, ABSENT))
    return faults


def _by_key(writes: Iterable[Write]) -> dict[str, list[Write]]:
    found: dict[str, list[Write]] = {}
    for write in sorted(writes, key=lambda write: write.began):
        found.setdefault(write.key, []).append(write)
    return found


def possible(writes: Sequence[Write], began: float, ended: float) -> set[str]:
    """What a read between these times may give of a key that one client writes, a write at a time."""
    values = {ABSENT}
    for write in writes:
        if write.outcome == "refused" or write.began > ended:
            continue
        if write.outcome == "done" and write.ended <= began:
            values = {write.value}
        else:
            values.add(write.value)
    return values


def _check_read(read: Read, writes: Sequence[Write]) -> list[str]:
    allowed = possible(writes, read.began, read.ended)
    if read.value in allowed:
        return []
    named = " or ".join(value or "nothing" for value in sorted(allowed))
    return [f"{read.key} gave {read.value or 'nothing'}, not {named}"]


def _check_listing(listing: Listing, by_key: Mapping[str, Sequence[Write]]) -> list[str]:
    faults = []
    for key, writes in by_key.items():
        if not key.startswith(listing.prefix):
            continue
        allowed = possible(writes, listing.began, listing.ended)
        if key in listing.keys and allowed == {ABSENT}:
            faults.append(f"{key} was listed, and is deleted or never was")
        if key not in listing.keys and ABSENT not in allowed:
            faults.append(f"{key} was not listed, and is there")
    return faults


def _check_chain(key: str, writes: Sequence[Write], final: str) -> list[str]:
    """Each change appends its name to what it read: those done are there once, those refused are not."""
    names = final.split(",") if final else []
    outcomes = {write.value: write.outcome for write in writes}
    faults = [f"{key}: {name} is there twice" for name in set(names) if names.count(name) > 1]
    for name, outcome in outcomes.items():
        if outcome == "done" and name not in names:
            faults.append(f"{key}: {name} was acknowledged and is lost")
        if outcome == "refused" and name in names:
            faults.append(f"{key}: {name} was refused and is there")
    faults += [f"{key}: nobody wrote {name}" for name in names if name not in outcomes]
    return faults


def _check_first(key: str, writes: Sequence[Write], final: str) -> list[str]:
    """At most one of those who made a key was told that it did, and then it is that one's."""
    winners = [write.value for write in writes if write.outcome == "done"]
    if len(winners) > 1:
        return [f"{key}: made by {', '.join(winners)} at once"]
    if winners and final != winners[0]:
        return [f"{key}: made by {winners[0]}, but it is {final or 'nothing'}"]
    unknown = [write.value for write in writes if write.outcome == "unknown"]
    if not winners and final != ABSENT and final not in unknown:
        return [f"{key}: nobody who may have made it wrote {final}"]
    return []
