"""What reads of a name that many write at the same time may give.

Law: pure; times are any clock that all clients share. Each write is sent once. A name behaves as a register:
a write takes effect at one moment between its begin and its end, if it was acknowledged; at any moment after
its begin or never, if nobody knows what became of it; never, if it was refused.

So a read may give a write W unless an acknowledged write began after W was acknowledged, and ended before the
read began: W is overwritten then. Of writes that overlap, any may be the last. Several writes may have the
same value (copies of one object, deletions): it is enough that one of them explains the read.

Which of them are judged: reads of survivors after the loss of a node always (`certain`); the others not
beside a mark, see tests.faults.givenup.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.faults.givenup import is_beside
from tests.faults.history import ABSENT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tests.faults.givenup import Mark
    from tests.faults.history import Read, Write


@dataclass
class Registers:
    """What concurrent writers did, and what was read, in no order."""

    writes: list[Write] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    certain: list[Read] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """How often they wrote, and how many of these writes were acknowledged."""
        done = sum(write.outcome == "done" for write in self.writes)
        return {"concurrent": len(self.writes), "concurrent done": done, "certain": len(self.certain)}


def check_registers(seen: Registers, final: Iterable[Mapping[str, str]], marks: Sequence[Mark]) -> list[str]:
    """What is wrong, one line each; `final` is every name's value at each node when all was quiet again."""
    by_key = defaultdict[str, list["Write"]](list)
    for write in seen.writes:
        by_key[write.key].append(write)
    judged = [read for read in seen.reads if not is_beside(read, marks)]
    faults = [_check(by_key[read.key], read.key, read.value, read.began, read.ended) for read in judged]
    faults += [
        _after("the loss", _check(by_key[read.key], read.key, read.value, read.began, read.ended))
        for read in seen.certain
    ]
    end = float("inf")
    for values in final:
        faults += [_after("the end", _check(by_key[key], key, values[key], end, end)) for key in values]
    return [fault for fault in faults if fault]


def _after(when: str, fault: str) -> str:
    return f"after {when} {fault}" if fault else ""


def _check(writes: Sequence[Write], key: str, value: str, began: float, ended: float) -> str:
    """Why a read between these times may not give this value; "" if it may."""
    acknowledged = [write for write in writes if write.outcome == "done" and write.ended <= began]
    newest = max((write.began for write in acknowledged), default=float("-inf"))
    if value == ABSENT and not acknowledged:
        return ""
    given = [write for write in writes if write.value == value and write.began <= ended]
    if not given:
        return f"{key} gave nothing, and was written" if value == ABSENT else f"{key} gave {value}, unknown"
    left = [write for write in given if write.outcome != "refused"]
    if not left:
        return f"{key} gave {value}, which was refused"
    if any(write.outcome == "unknown" or write.ended >= newest for write in left):
        return ""
    by = max(acknowledged, key=lambda write: write.began)
    late = by.began - max(write.ended for write in left)
    return f"{key} gave {value or 'nothing'}, overwritten by {by.value or 'a deletion'} {late:.3f} s later"
