"""One name's history: kept as JSON lines, shrunk to what contradicts itself, and shown as a timeline.

Law: times are seconds of one clock that all clients share. `shrink` keeps a violation a violation, and the
same one: what is left contradicts itself only while all of its answers are there.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from tests.linearizability.checker import linearizable, verdict, writes_alone
from tests.linearizability.model import ABSENT, ANY, MARKER, Operation, Version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.linearizability.checker import Verdict
    from tests.linearizability.model import Versioning

_SHOWN: Final = 6  # characters of an ETag
_QUICK: Final = 2.0  # seconds for a check while shrinking


@dataclass(frozen=True, slots=True)
class Event:
    """Something that befell a node, or that the cluster map said of one. `stale`: reads meanwhile are not
    judged: a node that is taken out while two nodes do not reach each other answers from what it has until
    it learns of that ("Reads" in docs/promises.md)."""

    what: str
    begin: float
    end: float
    stale: bool = False


@dataclass(frozen=True, slots=True)
class History:
    """What clients did to a name and what they were told, and what befell the nodes meanwhile."""

    bucket: str
    key: str
    versioning: Versioning
    operations: tuple[Operation, ...]
    events: tuple[Event, ...] = ()

    @property
    def judged(self) -> list[Operation]:
        """Without the reads that may be stale."""
        spans = [(event.begin, event.end) for event in self.events if event.stale]
        return [
            one
            for one in self.operations
            if not (one.is_read and any(one.begin <= end and begin <= one.end for begin, end in spans))
        ]

    @property
    def verdict(self) -> Verdict:
        """See tests.linearizability.checker."""
        return verdict(self.judged, self.versioning)

    def save(self, path: Path) -> None:
        """Writes it as JSON lines: the name, the operations, the events."""
        about = {"bucket": self.bucket, "key": self.key, "versioning": self.versioning}
        lines = [about, *map(_sparse, self.operations), *map(asdict, self.events)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads what `save` wrote."""
        about, *lines = map(json.loads, path.read_text().splitlines())
        operations = tuple(_operation(line) for line in lines if "number" in line)
        events = tuple(Event(**line) for line in lines if "what" in line)
        return cls(about["bucket"], about["key"], about["versioning"], operations, events)

    def why(self) -> str:
        """What kind of contradiction it is, in a sentence."""
        if not linearizable(writes_alone(self.judged), self.versioning):
            return "the writes and refusals alone contradict each other"
        return "no order of the writes explains every read"

    def shrink(self) -> Self:
        """The fewest operations that contradict themselves; of a history that does not, itself."""
        if verdict(self.judged, self.versioning, _QUICK) != "violation":
            return self
        return replace(self, operations=tuple(_shrunk(self.judged, self.versioning)))

    def timeline(self) -> str:
        """Operations and events in order of time, in milliseconds from the first operation."""
        if not self.operations:
            return "no operation\n"
        start = min(one.begin for one in self.operations)
        last = max(one.end for one in self.operations)
        found = [(one.begin, one.end, _told(one)) for one in self.operations]
        found += [
            (event.begin, event.end, f"*** {event.what}")
            for event in self.events
            if event.begin <= last and event.end >= start
        ]
        lines = [_line(begin - start, end - start, what) for begin, end, what in sorted(found)]
        kind = self.versioning.lower() or "no"
        return "\n".join([f"{self.bucket}/{self.key} ({kind} versioning)", *lines, ""])


def _sparse(operation: Operation) -> dict[str, Any]:
    """Without what is empty."""
    return {name: value for name, value in asdict(operation).items() if value not in ("", (), frozenset())}


def _operation(line: dict[str, Any]) -> Operation:
    return Operation(**line | {"seen": tuple(Version(*one) for one in line.get("seen", ()))})


# shrinking ------------------------------------------------------------------------------------------------


