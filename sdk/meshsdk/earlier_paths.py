"""Module paths of earlier releases, which go on for one release with a DeprecationWarning.

Law: one table says where a module has gone. An earlier module is made when it is imported, loads the present
one when a name is taken from it, and warns with the path to use instead.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MOVED: Final[Mapping[str, str]] = {
    "adapters.iterables": "loader.torch_iterable",
    "arenas": "client.arena",
    "batches": "datasets.batch",
    "buckets": "admin.cluster_admin",
    "clusters": "admin.cluster_admin",
    "connecting": "client.s3_client",
    "frames": "datasets.batch",
    "gathers": "client.gather",
    "guessing": "datasets.fields",
    "jobs": "admin.jobs",
    "keeping": "admin.documents",
    "keyfiles": "client.settings",
    "library": "admin.op_catalog",
    "loaders": "loader.loader",
    "mixing": "datasets.split_mix",
    "modules": "admin.op_catalog",
    "native": "client.native_api",
    "normalizing": "loader.output_stage",
    "observing": "meters",
    "opening": "open_dataset",
    "orders": "datasets.shuffle",
    "preflights": "datasets.preflight",
    "retrying": "client.retry",
    "rows": "datasets.batch",
    "scraping": "admin.cluster_admin",
    "selecting": "datasets.fields",
    "settings": "client.settings",
    "sizes": "byte_sizes",
    "splitting": "datasets.split_mix",
    "stalls": "meters",
    "tops": "top",
    "tops.gpus": "top.gpus",
    "tops.hosts": "top.hosts",
    "tops.nodes": "top.nodes",
    "tops.pages": "top.shared_page",
    "tops.watching": "top.snapshot_diff",
    "traces.ranges": "traces.nvtx",
    "transport": "client.transport",
    "unpacking": "datasets.unpack_warning",
    "views": "admin.views",
}
"""Modules by their earlier path, below `meshsdk`."""

RENAMED: Final[Mapping[str, Mapping[str, str]]] = {
    "adapters.iterables": {"Passes": "EpochCounter"},
    "keeping": {
        "KeptDocument": "StoredDocument",
        "list_kept": "list_documents",
        "remove_kept": "remove_document",
        "show_kept": "show_document",
    },
    "keyfiles": {"RenewedKeys": "RenewableKeys", "VARIABLE": "CREDENTIALS_VARIABLE"},
    "mixing": {"Mixing": "MixSpec"},
    "scraping": {"parse": "parse_metrics"},
    "selecting": {"missed": "missing_field_hint"},
    "sizes": {"human": "format_size", "size_of": "parse_size"},
    "stalls": {"divided": "attribute_stall"},
    "tops.gpus": {"look": "read_gpus"},
    "tops.hosts": {"HostLook": "HostSnapshot", "look": "read_host"},
    "tops.nodes": {"NodeLook": "NodeSnapshot", "Reported": "ReportedJob", "reported": "loader_reports"},
    "tops.pages": {"Page": "StatsPage", "pages": "read_pages"},
    "tops.watching": {"Look": "Snapshot", "between": "diff_snapshots", "look": "take_snapshot"},
    "traces.ranges": {"Ranges": "NvtxRanges"},
    "transport": {"Asking": "RequestAttempts", "Line": "EndpointClient"},
    "unpacking": {"unpacks": "is_unpacking"},
}
"""Names in them that have changed, too."""

SPLIT: Final[Mapping[str, Mapping[str, str]]] = {
    "client": dict.fromkeys(("Client", "ObjectInfo"), "client.s3_client"),
    "datasets": dict.fromkeys(("Dataset",), "datasets.dataset"),
}
"""Modules that have become packages of the same name: where their names are."""

_PACKAGE: Final = "meshsdk"


def install_earlier_paths() -> None:
    """Lets `import meshsdk.loaders` and the like find the present module."""
    if not any(isinstance(finder, _EarlierPaths) for finder in sys.meta_path):
        sys.meta_path.append(_EarlierPaths())


def earlier_names(package: str) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package that was a module: names are taken from where they are now."""
    homes = SPLIT[package.removeprefix(f"{_PACKAGE}.")]

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        return _moved(package, name, homes[name], name, depth=3)

    return get


def _moved(earlier: str, name: str, home: str, present: str, depth: int) -> Any:
    module = import_module(f"{_PACKAGE}.{home}")
    try:
        value = getattr(module, present)
    except AttributeError:
        raise AttributeError(f"module {earlier!r} has no attribute {name!r}", name=name) from None
    warnings.warn(
        f"{earlier}.{name} is deprecated: use {_PACKAGE}.{home}.{present}; the next release removes "
        f"{earlier}.{name}",
        DeprecationWarning,
        stacklevel=depth,
    )
    return value


class _EarlierModule(ModuleType):
    """A module at an earlier path."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name)
        path = self.__name__.removeprefix(f"{_PACKAGE}.")
        return _moved(self.__name__, name, MOVED[path], RENAMED.get(path, {}).get(name, name), depth=3)

    def __dir__(self) -> list[str]:
        path = self.__name__.removeprefix(f"{_PACKAGE}.")
        changed = {new: old for old, new in RENAMED.get(path, {}).items()}
        return sorted(changed.get(name, name) for name in dir(import_module(f"{_PACKAGE}.{MOVED[path]}")))


class _EarlierPaths(MetaPathFinder, Loader):
    """The last finder: asked only for modules that no other one has."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        package, _, name = fullname.partition(".")
        if package != _PACKAGE or name not in MOVED:
            return None
        return ModuleSpec(fullname, self, is_package=any(each.startswith(f"{name}.") for each in MOVED))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EarlierModule(
            spec.name, f"Earlier path of `{_PACKAGE}.{MOVED[spec.name.partition('.')[2]]}`."
        )

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: names are looked up when they are used."""
