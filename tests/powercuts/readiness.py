"""How long a start took, and how long it may: 5 s, and 1 s for each 100,000 objects.

The time in which the processes were ready to run and had no core does not count: that is other work of
the machine. Waiting for the disk and for other processes counts.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.support.daemons import Daemon

_BASE: Final = 5.0
_PER_OBJECT: Final = 1 / 100_000


def is_late(seconds: float, objects: int) -> bool:
    """Whether a start took longer than it may."""
    return seconds > _BASE + objects * _PER_OBJECT


def start_seconds(wall: float, disks: Iterable[int], daemons: Iterable[Daemon]) -> float:
    """Seconds that daemons that started together took, without those in which they, or the file systems of
    these process ids, had no core: the processes of a daemon one after the other, and one daemon beside the
    others."""
    own = max(sum(map(waited, (each.pid, *each.children().values()))) for each in daemons)
    return wall - own - max(map(waited_by_all, disks), default=0.0)


def waited(pid: int) -> float:
    """Seconds that the thread of a process that waited longest for a core has waited."""
    return max(_waits(pid), default=0.0)


def waited_by_all(pid: int) -> float:
    """Seconds that the threads of a process have waited for a core, one after the other."""
    return sum(_waits(pid))


def _waits(pid: int) -> list[float]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            found.append(int((task / "schedstat").read_text().split()[1]) / 1e9)
    return found
