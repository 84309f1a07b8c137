"""What may be seen of writes that somebody gave up, and wrote over.

Law: pure; times are any clock that all clients share. A name belongs to one client, which writes it a write
at a time, each sent once (no retries) to one node, and goes on whatever came of it.

Of an earlier write A and a later one B of the same name, A ended (answered, refused, or given up) before B
began and B acknowledged before the read began, the rule is: the read does not give A,

- if A was acknowledged: whatever was decided later is the newer ("Order" in docs/promises.md);
- if A was refused: nothing was changed, with or without a B;
- if A was given up, and its node was marked `away` or `down` in the control store after A ended and before B
  began: nothing is done later of what a node was asked before it was marked (decision 37).

It is fair to claim no more of A that was given up: while its node is only slow, or stopped for less than its
lease, A is a request on its way, and may be carried out after B. And no less: A was asked for under a map
older than the mark, since it had ended by then; B by a newer one. The node that decides may be marked, too,
and A be carried out by the next one, if it had not begun: so only the node that A was sent to counts.

Reads beside a mark are not judged: a node that is taken out although it reaches the control store answers
from what it has until it hears of that ("Reads" in docs/promises.md).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tests.faults.history import ABSENT, Read, Write

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_BESIDE: Final = 1.0
"""Seconds around a mark."""


@dataclass(frozen=True, slots=True)
class Attempt(Write):
    """A write that was sent once, to node `via`."""

    via: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A node was marked away or down in the control store, later than `after` and not later than `seen`."""

    node: str
    after: float
    seen: float


@dataclass
class Haste:
    """What hasty clients did and saw, in no order."""

    attempts: list[Attempt] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)

    def merge(self, other: Haste) -> None:
        """Takes in what another client saw."""
        self.attempts += other.attempts
        self.reads += other.reads

    def counts(self) -> dict[str, int]:
        """How often they wrote, and gave up."""
        given_up = sum(attempt.outcome == "unknown" for attempt in self.attempts)
        done = sum(attempt.outcome == "done" for attempt in self.attempts)
        return {"hasty": len(self.attempts), "hasty done": done, "given up": given_up}


def check_haste(haste: Haste, final: Sequence[Mapping[str, str]], marks: Sequence[Mark]) -> list[str]:
    """What is wrong, one line each; `final` is every name's value at each node when all was quiet again."""
    attempts, by_node = defaultdict[str, list[Attempt]](list), defaultdict[str, list[Mark]](list)
    for attempt in haste.attempts:
        attempts[attempt.key].append(attempt)
    for mark in marks:
        by_node[mark.node].append(mark)
    reads = [read for read in haste.reads if not is_beside(read, marks)]
    faults = [fault for read in reads for fault in _check(read, attempts[read.key], by_node)]
    end = float("inf")
    for values in final:
        for key, value in values.items():
            faults += [f"at the end {f}" for f in _check(Read(key, value, end, end), attempts[key], by_node)]
    return faults


def is_beside(read: Read, marks: Iterable[Mark]) -> bool:
    """Whether a read is not judged: a node was marked at about the same time."""
    return any(m.after - _BESIDE < read.ended and read.began < m.seen + _BESIDE for m in marks)


def _check(read: Read, attempts: Sequence[Attempt], marks: Mapping[str, Sequence[Mark]]) -> list[str]:
    acknowledged = [a for a in attempts if a.outcome == "done" and a.ended <= read.began]
    newest = max((a.began for a in acknowledged), default=float("-inf"))
    if read.value == ABSENT:
        return [f"{read.key} gave nothing, and was written"] if acknowledged else []
    given = next((a for a in attempts if a.value == read.value and a.began <= read.ended), None)
    if given is None:
        return [f"{read.key} gave {read.value}, which nobody wrote before"]
    why = _gone(given, newest, marks.get(given.via, ()))
    return [f"{read.key} gave {read.value} of {given.via}, which {why}"] if why else []


def _gone(given: Attempt, newest: float, marks: Iterable[Mark]) -> str:
    """Why an attempt may not be seen, when the newest acknowledged write began then; "" if it may."""
    if given.outcome == "refused":
        return "was refused"
    if given.ended > newest:
        return ""
    if given.outcome == "done":
        return "was written over"
    if any(given.ended <= mark.after and mark.seen <= newest for mark in marks):
        return "was given up before that node was marked away, and written over after"
    return ""
