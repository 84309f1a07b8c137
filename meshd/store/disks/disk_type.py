"""Disk type: whether the disk that holds a file is rotational, as the kernel reports or as configured.

Network file systems and overlays do not report the type of their devices, and virtual disks of clouds
(virtio, Xen, NBD, RBD) always report platters. All of these count as solid-state unless the setting
`disk-type` says otherwise.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshd.config import DiskType

_BLOCK: Final = Path("/sys/dev/block")
_VIRTUAL_NAMES: Final = ("vd", "xvd", "nbd", "rbd")
_VIRTUAL_BUS: Final = re.compile(r"(virtio|vbd-)\d+")
_DEFAULT_READ_AHEAD: Final = 128 << 10


def is_rotational(device: int, block: Path = _BLOCK) -> bool:
    """Return whether a block device (`st_dev`) reports that it has spinning platters, and can know."""
    folder = (block / f"{os.major(device)}:{os.minor(device)}").resolve()
    virtual = folder.name.startswith(_VIRTUAL_NAMES) or any(map(_VIRTUAL_BUS.match, folder.parts))
    return not virtual and _queue_value(device, "rotational", block) == 1


def advice_limit(device: int, block: Path = _BLOCK) -> int:
    """Return the bytes that the kernel reads for one advice that a range of a file is needed; it ignores the
    rest of a longer range."""
    names = ("read_ahead_kb", "max_sectors_kb")
    return max(_DEFAULT_READ_AHEAD, *((_queue_value(device, name, block) or 0) << 10 for name in names))


def reads_in_flight(device: int, block: Path = _BLOCK) -> int:
    """Return how many reads, of any process, a block device has not finished; of a partition, its disk. 0 if
    that is not known."""
    folder = f"{block}/{os.major(device)}:{os.minor(device)}"
    for name in (f"{folder}/../inflight", f"{folder}/inflight"):  # the link is followed before ".."
        with suppress(OSError, ValueError, IndexError), open(name, "rb", buffering=0) as file:
            return int(file.read().split()[0])
    return 0


def request_limit(device: int, block: Path = _BLOCK) -> int:
    """Return the bytes of the largest request that the kernel always makes of a long read, whose pages may be
    anywhere in memory."""
    sectors = (_queue_value(device, "max_sectors_kb", block) or 0) << 10
    segments = (_queue_value(device, "max_segments", block) or 0) * os.sysconf("SC_PAGE_SIZE")
    return min(sectors, segments) or _DEFAULT_READ_AHEAD


def _queue_value(device: int, name: str, block: Path) -> int | None:
    """Return a number that the queue of a block device reports; None if it reports none."""
    folder = block / f"{os.major(device)}:{os.minor(device)}"
    for queue in (folder / "queue", folder.resolve().parent / "queue"):  # a partition has none of its own
        with suppress(OSError, ValueError):
            return int((queue / name).read_text())
    return None


class RotationalDisks:
    """Tells which disks are rotational, by device number; remembers the answers."""

    def __init__(self, disk_type: DiskType = "auto") -> None:
        self._type = disk_type
        self._known: dict[int, bool] = {}

    def __repr__(self) -> str:
        return f"<RotationalDisks {self._type}: {sorted(dev for dev, found in self._known.items() if found)}>"

    def includes(self, device: int) -> bool:
        """Return whether files on this device (`st_dev`) are on a rotational disk."""
        if self._type != "auto":
            return self._type == "rotational"
        found = self._known.get(device)
        if found is None:
            found = self._known[device] = is_rotational(device)
        return found

    def any_of(self, roots: Iterable[Path]) -> bool:
        """Return whether any of these directories is on a rotational disk."""
        for root in roots:
            try:
                if self.includes(os.stat(root).st_dev):
                    return True
            except OSError:  # a failed disk
                continue
        return False
