"""What one name's versions may be: operations on the name, what each does, and which answers fit.

Law: pure. The state of a name is the tuple of its versions, oldest first; a bucket without versioning has at
most one. Invariant: no two writes of a name store the same value (ETag), so that a value names its write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

ABSENT: Final = ""
"""The value of a name that has no object, or a delete marker as its current version."""
MARKER: Final = "delete marker"
ANY: Final = "*"

Action = Literal["put", "complete", "delete", "get", "head", "list", "versions"]
Versioning = Literal["", "Enabled", "Suspended"]
Outcome = Literal["done", "refused", "unknown", "void"]
READS: Final[frozenset[Action]] = frozenset({"get", "head", "list", "versions"})


class Version(NamedTuple):
    """`version_id` is empty where nobody was told it: in a bucket without versioning, or of a write without
    an answer."""

    version_id: str
    value: str


State = tuple[Version, ...]
"""Oldest first."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One request and its answer. `status` is 0 when no answer came, and `end` is then when the client gave
    up. `value` is what a write stores; `version` the version that is asked for by id; `made` the id that a
    write was told; `seen` what a read gave, newest first. `unsettled`: ids and values of versions that a
    listing may have or lack."""

    number: int
    client: str
    node: str
    action: Action
    begin: float
    end: float
    status: int
    value: str = ABSENT
    if_match: str = ""
    if_none_match: str = ""
    version: str = ""
    made: str = ""
    seen: tuple[Version, ...] = ()
    unsettled: frozenset[str] = frozenset()

    @property
    def is_read(self) -> bool:
        """Whether it asks and changes nothing."""
        return self.action in READS

    @property
    def conditional(self) -> bool:
        """Whether it is judged by the current version."""
        return bool(self.if_match or self.if_none_match)

    @property
    def outcome(self) -> Outcome:
        """`void`: it says nothing of the name, and has not changed it."""
        if self.is_read:
            return "done" if self.status in (200, 304, 404, 405, 412) else "void"
        if self.status in (200, 204):
            return "done"
        if self.status == 412 or (self.status == 404 and self.if_match):
            return "refused"
        return "unknown" if self.status == 0 or self.status >= 500 else "void"

    @property
    def changes(self) -> bool:
        """Whether it has changed the name, or may have."""
        return not self.is_read and self.outcome in ("done", "unknown")


def current(state: State) -> str:
    """The value of the current version."""
    if not state or state[-1].value == MARKER:
        return ABSENT
    return state[-1].value


def step(state: State, operation: Operation, versioning: Versioning) -> State | None:
    """The state after an operation; None where its answer does not fit the state before."""
    if operation.is_read:
        return state if _fits(state, operation) else None
    if operation.outcome == "refused":
        return state if _refused(current(state), operation) else None
    if operation.conditional and not _holds(_judged(state, operation), operation):
        return None
    return _changed(state, operation, versioning)


def _judged(state: State, operation: Operation) -> str:
    """What the conditions of a write are judged by: the version that it names, else the current one."""
    if not operation.version:
        return current(state)
    return next((v.value for v in state if v.version_id == operation.version), ABSENT)


def _holds(value: str, operation: Operation) -> bool:
    if operation.if_match and (value == ABSENT or operation.if_match not in (ANY, value)):
        return False
    return not operation.if_none_match or (value == ABSENT or operation.if_none_match not in (ANY, value))


def _refused(value: str, operation: Operation) -> bool:
    """404 is the answer to If-Match where there is nothing, 412 to every other condition that fails."""
    if operation.if_match and value == ABSENT:
        return operation.status == 404
    return operation.status == 412 and not _holds(value, operation)


def _changed(state: State, operation: Operation, versioning: Versioning) -> State:
    if operation.version:
        return tuple(v for v in state if v.version_id != operation.version)
    deletes = operation.action == "delete"
    new = Version(operation.made, MARKER if deletes else operation.value)
    if versioning == "Enabled":
        return (*state, new)
    if versioning == "Suspended":
        return (*(v for v in state if v.version_id != "null"), new._replace(version_id="null"))
    return () if deletes else (new,)


def _fits(state: State, read: Operation) -> bool:
    if read.action == "versions":
        kept = [v for v in reversed(state) if not read.unsettled.intersection(v)]
        seen = [v for v in read.seen if not read.unsettled.intersection(v)]
        return len(seen) == len(kept) and all(map(_same, seen, kept))
    if read.version:
        return _fits_version(state, read)
    value = current(state)
    match read.status:
        case 404:
            return value == ABSENT
        case 304:
            return value == read.if_none_match
        case 412:
            return value not in (ABSENT, read.if_match)
    if not read.seen:
        return value == ABSENT
    return value != ABSENT and _same(read.seen[0], state[-1])


def _fits_version(state: State, read: Operation) -> bool:
    if read.status == 404:
        return all(v.version_id != read.version for v in state)
    wanted = MARKER if read.status == 405 else read.seen[0].value
    return any(_same(Version(read.version, wanted), v) for v in state)


def _same(seen: Version, kept: Version) -> bool:
    ids = (seen.version_id, kept.version_id)
    return seen.value == kept.value and ("" in ids or ids[0] == ids[1])
