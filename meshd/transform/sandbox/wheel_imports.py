"""Imports from wheels in memory, inside a sandbox process.

Law: nothing is written and no file is opened except memory files for shared objects, so wheels are imported
after the last right is dropped, as the module itself is. A wheel is content of its user: it is parsed here,
and never by the daemon.
"""

from __future__ import annotations

import importlib.metadata
import io
import linecache
import zipfile
from importlib.machinery import ModuleSpec
from importlib.resources import abc as resources
from importlib.util import spec_from_loader
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from meshd.transform.sandbox.native_wheels import NativeWheel, native_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import ModuleType

_RESOURCES = ("pkgutil", "importlib.resources.readers", "importlib.resources._adapters")
WARMED = ("zlib", "email.parser", "email.message", "importlib.metadata._adapters", *_RESOURCES)
"""Parts of the standard library that are loaded on first use, when no file can be opened any more."""


class WheelFinder:
    """Finds modules in wheels."""

    def __init__(
        self,
        wheels: Sequence[tuple[str, bytes]],
        objects: Mapping[tuple[str, str], int] = MappingProxyType({}),
    ) -> None:
        """`objects`: memory files for the shared objects in the wheels. Raises ImportError if the bytes are
        not a wheel."""
        self._wheels: dict[str, zipfile.ZipFile] = {}
        self._files: dict[str, tuple[str, str]] = {}
        for name, data in wheels:
            try:
                self._wheels[name] = zipfile.ZipFile(io.BytesIO(data))
            except zipfile.BadZipFile as error:
                raise ImportError(f"{name} is not a wheel: {error}") from error
            for file in self._wheels[name].namelist():
                self._files.setdefault(_inside(file), (name, file))
        self._native = {
            name: NativeWheel(name, archive, {file: fd for (of, file), fd in objects.items() if of == name})
            for name, archive in self._wheels.items()
        }

    def __repr__(self) -> str:
        return f"<WheelFinder of {', '.join(self._wheels)}>"

    def packages(self) -> set[str]:
        """Return the names that the wheels provide."""
        roots = {file.partition("/")[0] for file in self._files}
        return {
            root.partition(".")[0] for root in roots if not root.endswith((".dist-info", ".data", ".libs"))
        }

    def sources(self) -> Iterator[str]:
        """Yield the text of each module."""
        for file, (name, stored) in self._files.items():
            if file.endswith(".py"):
                yield self._wheels[name].read(stored).decode(errors="replace")

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        base = fullname.replace(".", "/")
        native = [(file, False) for file in native_names(base)]
        for file, package in ((f"{base}/__init__.py", True), *native, (f"{base}.py", False)):
            if file in self._files:
                name, stored = self._files[file]
                if not file.endswith(".py"):
                    return self._native[name].find_spec(fullname, stored)
                loader = _Loader(self._wheels[name], stored, f"{name}/{file}")
                spec = spec_from_loader(fullname, loader, origin=f"{name}/{file}", is_package=package)  # type: ignore[arg-type]
                if package and spec is not None:
                    spec.submodule_search_locations = [f"{name}/{base}"]
                return spec
        if any(file.startswith(f"{base}/") for file in self._files):
            spec = ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [base]
            return spec
        return None

    def find_distributions(self, context: Any) -> Iterator[importlib.metadata.Distribution]:
        """Yield the metadata of the wheels, for `importlib.metadata.version`."""
        for archive in self._wheels.values():
            for place in zipfile.Path(archive).iterdir():
                if place.name.endswith(".dist-info"):
                    found = importlib.metadata.PathDistribution(place)
                    if context.name is None or _plain(found.metadata["Name"]) == _plain(context.name):
                        yield found


def _inside(file: str) -> str:
    """Return the name under which a file is installed: `x.data/purelib/x.py` is `x.py`."""
    head, _, rest = file.partition("/")
    kind, _, below = rest.partition("/")
    return below if head.endswith(".data") and kind in ("purelib", "platlib") else file


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


class _Loader:
    """Loads one module of a wheel."""

    def __init__(self, archive: zipfile.ZipFile, stored: str, origin: str) -> None:
        self._archive, self._stored, self._origin = archive, stored, origin

    def create_module(self, spec: ModuleSpec) -> None:
        """As Python does."""

    def exec_module(self, module: ModuleType) -> None:
        text = self._archive.read(self._stored).decode()
        linecache.cache[self._origin] = (len(text), None, text.splitlines(keepends=True), self._origin)
        module.__file__ = self._origin
        exec(compile(text, self._origin, "exec"), module.__dict__)

    def get_data(self, path: str) -> bytes:
        """Return a file beside the modules, for `pkgutil.get_data`."""
        try:
            return self._archive.read(path.partition("/")[2])
        except KeyError:
            raise FileNotFoundError(path) from None

    def get_resource_reader(self, fullname: str) -> resources.ResourceReader:
        return _Files(zipfile.Path(self._archive, f"{self._stored.rpartition('/')[0]}/"))


class _Files(resources.TraversableResources):
    def __init__(self, folder: zipfile.Path) -> None:
        self._folder = folder

    def files(self) -> Any:
        return self._folder