def _shrunk(operations: list[Operation], versioning: Versioning) -> list[Operation]:
    operations = _without(operations, versioning, lambda one, _: not one.changes, _is_violation)
    while True:
        needed = [one for one in operations if _is_needed(one, operations, versioning)]
        fewer = _without(operations, versioning, _is_unneeded, partial(_is_the_same, needed))
        fewer = _without(fewer, versioning, lambda one, _: not one.changes, _is_violation)
        if len(fewer) == len(operations):
            return fewer
        operations = fewer


def _without(
    operations: list[Operation],
    versioning: Versioning,
    may_go: Callable[[Operation, Sequence[Operation]], bool],
    wanted: Callable[[list[Operation], Versioning], bool],
) -> list[Operation]:
    """As few as can be: in halves, quarters, …, one at a time."""
    size = len(operations)
    while size:
        at = 0
        while at < len(operations):
            piece = operations[at : at + size]
            left = [one for one in operations if one not in piece or not may_go(one, operations)]
            if len(left) < len(operations) and wanted(left, versioning):
                operations = left
            else:
                at += size
        size //= 2
    return operations


def _is_violation(operations: list[Operation], versioning: Versioning) -> bool:
    return verdict(operations, versioning, _QUICK) == "violation"


def _is_needed(one: Operation, operations: Sequence[Operation], versioning: Versioning) -> bool:
    """Whether there is no violation without this answer."""
    if one.changes and not one.conditional:
        return False
    return not _is_violation([other for other in operations if other is not one], versioning)


def _is_the_same(needed: Sequence[Operation], operations: list[Operation], versioning: Versioning) -> bool:
    """Whether it is a violation still, and none that taking out a write has made: then it would be one
    without one of the answers that were needed, too."""
    return _is_violation(operations, versioning) and all(
        one in operations and _is_needed(one, operations, versioning) for one in needed
    )


def _is_unneeded(write: Operation, operations: Sequence[Operation]) -> bool:
    """Whether no answer speaks of what a write has made."""
    if not write.changes:
        return False
    others = [one for one in operations if one is not write]
    if any(_speaks_of(one, write) for one in others):
        return False
    late = [one for one in others if _needs_absence(one) and one.end > write.begin]
    return write.action != "delete" or not late or all(write.end < one.begin for one in others)


def _needs_absence(one: Operation) -> bool:
    if one.is_read:
        return one.status in (404, 405) or not one.seen or any(v.value == MARKER for v in one.seen)
    return one.if_none_match == ANY or one.status == 404


def _speaks_of(one: Operation, write: Operation) -> bool:
    names = {
        one.if_match,
        one.if_none_match,
        one.version,
        *(text for version in one.seen for text in version),
    }
    return bool(names & {write.value, write.made, write.version} - {"", "null"})


# showing --------------------------------------------------------------------------------------------------


def _line(begin: float, end: float, what: str) -> str:
    return f"{begin * 1000:10.1f} … {end * 1000:10.1f}  {what}"


def _told(one: Operation) -> str:
    return f"{one.client:>4} at {one.node}: {_asked(one)} → {_answered(one)}"


def _asked(one: Operation) -> str:
    words = [one.action.upper()]
    if one.value:
        words.append(_short(one.value))
    if one.version:
        words.append(f"version {_short(one.version)}")
    if one.if_match:
        words.append(f"If-Match {_short(one.if_match)}")
    if one.if_none_match:
        words.append(f"If-None-Match {_short(one.if_none_match)}")
    return " ".join(words)


def _answered(one: Operation) -> str:
    if one.outcome == "unknown":
        return f"{one.status or 'no answer'}: may have taken place"
    if not one.is_read or one.status not in (200, 304):
        made = f" version {_short(one.made)}" if one.made else ""
        return f"{one.status}{made}"
    if one.status == 304:
        return "304"
    return ", ".join(_version(version) for version in one.seen) or "nothing"


def _version(version: Version) -> str:
    named = f" (version {_short(version.version_id)})" if version.version_id else ""
    return f"{_short(version.value)}{named}"


def _short(text: str) -> str:
    """The end of a version's id: what differs comes last."""
    return text if text in (ANY, MARKER, ABSENT) else text.strip('"')[-_SHOWN:]
