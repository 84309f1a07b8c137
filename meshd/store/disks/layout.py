"""Disk layout: disk markers, data file paths, and the choice of the disk for new data by free space.

Law: the path of a data file follows from (disk, file) alone. A marker identifies a disk, not its
position among the `--disk` options, so disks may be moved and reordered. Records store the disk
explicitly, so a read never derives it from the key. Deletes and upload aborts may use the reserve that
other writes leave, and documents of the node's own a half of it: what is there can be read and trained on
while the disks are full.
"""

from __future__ import annotations

import hashlib
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.store.disks.reserve_files import has_reserve
from meshd.store.errors import DiskFailedError, FormatError
from meshd.store.records import DiskStats
from meshd.telemetry import metrics
from meshd.util.disk_space import measure_disk_space
from meshd.util.durable_directories import make_directory, sync_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from meshd.config import StoreSettings


FORMAT = 1
EXTENTS = "extents"
MARKER = "DISK"
DRAFTS = "drafts"
LOST_DISKS_KEY = "disks_lost"
MOUNTED_DISKS_KEY = "disks_mounted"
"""Meta keys of the index: the numbers of the disks out of service, and of those that are mount points."""
DISK_STARTS_KEY = "disk_starts"
"""Meta key of the index: by number, the `start`s that the marker of a disk may have."""
DISK_FAILURES_KEY = "disk_failures"
"""Meta key of the index: by number, why disks are out of service, as `failed (Input/output error)`."""
SET_BACK_KEY = "set_back"
"""Meta key of the index: whether it went back to a checkpoint, and other nodes have what came after."""
FANOUT = 64


class DiskMarker(msgspec.Struct, frozen=True):
    """Contents of `<disk>/extents/DISK`. `disks`: how many disks the store has, so that a forgotten one is
    noticed; `lost`: the disks that failed and are out of service; `start`: of the last start of the node with
    this disk, which tells an old copy of it from itself; "" if unknown."""

    format: int
    store: str
    disk: int
    disks: int = 1
    lost: tuple[int, ...] = ()
    start: str = ""


def read_marker(root: Path) -> DiskMarker | None:
    """Reads the marker of a disk; None if it has none. Raises FormatError if a newer version wrote it."""
    try:
        marker = msgspec.json.decode((root / EXTENTS / MARKER).read_bytes(), type=DiskMarker)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FormatError(
            f"{root / EXTENTS / MARKER} is unreadable ({error}); restore it, or remove the disk from --disk"
        ) from error
    if marker.format > FORMAT:
        raise FormatError(
            f"{root} was written by a newer meshd (format {marker.format}, not {FORMAT}); upgrade meshd"
        )
    return marker


def write_marker(root: Path, marker: DiskMarker) -> None:
    """Creates the directories of a disk and marks it durably."""
    base = root / EXTENTS
    make_directory(base)
    for number in range(FANOUT):
        (base / f"{number:02x}").mkdir(exist_ok=True)
    temporary = base / f"{MARKER}.new"
    with temporary.open("wb") as file:
        file.write(msgspec.json.encode(marker))
        file.flush()
        os.fsync(file.fileno())  # before the rename: a crash must not leave an empty marker
    temporary.rename(base / MARKER)
    sync_directory(base)


def find_disks(settings: StoreSettings) -> tuple[str, dict[int, Path]]:
    """Returns the store's id and its disks by number, read from the markers. Raises FormatError."""
    stores, disks, count, lost = set(), {}, 0, set[int]()
    for root in settings.disks:
        marker = read_marker(root)
        if marker is None:
            raise FormatError(f"{root} has no store marker; pass exactly the disks that hold the data")
        stores.add(marker.store)
        disks[marker.disk] = root
        lost |= set(marker.lost)
        count = max(count, marker.disks, marker.disk + 1)
    if len(stores) != 1 or len(disks) != len(settings.disks):
        raise FormatError("the disks belong to different stores; pass exactly the disks of one store")
    missing = set(range(count)) - set(disks) - lost
    if missing:
        raise FormatError(f"disk number {min(missing)} of this store is missing; add it with --disk")
    return stores.pop(), disks


def write_lost_disks(disks: Disks) -> None:
    """Records the lost disks in the markers of all others (blocking)."""
    for root in disks.roots.values():
        marker = read_marker(root)
        if marker is not None:
            write_marker(root, msgspec.structs.replace(marker, lost=tuple(sorted(disks.lost))))


def is_mounted(root: Path) -> bool:
    """Returns True if the directory is a mount point. Raises OSError."""
    return os.stat(root).st_dev != os.stat(root.parent).st_dev


