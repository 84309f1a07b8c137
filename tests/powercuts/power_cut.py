"""What a power cut leaves of a directory: decided by seed, applied, recorded, and applied again in part.

Before it is applied, every file that may be changed has a link in `limbo`, under its inode number. A recorded
outcome lies beside copies of both directories, so that a part of it can be tried.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    import random

SECTOR: Final = 512
PAGE: Final = 4096
_SHOWN: Final = 12


@dataclass
class FileState:
    """A file since its last sync: its length then, and the pages of then that were written over since. `lost`
    are pages that a failed sync has dropped: the disk has the old ones, whatever is synced later."""

    size: int = 0
    before: dict[int, bytes] = field(default_factory=dict)
    lost: dict[int, bytes] = field(default_factory=dict)


class Change(msgspec.Struct, frozen=True):
    """A change of a directory's entries since its last sync; `old` and `new` are inode numbers, None for no
    entry."""

    name: str
    old: int | None
    new: int | None


class LostNames(msgspec.Struct, frozen=True):
    """The last changes of a directory, in their order, which are forgotten."""

    directory: str
    changes: list[Change]

    def __str__(self) -> str:
        return f"{self.directory}: the last {len(self.changes)} changes, of {self.changes[0].name} first"


class LostBytes(msgspec.Struct, frozen=True):
    """Sectors of a file that are as before, by offset, and its length, or None where that is as it was."""

    inode: int
    name: str
    sectors: list[tuple[int, bytes]]
    length: int | None

    def __str__(self) -> str:
        told = [] if self.length is None else [f"cut to {self.length} bytes"]
        if self.sectors:
            offsets = ", ".join(str(offset) for offset, _ in self.sectors[:_SHOWN])
            more = ", …" if len(self.sectors) > _SHOWN else ""
            told.append(f"{len(self.sectors)} sectors as before, at {offsets}{more}")
        return f"{self.name}: {'; '.join(told)}"


class Flip(msgspec.Struct, frozen=True):
    """A bit that is another one."""

    path: str
    offset: int
    bit: int

    def __str__(self) -> str:
        return f"{self.path}: bit {self.bit} at {self.offset}"


class Outcome(msgspec.Struct, frozen=True):
    """All that a cut takes and changes."""

    names: list[LostNames] = []
    bytes: list[LostBytes] = []
    flips: list[Flip] = []

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.names, *self.bytes, *self.flips))) or "nothing"

    def apply(self, source: str, limbo: str) -> None:
        """Make `source` what the disk has."""
        for each in self.names:
            place = f"{source}{each.directory if each.directory != '/' else ''}"
            if os.path.isdir(place):
                for change in reversed(each.changes):
                    _undo(f"{place}/{change.name}", change, limbo)
        for lost in self.bytes:
            _tear(f"{limbo}/{lost.inode}", lost)
        for flip in self.flips:
            _flip(f"{source}{flip.path}", flip)


def _undo(path: str, change: Change, limbo: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        if change.new is not None:
            shutil.rmtree(path)
        return
    if change.new is not None and os.path.lexists(path):
        os.unlink(path)
    kept = f"{limbo}/{change.old}"
    if change.old is not None and not os.path.lexists(path) and os.path.lexists(kept):
        os.link(kept, path, follow_symlinks=False)


def _tear(path: str, lost: LostBytes) -> None:
    with open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        for offset, old in lost.sectors:
            os.pwrite(file.fileno(), old, offset)
        os.ftruncate(file.fileno(), size if lost.length is None else lost.length)


def _flip(path: str, flip: Flip) -> None:
    """Where the file is still there, and as long."""
    if not os.path.exists(path):
        return
    with open(path, "r+b") as file:
        if byte := os.pread(file.fileno(), 1, flip.offset):
            os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << flip.bit]), flip.offset)


class PowerCut:
    """What is not on the disk of `source`: `files` by inode, and the changes of directories since their last
    sync."""

    def __init__(
        self, source: str, limbo: str, files: dict[int, FileState], directories: dict[str, list[Change]]
    ) -> None:
        self._source, self._limbo, self._files, self._directories = source, limbo, files, directories
        self._names: dict[int, str] = {}

    def decide(self, chance: random.Random, flips: int, data: str) -> Outcome:
        """Choose; and link what is changed in limbo. `flips` bits of files whose names end in `data`."""
        self._link_all()
        names = []
        for directory, changes in sorted(self._directories.items()):
            kept = chance.choice((0, 0, len(changes), chance.randint(0, len(changes))))
            if changes[kept:]:
                names.append(LostNames(directory, changes[kept:]))
        known = sorted((name, inode) for inode, name in self._names.items() if inode in self._files)
        torn = [self._torn(chance, name, inode) for name, inode in known]
        return Outcome(
            names,
            [each for each in torn if each.sectors or each.length is not None],
            list(self._flipped(chance, flips, data)),
        )

    def _link_all(self) -> None:
        """Give all files that have changed, or whose names have, a link in limbo, and a name here."""
        changed = {
            inode for all_ in self._directories.values() for each in all_ for inode in (each.old, each.new)
        }
        for base, _, names in os.walk(self._source):
            for name in names:
                path = f"{base}/{name}"
                inode = os.lstat(path).st_ino
                if inode in self._files or inode in changed:
                    self._names.setdefault(inode, path.removeprefix(self._source))
                    if not os.path.lexists(f"{self._limbo}/{inode}"):
                        os.link(path, f"{self._limbo}/{inode}", follow_symlinks=False)
        for directory, changes in self._directories.items():
            for each in changes:
                for kept in (each.old, each.new):
                    if kept is not None and os.path.isfile(f"{self._limbo}/{kept}"):
                        self._names.setdefault(kept, f"{directory.rstrip('/')}/{each.name}")

    def _torn(self, chance: random.Random, name: str, inode: int) -> LostBytes:
        state, path = self._files[inode], f"{self._limbo}/{inode}"
        size = os.stat(path).st_size
        share = chance.choice((0.0, 1.0, chance.random(), chance.random()))
        sectors: list[tuple[int, bytes]] = []
        for page, old in sorted((state.before | state.lost).items()):
            for at in range(0, PAGE, SECTOR):
                if page in state.lost or chance.random() >= share:
                    offset, piece = page * PAGE + at, old[at : at + SECTOR]
                    if offset < size:
                        piece = piece.ljust(SECTOR, b"\0")
                    if piece:
                        sectors.append((offset, piece))
        length: int | None = None
        if state.size != size:
            lowest, highest = sorted((state.size, size))
            length = chance.choice((state.size, size, chance.randint(lowest, highest)))
        return LostBytes(inode, name, sectors, None if length == size else length)

    def _flipped(self, chance: random.Random, flips: int, data: str) -> list[Flip]:
        """What a disk does by itself, to bytes that were synced long ago."""
        files = [
            f"{base}/{name}".removeprefix(self._source)
            for base, _, names in sorted(os.walk(self._source))
            for name in sorted(names)
            if name.endswith(data) and os.path.getsize(f"{base}/{name}")
        ]
        found = []
        for _ in range(flips if files else 0):
            path = chance.choice(files)
            found.append(
                Flip(path, chance.randrange(os.path.getsize(self._source + path)), chance.randrange(8))
            )
        return found


# --- recorded cuts


class Record:
    """The last cuts of a scene: the one before the life that is judged stays while that life ends in another
    one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.last = folder / "last"
        shutil.rmtree(folder, ignore_errors=True)

    def options(self) -> list[str]:
        """For the file system of the next life."""
        new = self._folder / "new"
        if new.exists():
            shutil.rmtree(self.last, ignore_errors=True)
            new.rename(self.last)
        return ["--record", str(new)]


def record(folder: Path, source: str, limbo: str, outcome: Outcome) -> None:
    """Keep what there was before a cut, and the cut; what was in the folder goes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # In one go, so that files with several names keep them.
    subprocess.run(["cp", "-a", source, limbo, str(folder)], check=True, timeout=120)
    Path(folder / Path(source).name).rename(folder / "source")
    Path(folder / Path(limbo).name).rename(folder / "limbo")
    (folder / "outcome").write_bytes(msgspec.msgpack.encode(outcome))


def recorded(folder: Path) -> Outcome:
    """The cut that is kept there."""
    return msgspec.msgpack.decode((folder / "outcome").read_bytes(), type=Outcome)


def replay(folder: Path, outcome: Outcome, image: Path) -> None:
    """Make `image` the directory that is kept in a folder, after this cut of it."""
    shutil.rmtree(image, ignore_errors=True)
    image.mkdir(parents=True)
    copied = [str(folder / "source"), str(folder / "limbo"), str(image)]
    subprocess.run(["cp", "-a", *copied], check=True, timeout=120)
    outcome.apply(str(image / "source"), str(image / "limbo"))
    shutil.rmtree(image / "limbo")
