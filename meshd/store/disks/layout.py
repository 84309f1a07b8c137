"""Disk layout: disk markers, data file paths, and the choice of the disk for new data by free space.

Law: the path of a data file follows from (disk, file) alone. A marker identifies a disk, not its
position among the `--disk` options, so disks may be moved and reordered. Records store the disk
explicitly, so a read never derives it from the key. Deletes and upload aborts may use the reserve that
other writes leave.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.store.errors import DiskFailedError, FormatError
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path


FORMAT = 1
EXTENTS = "extents"
MARKER = "DISK"
DRAFTS = "drafts"
LOST_DISKS_KEY = "disks_lost"
MOUNTED_DISKS_KEY = "disks_mounted"
"""Facts of the index: numbers of disks that are out of service, and of those that are file systems."""
FANOUT = 64


class DiskMarker(msgspec.Struct, frozen=True):
    """Contents of `<disk>/extents/DISK`; `disks`: how many the store has, so that one cannot be forgotten;
    `lost`: those that failed and are out of service."""

    format: int
    store: str
    disk: int
    disks: int = 1
    lost: tuple[int, ...] = ()


def read_marker(root: Path) -> DiskMarker | None:
    """The marker of a disk, None when it has none. Raises FormatError for one of a newer version."""
    try:
        marker = msgspec.json.decode((root / EXTENTS / MARKER).read_bytes(), type=DiskMarker)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FormatError(
            f"{root / EXTENTS / MARKER} is unreadable ({error}); restore it or remove the disk"
        ) from error
    if marker.format > FORMAT:
        raise FormatError(
            f"{root} was written by a newer meshd (format {marker.format}, not {FORMAT}); upgrade meshd"
        )
    return marker


def write_marker(root: Path, marker: DiskMarker) -> None:
    """Makes the directories of a disk and marks it, durably."""
    base = root / EXTENTS
    for number in range(FANOUT):
        (base / f"{number:02x}").mkdir(parents=True, exist_ok=True)
    temporary = base / f"{MARKER}.new"
    with temporary.open("wb") as file:
        file.write(msgspec.json.encode(marker))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(base / MARKER)
    sync_directory(base)


def write_lost_disks(disks: Disks) -> None:
    """Has the markers say which disks are out of service (blocking)."""
    for root in disks.roots.values():
        marker = read_marker(root)
        if marker is not None:
            write_marker(root, msgspec.structs.replace(marker, lost=tuple(sorted(disks.lost))))


def sync_directory(path: Path | str) -> None:
    """Makes names created in or removed from this directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_mounted(root: Path) -> bool:
    """Whether a directory is a file system of its own. Raises OSError."""
    return os.stat(root).st_dev != os.stat(root.parent).st_dev