def _place(path: str) -> tuple[int, int] | None:
    """Returns device and inode of a directory; None if it cannot be looked at."""
    with suppress(OSError):
        found = os.stat(path)
        return found.st_dev, found.st_ino
    return None


class Disks:
    """The disks of one store: `roots` maps the numbers of those in service to their directories; `lost` those
    that failed or are missing.

    Drafts have a directory of their own, so that a starting worker need not scan every data file.
    """

    def __init__(self, roots: Mapping[int, Path], lost: Mapping[int, Path] | None = None) -> None:
        self.lost: Mapping[int, Path] = dict(lost or {})
        self._readable: Mapping[int, str] = {}
        self._refresh: Callable[[], None] = lambda: None
        self._places: dict[int, tuple[int, int] | None] = {}
        """Device and inode of the disks in service, as they were when they were put into service."""
        self._set_roots(dict(sorted(roots.items())))

    def _set_roots(self, roots: Mapping[int, Path]) -> None:
        self.roots: Mapping[int, Path] = roots
        self._bases = {number: str(root / EXTENTS) for number, root in roots.items()}
        lost = {number: str(root / EXTENTS) for number, root in self.lost.items()}
        self._paths = {**self._readable, **lost, **self._bases}
        self._numbers = tuple(roots)
        self._places = {number: self._places.get(number) or _place(self._bases[number]) for number in roots}

    def __repr__(self) -> str:
        return f"<Disks {self.roots}>"

    def add_readable_disks(self, others: Disks) -> None:
        """Resolves paths on another store's disks, too; nothing is ever placed there."""
        self._readable = others._bases
        self._set_roots(self.roots)

    def set_refresh(self, refresh: Callable[[], None]) -> None:
        """Sets a callback that runs when an unknown disk is requested: another process may have added it."""
        self._refresh = refresh

    def add_disk(self, disk: int, root: Path) -> None:
        """Puts a new disk into service. Idempotent."""
        if disk not in self.roots and disk not in self.lost:
            self._set_roots({**self.roots, disk: root})

    def is_present(self, disk: int) -> bool:
        """Returns True if a disk is in service and was not emptied, unmounted or exchanged."""
        base = self._bases.get(disk) or self._readable.get(disk)
        return base is not None and os.path.exists(f"{base}/{MARKER}") and not self.is_exchanged(disk)

    def is_exchanged(self, disk: int) -> bool:
        """Returns True if another disk was mounted, or another directory put, in the place of a disk that is
        in service. An empty one does not count."""
        before, base = self._places.get(disk), self._bases.get(disk)
        if before is None or base is None or not os.path.exists(f"{base}/{MARKER}"):
            return False
        return _place(base) not in (before, None)

    def retire_disk(self, disk: int) -> None:
        """Takes a disk out of service: nothing is placed there any more, and scans skip it. Idempotent."""
        if disk in self.roots:
            self.lost = {**self.lost, disk: self.roots[disk]}
            self._set_roots({number: root for number, root in self.roots.items() if number != disk})

    def directory(self, disk: int, file: int) -> str:
        """Returns the directory of a data file."""
        return f"{self._base(disk)}/{file % FANOUT:02x}"

    def _base(self, disk: int) -> str:
        if disk not in self._paths:
            self._refresh()
        return self._paths[disk]

    def path(self, disk: int, file: int) -> str:
        """Returns the path of a committed data file."""
        return f"{self._base(disk)}/{file % FANOUT:02x}/{file:012x}.tar"

    def draft_path(self, disk: int, file: int, writer: str) -> str:
        """Returns the path of an unfinished large object file; the next start of its writer removes it."""
        return f"{self._base(disk)}/{DRAFTS}/{file:012x}.{writer}.part"

    def placement_order(self, bucket: str, key: str) -> tuple[int, ...]:
        """Returns the disks for a new object in order of preference. The order is a rendezvous hash, so an
        added disk takes over only its share. Raises DiskFailedError."""
        if not self._numbers:
            raise DiskFailedError(
                "every disk of this node has failed: replace them and restart the node with empty directories"
            )
        if len(self._numbers) == 1:
            return self._numbers
        name = f"{bucket}\0{key}".encode()

        def weight(disk: int) -> bytes:
            return hashlib.blake2b(name, digest_size=8, key=b"%d" % disk).digest()

        return tuple(sorted(self._numbers, key=weight, reverse=True))

    def usage(self) -> tuple[DiskStats, ...]:
        """Returns the space of every disk in service. Raises OSError."""
        found = [(str(root), measure_disk_space(root)) for root in self.roots.values()]
        return tuple(DiskStats(path, space.free_for_cache, space.total) for path, space in found)

    def drafts(self) -> Iterator[os.DirEntry[str]]:
        """Yields all unfinished files, abandoned ones included."""
        for base in self._bases.values():
            with os.scandir(f"{base}/{DRAFTS}") as found:
                yield from found

    def entries(self) -> Iterator[tuple[int, os.DirEntry[str]]]:
        """Yields (disk, entry) of everything in the data directories."""
        for disk, base in self._bases.items():
            for number in range(FANOUT):
                try:
                    with os.scandir(f"{base}/{number:02x}") as found:
                        for entry in found:
                            yield disk, entry
                except FileNotFoundError:
                    continue

    def with_index(self, index_dir: Path) -> list[str]:
        """Returns the directories that a store writes to."""
        return [str(root) for root in (index_dir, *self.roots.values())]

    def files(self) -> Iterator[tuple[int, int, str]]:
        """Yields (disk, file, path) of every committed data file."""
        for disk, entry in self.entries():
            stem, dot, rest = entry.name.partition(".")
            if rest == "tar" and dot and len(stem) == 12:
                yield disk, int(stem, 16), entry.path


