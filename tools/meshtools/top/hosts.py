"""Processors, memory, disks and network of this machine, from /proc.

Law: counters are read in one go and parsed by pure functions; rates are differences between two snapshots.
Disks are whole disks, not partitions.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_SECTOR: Final = 512  # bytes of a sector in /proc/diskstats, whatever the disk uses
_VIRTUAL: Final = ("loop", "ram", "zram", "fd", "sr", "nbd")


@dataclass(frozen=True, slots=True)
class Disk:
    """Counters: bytes read and written, milliseconds with at least one request in flight."""

    read: int
    written: int
    busy_ms: int


@dataclass(frozen=True, slots=True)
class Link:
    """Counters: bytes received and sent."""

    received: int
    sent: int


@dataclass(frozen=True, slots=True)
class HostSnapshot:
    """Counters at the time `now` (monotonic seconds). `busy`, `jiffies`: over all processors; memory in
    bytes."""

    now: float
    cores: int
    busy: int
    jiffies: int
    memory: int
    available: int
    load: float
    disks: Mapping[str, Disk] = field(default_factory=dict)
    links: Mapping[str, Link] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HostRates:
    """Rates between two snapshots: `cpu` as a share of all cores, 0…1; bytes per second; the `busy` share of
    a disk, 0…1."""

    cores: int
    cpu: float
    load: float
    memory: int
    used: int
    disks: Mapping[str, Mapping[str, float]]
    links: Mapping[str, Mapping[str, float]]

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def read_host(proc: Path = Path("/proc"), now: float | None = None) -> HostSnapshot:
    """Reads the counters; what the kernel does not report is 0 or missing."""
    busy, jiffies = processors(_text(proc / "stat"))
    memory, available = memories(_text(proc / "meminfo"))
    words = _text(proc / "loadavg").split()
    return HostSnapshot(
        time.monotonic() if now is None else now,
        os.cpu_count() or 1,
        busy,
        jiffies,
        memory,
        available,
        float(words[0]) if words else 0.0,
        disks(_text(proc / "diskstats")),
        links(_text(proc / "net" / "dev")),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def processors(text: str) -> tuple[int, int]:
    """Returns the (busy, all) jiffies of /proc/stat; waiting for a disk is not busy."""
    for line in text.splitlines():
        if line.startswith("cpu "):
            numbers = [int(word) for word in line.split()[1:9]]  # the time of guests is in user already
            idle = sum(numbers[3:5])
            return sum(numbers) - idle, sum(numbers)
    return 0, 0


def memories(text: str) -> tuple[int, int]:
    """Returns the (total, available) bytes of /proc/meminfo."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if name in ("MemTotal", "MemAvailable") and words:
            found[name] = int(words[0]) << 10
    return found.get("MemTotal", 0), found.get("MemAvailable", 0)


def disks(text: str) -> dict[str, Disk]:
    """Returns the whole disks of /proc/diskstats: a partition follows its disk, and its name begins with the
    disk's."""
    found: dict[str, Disk] = {}
    whole = ""
    for line in text.splitlines():
        words = line.split()
        if len(words) < 13 or words[2].startswith(_VIRTUAL):
            continue
        name = words[2]
        if whole and name.startswith(whole) and name[len(whole) :].lstrip("p").isdigit():
            continue
        whole = name
        found[name] = Disk(int(words[5]) * _SECTOR, int(words[9]) * _SECTOR, int(words[12]))
    return found


def links(text: str) -> dict[str, Link]:
    """Returns the interfaces of /proc/net/dev."""
    found = {}
    for line in text.splitlines()[2:]:
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) >= 9:
            found[name.strip()] = Link(int(words[0]), int(words[8]))
    return found


def rates(before: HostSnapshot, after: HostSnapshot) -> HostRates:
    """Returns the rates between two snapshots."""
    seconds = max(after.now - before.now, 1e-6)
    jiffies = after.jiffies - before.jiffies
    return HostRates(
        after.cores,
        (after.busy - before.busy) / jiffies if jiffies > 0 else 0.0,
        after.load,
        after.memory,
        after.memory - after.available,
        {
            name: {
                "read": _rate(before.disks[name].read, disk.read, seconds),
                "written": _rate(before.disks[name].written, disk.written, seconds),
                "busy": min(_rate(before.disks[name].busy_ms, disk.busy_ms, 1000 * seconds), 1.0),
            }
            for name, disk in after.disks.items()
            if name in before.disks
        },
        {
            name: {
                "received": _rate(before.links[name].received, link.received, seconds),
                "sent": _rate(before.links[name].sent, link.sent, seconds),
            }
            for name, link in after.links.items()
            if name in before.links
        },
    )


def _rate(before: int, after: int, seconds: float) -> float:
    return max(after - before, 0) / seconds  # a counter that was reset says nothing
