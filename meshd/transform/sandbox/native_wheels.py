"""Shared objects of wheels, in memory files of a sandbox process.

Law: the memory files are made before the process gives up its rights, with the sizes that the pushing client
told; they never grow. What is in a wheel is unpacked and loaded afterwards, so the constructors of a shared
object have the rights of the module, and its file names are never paths. A shared object must have the hash
that the RECORD of its wheel says.
"""

from __future__ import annotations

import base64
import csv
import ctypes
import fcntl
import hashlib
import io
import mmap
import os
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import zipfile
    from collections.abc import Iterable, Mapping, Sequence
    from types import ModuleType

_PIECE = 1 << 20


def create_memory_files(objects: Iterable[Sequence[object]]) -> dict[tuple[str, str], int]:
    """Return a memory file of the right size for each [wheel, file, bytes]. Raises OSError."""
    made: dict[tuple[str, str], int] = {}
    for wheel, file, size in objects:
        fd = os.memfd_create("mesh-object", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, int(str(size)))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        made[str(wheel), str(file)] = fd
    return made


class NativeWheel:
    """The shared objects of one wheel. `files`: the memory file of each; they stay open, because the C
    library knows objects by the paths of their descriptors."""

    def __init__(self, name: str, archive: zipfile.ZipFile, files: Mapping[str, int]) -> None:
        self.name = name
        self._archive, self._files = archive, files
        self._filled: set[str] = set()
        self._hashes: dict[str, bytes] | None = None
        self._has_libraries = False

    def __repr__(self) -> str:
        return f"<NativeWheel {self.name}, {len(self._filled)} of {len(self._files)} loaded>"

    def find_spec(self, fullname: str, stored: str) -> ModuleSpec:
        """Return the spec of a module that is the shared object `stored`. Raises ImportError."""
        path = self._path(stored)
        spec = ModuleSpec(fullname, _NativeLoader(self, fullname, path, stored), origin=path)
        spec.has_location = True
        return spec

    def prepare(self, stored: str) -> None:
        """Unpack a shared object, and load the libraries of the wheel on which it may depend. Raises
        ImportError."""
        if not self._has_libraries:
            self._has_libraries = True
            self._load_libraries()
        self._fill(stored)

    def _path(self, stored: str) -> str:
        if stored not in self._files:
            raise ImportError(
                f"{stored} of {self.name} was pushed without its size: push the module again, with the "
                "present release of mesh"
            )
        return f"/proc/self/fd/{self._files[stored]}"

    def _load_libraries(self) -> None:
        """Load the libraries beside the modules. A library is found by the name in it once it is loaded, so
        those that need others are tried again after these."""
        left = [stored for stored in sorted(self._files) if _is_library(stored)]
        for stored in left:
            self._fill(stored)
        while left:
            failed = [stored for stored in left if not _loads(self._path(stored))]
            if len(failed) == len(left):
                return  # the module that needs one of them says which
            left = failed

    def _fill(self, stored: str) -> None:
        """Unpack a shared object into its memory file. Raises ImportError."""
        if stored in self._filled:
            return
        fd = self._files[stored]
        size, digest = os.fstat(fd).st_size, hashlib.sha256()
        room = mmap.mmap(fd, size) if size else None
        with self._archive.open(stored) as file:
            at = 0
            while piece := file.read(_PIECE):
                if at + len(piece) > size or room is None:
                    raise ImportError(
                        f"{stored} of {self.name} has more than the {size} bytes that were told"
                    )
                room[at : at + len(piece)] = piece
                digest.update(piece)
                at += len(piece)
        if room is not None:
            room.close()
        if at != size:
            raise ImportError(f"{stored} of {self.name} has {at} bytes, not the {size} that were told")
        if self._recorded_hashes().get(stored) != digest.digest():
            raise ImportError(f"{stored} of {self.name} does not have the hash in the wheel's RECORD")
        self._filled.add(stored)

    def _recorded_hashes(self) -> dict[str, bytes]:
        """Return the SHA-256 of each file, from the wheel's RECORD. Raises ImportError."""
        if self._hashes is None:
            self._hashes = self._read_record()
        return self._hashes

    def _read_record(self) -> dict[str, bytes]:
        records = [name for name in self._archive.namelist() if name.endswith(".dist-info/RECORD")]
        if len(records) != 1:
            raise ImportError(f"{self.name} has no RECORD")
        try:
            rows = list(csv.reader(io.StringIO(self._archive.read(records[0]).decode())))
            return {
                row[0]: base64.urlsafe_b64decode(row[1].removeprefix("sha256=") + "=")
                for row in rows
                if len(row) == 3 and row[1].startswith("sha256=")
            }
        except (ValueError, csv.Error) as error:
            raise ImportError(f"the RECORD of {self.name} cannot be read: {error}") from error


class _NativeLoader(ExtensionFileLoader):
    """Loads a module that is a shared object."""

    def __init__(self, wheel: NativeWheel, fullname: str, path: str, stored: str) -> None:
        super().__init__(fullname, path)
        self._wheel, self._stored = wheel, stored

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self._wheel.prepare(self._stored)
        return super().create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        module.__file__ = f"{self._wheel.name}/{self._stored}"


def native_names(base: str) -> list[str]:
    """Return the names that the shared object of a module may have, as Python looks for them."""
    return [base + suffix for suffix in EXTENSION_SUFFIXES]


def _is_library(stored: str) -> bool:
    """Return whether a shared object is a library, not a module."""
    folder, _, name = stored.rpartition("/")
    return name.startswith("lib") or any(part.endswith(".libs") for part in folder.split("/"))


def _loads(path: str) -> bool:
    try:
        ctypes.CDLL(path)
    except OSError:  # perhaps it needs another one
        return False
    return True
