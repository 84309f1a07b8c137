"""Whether one name's history is linearizable, and if not, whether docs/promises.md allows it all the same.

The search is Wing and Gong's, with Lowe's memory of configurations that led nowhere. Operations that change
nothing are placed as soon as they fit, which loses no solution; so it branches at writes only.

Law: pure but for the clock that bounds the search. `strict`: an operation that ended before another began
comes before it. `relaxed`: the same, but for two reads: each read fits the one order of all writes and
refusals by itself. That is what docs/promises.md says of reads while a write is under way.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Final, Literal

from tests.linearizability.model import ABSENT, MARKER, step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.linearizability.model import Operation, State, Versioning

Verdict = Literal["linearizable", "inversion", "unacknowledged", "violation", "undecided"]
ALLOWED: Final[frozenset[Verdict]] = frozenset({"linearizable", "inversion", "unacknowledged"})
"""`inversion`: reads went from the new value back to the old while that write was under way.
`unacknowledged`: a read gave a write that nobody was told the fate of, and which then never took place; or a
listing of versions lacked one that was under way."""
SECONDS: Final = 120.0


class _OutOfTimeError(Exception):
    pass


def verdict(
    operations: Sequence[Operation], versioning: Versioning = "", seconds: float = SECONDS
) -> Verdict:
    """What a history is. Raises nothing. Each search takes `seconds` at most; one that takes longer leaves
    the question to the next, which allows more: `undecided` where that cannot answer it either."""
    searches: list[tuple[Verdict, Sequence[Operation], bool]] = [
        ("linearizable", operations, False),
        ("inversion", operations, True),
        ("unacknowledged", without_unacknowledged(operations), True),
    ]
    otherwise: Verdict = "violation"
    for found, judged, relaxed in searches:
        try:
            if linearizable(judged, versioning, relaxed=relaxed, deadline=monotonic() + seconds):
                return found
        except _OutOfTimeError:
            otherwise = "undecided"
    return otherwise


def writes_alone(operations: Sequence[Operation]) -> list[Operation]:
    """A history without its reads: tells a lost update from a stale read."""
    return [one for one in operations if not one.is_read]


def without_unacknowledged(operations: Sequence[Operation]) -> list[Operation]:
    """Without what reads say of writes that were not acknowledged then."""
    return [
        replace(one, unsettled=_unsettled(one, operations)) if one.action == "versions" else one
        for one in operations
        if not gave_unacknowledged(one, operations)
    ]


def _unsettled(listing: Operation, operations: Sequence[Operation]) -> frozenset[str]:
    """What was written while it was listed "may be in it or not" ("Listings" in docs/promises.md), and so may
    what was never acknowledged."""
    found = set[str]()
    for write in operations:
        if write.changes and not write.version and write.begin < listing.end:
            if write.outcome == "unknown" and write.action == "delete":
                made = {one.made for one in operations}
                found.update(
                    v.version_id for v in listing.seen if v.value == MARKER and v.version_id not in made
                )
                found.add("")
            elif write.outcome == "unknown" or write.end > listing.begin:
                found.add(write.made or write.value)
    return frozenset(found - {"null"})


def gave_unacknowledged(read: Operation, operations: Sequence[Operation]) -> bool:
    """Whether a read gave a write without an acknowledgement, which another node need not show ("A write
    without an acknowledgement" in docs/promises.md). Not any more when a later write or refusal, begun after
    the client had given up, was answered before the read began: all nodes agree on that one."""
    if not read.is_read or read.version or read.status not in (200, 404):
        return False
    if read.action == "versions" and [version.version_id for version in read.seen] != ["null"]:
        return False
    value = read.seen[0].value if read.seen else ABSENT
    value = ABSENT if value == MARKER else value
    return any(
        write.begin < read.end and not _settled_between(write.end, read.begin, operations)
        for write in operations
        if write.changes and write.outcome == "unknown" and write.value == value
    )


def _settled_between(begin: float, end: float, operations: Sequence[Operation]) -> bool:
    return any(
        begin < one.begin and one.end < end
        for one in operations
        if not one.is_read and one.outcome in ("done", "refused")
    )


def linearizable(
    operations: Sequence[Operation],
    versioning: Versioning = "",
    *,
    relaxed: bool = False,
    deadline: float = inf,
) -> bool:
    """Whether one order explains every answer. Raises when the deadline has passed."""
    return _Search(operations, versioning, relaxed, deadline).run()


@dataclass(slots=True)
class _Place:
    """A configuration: what is left, the state, and the writes that could come next."""

    left: int
    state: State
    next_ones: Iterator[int] = field(repr=False)


class _Search:
    def __init__(
        self, operations: Sequence[Operation], versioning: Versioning, relaxed: bool, deadline: float
    ) -> None:
        self._ops = sorted((one for one in operations if one.outcome != "void"), key=lambda one: one.begin)
        self._versioning, self._deadline = versioning, deadline
        self._ends = [inf if one.outcome == "unknown" else one.end for one in self._ops]
        self._weak = sum(1 << n for n, one in enumerate(self._ops) if relaxed and one.is_read)
        self._needed = sum(1 << n for n, one in enumerate(self._ops) if one.outcome != "unknown")
        self._by_end = sorted(range(len(self._ops)), key=self._ends.__getitem__)
        self._before = self._listed_order()
        self._seen: set[tuple[int, State, bool]] = set()

    def _listed_order(self) -> list[int]:
        """Of each operation, those that come before it because a listing of versions says so. Such a listing
        gives the order of the writes away; without that, all orders would be tried."""
        before = [0] * len(self._ops)
        made = {
            (one.made, MARKER if one.action == "delete" else one.value): number
            for number, one in enumerate(self._ops)
            if one.changes and one.made and self._versioning == "Enabled"
        }
        for listing in self._ops:
            if listing.action == "versions":
                order = [made[version] for version in reversed(listing.seen) if version in made]
                for older, newer in pairwise(order):
                    before[newer] |= 1 << older
        return before

    def run(self) -> bool:
        """Depth first, on a stack of its own."""
        first = self._place((1 << len(self._ops)) - 1, (), idle=False)
        stack = [] if first is None else [first]
        while stack:
            if not stack[-1].left & self._needed:
                return True
            place = self._after(stack[-1])
            if place is None:
                stack.pop()
            else:
                stack.append(place)
        return False

    def _after(self, place: _Place) -> _Place | None:
        """The next configuration behind this one that was not seen before."""
        for number in place.next_ones:
            state = step(place.state, self._ops[number], self._versioning)
            if state is None:
                continue
            idle = self._ends[number] == inf and not self._versioning
            following = self._place(place.left & ~(1 << number), state, idle=idle)
            if following is not None:
                return following
        return None

    def _place(self, left: int, state: State, *, idle: bool) -> _Place | None:
        """`idle`: the last write may never have taken place, and nothing has come of it yet."""
        if monotonic() > self._deadline:
            raise _OutOfTimeError
        placed = self._place_observers(left, state)
        idle = idle and placed == left
        if (placed, state, idle) in self._seen:
            return None
        self._seen.add((placed, state, idle))
        return _Place(placed, state, iter(self._candidates(placed, idle)))

    def _place_observers(self, left: int, state: State) -> int:
        """Takes out all that changes nothing, may come now, and fits."""
        again = True
        while again:
            again = False
            for number in self._possible(left):
                one = self._ops[number]
                if not one.changes and step(state, one, self._versioning) is not None:
                    left &= ~(1 << number)
                    again = True
        return left

    def _candidates(self, left: int, idle: bool) -> list[int]:
        """Writes that may come now, those that must come first. A write that may never have taken place need
        not be followed at once by one that replaces it whatever it finds."""
        found = [number for number in self._possible(left) if self._ops[number].changes]
        if idle:
            found = [number for number in found if self._ops[number].conditional]
        return sorted(found, key=self._ends.__getitem__)

    def _possible(self, left: int) -> list[int]:
        """What no other operation that is left has to come before."""
        any_end = self._first_end(left)
        strong_end = self._first_end(left & ~self._weak) if self._weak else any_end
        latest, all_left, found = max(any_end, strong_end), left, list[int]()
        while left:
            number = (left & -left).bit_length() - 1
            left &= left - 1
            begin = self._ops[number].begin
            if begin > latest:
                break
            if self._before[number] & all_left:
                continue
            if begin <= (strong_end if self._weak >> number & 1 else any_end):
                found.append(number)
        return found

    def _first_end(self, left: int) -> float:
        return next((self._ends[number] for number in self._by_end if left >> number & 1), inf)
