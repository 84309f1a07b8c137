"""How long a start took, and how long it may: 5 s, and 1 s for each 100,000 objects.

The time in which the processes were ready to run and had no core does not count: that is other work of
the machine. Waiting for the disk and for other processes counts.
"""

from __future__ import annotations

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


def without_core(daemon: Daemon) -> float:
    """Seconds that its processes have waited for a core, one process after the other."""
    return sum(waited(pid) for pid in (daemon.pid, *daemon.children().values()))


def waited(pid: int) -> float:
    """Seconds that the thread of a process that waited longest for a core has waited."""
    return max(map(_waited, Path(f"/proc/{pid}/task").iterdir()), default=0.0)


def _waited(task: Path) -> float:
    try:
        return int((task / "schedstat").read_text().split()[1]) / 1e9
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return 0.0


def start_seconds(wall: float, daemons: Iterable[Daemon]) -> float:
    """Seconds that daemons that started together took, without those in which they had no core."""
    return wall - max(map(without_core, daemons))
