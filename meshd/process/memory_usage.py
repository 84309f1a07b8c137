"""Memory usage: how much memory the node may still allocate, and how much its processes use.

It reads what the kernel reports (/proc, control groups v1 and v2) and decides nothing. Memory that the
kernel reclaims on demand (the page cache) counts as free.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROC: Final = Path("/proc")
_GROUPS: Final = Path("/sys/fs/cgroup")
_UNLIMITED: Final = 1 << 60  # version 1 reports a larger value where no limit is set
_FREEABLE: Final = ("active_file", "inactive_file", "slab_reclaimable")
_OWN: Final = ("RssAnon", "RssShmem", "VmSwap")


class MemoryRoom(msgspec.Struct, frozen=True):
    """`free` bytes may still be allocated, of `whole`."""

    free: int
    whole: int


class _CgroupVersion(msgspec.Struct, frozen=True):
    """The file names of one version of control groups."""

    limit: str
    used: str
    prefix: str


_V1: Final = _CgroupVersion("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_V2: Final = _CgroupVersion("memory.max", "memory.current", "")


def memory_room(proc: Path = _PROC, groups: Path = _GROUPS) -> MemoryRoom | None:
    """Return the room on the machine, or in the enclosing control group with the least room; None if the
    kernel does not report it."""
    return min([*_machine(proc), *_limits(proc, groups)], key=lambda found: found.free, default=None)


def free_memory() -> int | None:
    """Return the bytes that may still be allocated; None if the kernel does not report them."""
    found = memory_room()
    return None if found is None else found.free


def resident_by_role(supervisor: int, proc: Path = _PROC) -> dict[str, int]:
    """Return the private memory of a node's processes in bytes, by role, with their descendants. Pages shared
    since the fork count in each process; finished batches that no process has mapped count in none."""
    found = {"supervisor": _resident(supervisor, proc)}
    for child in _children(supervisor, proc):
        role = _text(proc / str(child) / "comm").strip().partition("-")[0]
        if role:
            found[role] = found.get(role, 0) + sum(_resident(each, proc) for each in _family(child, proc))
    return found


def _machine(proc: Path) -> Iterator[MemoryRoom]:
    sizes = _sizes(proc / "meminfo")
    if "MemAvailable" in sizes and "MemTotal" in sizes:
        yield MemoryRoom(sizes["MemAvailable"], sizes["MemTotal"])


def _limits(proc: Path, groups: Path) -> Iterator[MemoryRoom]:
    """Yield the limits of all control groups of the process, from its own to the outermost."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            places = [(groups, _V2), (groups / "unified", _V2)]
        elif "memory" in controllers.split(","):
            places = [(groups / "memory", _V1)]
        else:
            continue
        for root, kind in places:
            inner = root / path.lstrip("/")
            for folder in (inner, *inner.parents):
                yield from _limit(folder, kind)
                if folder == root:
                    break


def _limit(folder: Path, kind: _CgroupVersion) -> Iterator[MemoryRoom]:
    limit, used = _text(folder / kind.limit).strip(), _text(folder / kind.used).strip()
    if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED:
        words = (line.split() for line in _text(folder / "memory.stat").splitlines())
        sizes = {pair[0]: int(pair[1]) for pair in words if len(pair) == 2}
        freeable = sum(sizes.get(kind.prefix + name, 0) for name in _FREEABLE)
        yield MemoryRoom(max(0, min(int(limit), int(limit) - int(used) + freeable)), int(limit))


def _family(pid: int, proc: Path) -> Iterator[int]:
    yield pid
    for child in _children(pid, proc):
        yield from _family(child, proc)


def _children(pid: int, proc: Path) -> list[int]:
    return [int(word) for thread in proc.glob(f"{pid}/task/*") for word in _text(thread / "children").split()]


def _resident(pid: int, proc: Path) -> int:
    sizes = _sizes(proc / str(pid) / "status")
    return sum(sizes.get(name, 0) for name in _OWN)


def _sizes(path: Path) -> dict[str, int]:
    """Parse lines such as `Name:  12 kB` into bytes by name."""
    found = {}
    for line in _text(path).splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) << 10
    return found


def _text(path: Path) -> str:
    """Return a file's text; empty if it is missing, since processes end while they are inspected."""
    with suppress(OSError):
        return path.read_text()
    return ""