class Disks:
    """The disks of one store: number → root, of those in service; `lost` are those that failed or are gone.
    Drafts lie in a directory of their own, so that a worker's start does not look at every data file.
    """

    def __init__(self, roots: Mapping[int, Path], lost: Mapping[int, Path] | None = None) -> None:
        self.lost: Mapping[int, Path] = dict(lost or {})
        self._readable: Mapping[int, str] = {}
        self._refresh: Callable[[], None] = lambda: None
        self._serve(dict(sorted(roots.items())))

    def _serve(self, roots: Mapping[int, Path]) -> None:
        self.roots: Mapping[int, Path] = roots
        self._bases = {number: str(root / EXTENTS) for number, root in roots.items()}
        lost = {number: str(root / EXTENTS) for number, root in self.lost.items()}
        self._paths = {**self._readable, **lost, **self._bases}
        self._numbers = tuple(roots)

    def __repr__(self) -> str:
        return f"<Disks {self.roots}>"

    def add_readable_disks(self, others: Disks) -> None:
        """From here on paths on another store's disks are known, too; nothing is placed there."""
        self._readable = others._bases
        self._serve(self.roots)

    def set_refresh(self, learn: Callable[[], None]) -> None:
        """`learn` is called when a disk is asked for that is not known here: another process put it in."""
        self._refresh = learn

    def add_disk(self, disk: int, root: Path) -> None:
        """From here on a new disk is in service. Idempotent."""
        if disk not in self.roots and disk not in self.lost:
            self._serve({**self.roots, disk: root})

    def is_present(self, disk: int) -> bool:
        """Whether a disk is in service, and has not been emptied or taken away."""
        base = self._bases.get(disk) or self._readable.get(disk)
        return base is not None and os.path.exists(f"{base}/{MARKER}")

    def retire_disk(self, disk: int) -> None:
        """From here on nothing is placed on a disk, nor looked for by walking it. Idempotent."""
        if disk in self.roots:
            self.lost = {**self.lost, disk: self.roots[disk]}
            self._serve({number: root for number, root in self.roots.items() if number != disk})

    def directory(self, disk: int, file: int) -> str:
        """Directory of a data file."""
        return f"{self._base(disk)}/{file % FANOUT:02x}"

    def _base(self, disk: int) -> str:
        if disk not in self._paths:
            self._refresh()
        return self._paths[disk]

    def path(self, disk: int, file: int) -> str:
        """Path of a committed data file."""
        return f"{self._base(disk)}/{file % FANOUT:02x}/{file:012x}.tar"

    def draft_path(self, disk: int, file: int, writer: str) -> str:
        """Path of a file of its own while it is written: swept when its writer starts again."""
        return f"{self._base(disk)}/{DRAFTS}/{file:012x}.{writer}.part"

    def placement_order(self, bucket: str, key: str) -> tuple[int, ...]:
        """Disks for a new object, its own first: rendezvous hashing, so that another disk moves only its
        share. Raises DiskFailedError."""
        if not self._numbers:
            raise DiskFailedError(
                "every disk of this node has failed: replace them, and start it again on empty directories"
            )
        if len(self._numbers) == 1:
            return self._numbers
        name = f"{bucket}\0{key}".encode()

        def weight(disk: int) -> bytes:
            return hashlib.blake2b(name, digest_size=8, key=b"%d" % disk).digest()

        return tuple(sorted(self._numbers, key=weight, reverse=True))

    def drafts(self) -> Iterator[os.DirEntry[str]]:
        """All files that are still being written, or were left behind."""
        for base in self._bases.values():
            with os.scandir(f"{base}/{DRAFTS}") as found:
                yield from found

    def entries(self) -> Iterator[tuple[int, os.DirEntry[str]]]:
        """(disk, entry) of everything in the data directories."""
        for disk, base in self._bases.items():
            for number in range(FANOUT):
                try:
                    with os.scandir(f"{base}/{number:02x}") as found:
                        for entry in found:
                            yield disk, entry
                except FileNotFoundError:
                    continue

    def files(self) -> Iterator[tuple[int, int, str]]:
        """(disk, file, path) of every committed data file on disk."""
        for disk, entry in self.entries():
            stem, dot, rest = entry.name.partition(".")
            if rest == "tar" and dot and len(stem) == 12:
                yield disk, int(stem, 16), entry.path


_KEEP_FREE: Final = 64 << 20  # bytes that puts leave for deletes, and for the index to grow
_KEEP_SHARE: Final = 20


def free_above_reserve(path: str, reserves: int = 1) -> int:
    """Bytes that this file system takes before the store's reserve is touched, or the `reserves`-th part of
    it; negative when it is (blocking). Raises OSError."""
    stats = os.statvfs(path)
    total, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    return free - min(_KEEP_FREE, total // _KEEP_SHARE) // reserves


def has_free_space(path: str, wanted: int) -> bool:
    """True when `wanted` bytes fit on this file system and the store's reserve stays free."""
    return free_above_reserve(path) > wanted


def index_has_free_space(path: str) -> bool:
    """The same for entries of the index: it shares a file system with a disk as a rule, and may go on when
    that disk takes no data any more."""
    return free_above_reserve(path, reserves=2) > 0


class FreeSpace:
    """The room of a store's disks while one group of writes is laid out: measured once, then counted."""

    def __init__(self, disks: Disks) -> None:
        self._disks = disks
        self._spare: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<Rooms {self._spare}>"

    @property
    def largest_free(self) -> int:
        """Bytes that the emptiest disk takes (blocking). Raises OSError."""
        return max(map(self._of, tuple(self._disks.roots)), default=0)

    def choose_disk(self, bucket: str, key: str, size: int) -> int:
        """The disk for `size` bytes of a name; the emptiest where none has room (blocking). Raises OSError,
        DiskFailedError."""
        order = self._disks.placement_order(bucket, key)
        if len(order) == 1:
            return order[0]
        found = next((disk for disk in order if self._of(disk) > size), None)
        disk = max(order, key=self._of) if found is None else found
        self._spare[disk] -= size
        if disk != order[0]:
            metrics.store_displaced.inc()
        return disk

    def _of(self, disk: int) -> int:
        if disk not in self._spare:
            root = self._disks.roots.get(disk)
            self._spare[disk] = (
                -1 if root is None else free_above_reserve(str(root))
            )  # it went out of service meanwhile
        return self._spare[disk]