_KEEP_FREE: Final = 320 << 20
"""Bytes that puts leave free: for deletes, for index growth, and for a segment that compaction rewrites when
the disk is full, as otherwise no deletion of small objects would free anything."""
_KEEP_SHARE: Final = 20


def free_above_reserve(path: str, reserves: int = 1) -> int:
    """Returns the bytes that this file system can take above the store's reserve, or above 1/`reserves` of
    it; negative if the reserve is in use, `sys.maxsize` if the space is unknown (blocking).

    Raises OSError.
    """
    space = measure_disk_space(path)
    if not space.is_known:
        return sys.maxsize if has_reserve(path) else -1
    return space.free - min(_KEEP_FREE, space.total // _KEEP_SHARE) // reserves


def reserves_kept(bucket: str) -> int:
    """Returns the part of the reserve that a write to this bucket leaves alone, as `reserves`: 1, all of it;
    4, a quarter of it, for documents of the node's own, in buckets whose names S3 cannot have: less than a
    compaction leaves, so that they are accepted meanwhile."""
    return 4 if bucket.startswith("-") else 1


def has_free_space(path: str, wanted: int, reserves: int = 1) -> bool:
    """Returns True if `wanted` bytes fit on this file system without touching 1/`reserves` of the store's
    reserve."""
    return free_above_reserve(path, reserves) > wanted


def index_free_space(path: str, reserves: int = 1) -> int:
    """Returns the bytes by which the index may grow. Its reserve is half of the data's: the index usually
    shares a file system with a disk, and deletes must still work when that disk takes no more data."""
    return free_above_reserve(path, 2 * reserves)


def index_has_free_space(path: str, reserves: int = 1) -> bool:
    """Returns True if the index may grow."""
    return index_free_space(path, reserves) > 0


def is_on_disk(path: Path, disks: Iterable[Path]) -> bool:
    """Returns True if a directory shares its file system with one of these disks (blocking). Raises
    OSError."""
    device = os.stat(path).st_dev
    return any(os.stat(root).st_dev == device for root in disks)


class FreeSpace:
    """Free space of a store's disks while one commit group is laid out: measured once, then counted down."""

    def __init__(self, disks: Disks) -> None:
        self._disks = disks
        self._free: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<FreeSpace {self._free}>"

    def largest_free(self, reserves: int = 1) -> int:
        """Returns the bytes that fit on the emptiest disk above 1/`reserves` of its reserve (blocking).

        Raises OSError.
        """
        if reserves == 1:
            return max(map(self._free_on, tuple(self._disks.roots)), default=0)
        roots = tuple(self._disks.roots.values())
        return max((free_above_reserve(str(root), reserves) for root in roots), default=0)

    def choose_disk(self, bucket: str, key: str, size: int) -> int:
        """Chooses the disk for `size` bytes of a name; the emptiest disk if none has enough space (blocking).
        Raises OSError, DiskFailedError."""
        order = self._disks.placement_order(bucket, key)
        if len(order) == 1:
            return order[0]
        found = next((disk for disk in order if self._free_on(disk) > size), None)
        disk = max(order, key=self._free_on) if found is None else found
        self._free[disk] -= size
        if disk != order[0]:
            metrics.store_off_home_writes.inc()
        return disk

    def _free_on(self, disk: int) -> int:
        if disk not in self._free:
            root = self._disks.roots.get(disk)
            # No root: the disk went out of service meanwhile.
            self._free[disk] = -1 if root is None else free_above_reserve(str(root))
        return self._free[disk]
