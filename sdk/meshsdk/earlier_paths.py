"""Module paths of earlier releases, which work for one release with a DeprecationWarning.

Law: one table says where a module has moved. A module at an earlier path is made when it is imported. It
loads the present module when a name is taken from it, and warns with the path to use instead.
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
    "doctor": "meshtools.doctor",
    "doctor.advice": "meshtools.doctor.advice",
    "doctor.examine": "meshtools.doctor.examine_plan",
    "doctor.script_hook": "meshtools.doctor.script_hook",
    "frames": "datasets.batch",
    "gathers": "client.gather",
    "guessing": "datasets.fields",
    "jobs": "admin.jobs",
    "keeping": "admin.documents",
    "keyfiles": "client.settings",
    "library": "admin.op_catalog",
    "loader.measured_plan": "loader.loader_setup",
    "loader.measurement_runs": "meshtools.doctor.measurement_runs",
    "loader.plain_batches": "adapters.plain",
    "loader.stage_times": "meshtools.doctor.stage_times",
    "loaders": "loader.loader",
    "meters": "loader_stats",
    "mixing": "datasets.split_mix",
    "modules": "admin.op_catalog",
    "native": "client.native_api",
    "normalizing": "loader.output_stage",
    "observing": "loader_stats",
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
    "stalls": "loader_stats",
    "top": "meshtools.top",
    "top.gpus": "meshtools.top.gpus",
    "top.hosts": "meshtools.top.hosts",
    "top.nodes": "meshtools.top.nodes",
    "top.shared_page": "loader.stats_page",
    "top.snapshot_diff": "meshtools.top.snapshot_diff",
    "tops": "meshtools.top",
    "tops.gpus": "meshtools.top.gpus",
    "tops.hosts": "meshtools.top.hosts",
    "tops.nodes": "meshtools.top.nodes",
    "tops.pages": "loader.stats_page",
    "tops.watching": "meshtools.top.snapshot_diff",
    "traces": "meshtools.traces",
    "traces.chrome": "meshtools.traces.chrome",
    "traces.nvtx": "meshtools.traces.nvtx",
    "traces.ranges": "meshtools.traces.nvtx",
    "transport": "client.transport",
    "unpacking": "datasets.batch",
    "views": "admin.views",
}
"""Modules by their earlier path, below `meshsdk`. The present path is below `meshsdk`, or in `meshtools`."""

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
    "tops.pages": {"Page": "StatsPage"},
    "tops.watching": {"Look": "Snapshot", "between": "diff_snapshots", "look": "take_snapshot"},
    "traces.ranges": {"Ranges": "NvtxRanges"},
    "transport": {"Asking": "RequestAttempts", "Line": "EndpointClient"},
    "unpacking": {"unpacks": "is_unpacking"},
}
"""The current name of each renamed public name, by earlier path."""

ELSEWHERE: Final[Mapping[str, Mapping[str, str]]] = {
    "loader.measurement_runs": {"MeasuredPlan": "loader.loader_setup.MeasuredPlan"},
    "mixing": {"mix": "datasets.dataset.mix"},
    "native": {"FrameAddress": "loader.epoch_iterator.FrameAddress"},
    "top.shared_page": {
        "read_page": "meshtools.top.loader_pages.read_page",
        "read_pages": "meshtools.top.loader_pages.read_pages",
    },
    "transport": {
        "Request": "client.request.Request",
        "json_request": "client.request.json_request",
        "parsed": "client.error_responses.parsed",
        "read_error": "client.error_responses.read_error",
    },
    "tops.pages": {
        "pages": "meshtools.top.loader_pages.read_pages",
        "read_page": "meshtools.top.loader_pages.read_page",
    },
}
"""Names in them that are in another module than the rest."""

SPLIT: Final[Mapping[str, Mapping[str, str]]] = {
    "client": {"Client": "client.s3_client", "ObjectInfo": "client.object_info"},
    "client.native_api": {"FrameAddress": "loader.epoch_iterator"},
    "client.transport": {
        "json_request": "client.request",
        "parsed": "client.error_responses",
    },
    "datasets": {"Dataset": "datasets.dataset"},
    "datasets.split_mix": {"mix": "datasets.dataset"},
}
"""Modules that became packages of the same name, or lost public names: the current module of each name."""

_PACKAGE: Final = "meshsdk"
_TOOLS: Final = "meshtools"


def present_path(home: str) -> str:
    """Returns the full path of a module that a table here names."""
    return home if home.partition(".")[0] == _TOOLS else f"{_PACKAGE}.{home}"


def install_earlier_paths() -> None:
    """Let imports of earlier paths, such as `import meshsdk.loaders`, find the current modules."""
    if not any(isinstance(finder, _EarlierPaths) for finder in sys.meta_path):
        sys.meta_path.append(_EarlierPaths())


def earlier_names(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module in `SPLIT`; it finds names in their current modules."""
    homes = SPLIT[module.removeprefix(f"{_PACKAGE}.")]

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
        return _find_moved(module, name, homes[name], name, depth=3)

    return get


def _find_moved(earlier: str, name: str, home: str, present: str, depth: int) -> Any:
    path = present_path(home)
    module = _present_module(earlier, path)
    try:
        value = getattr(module, present)
    except AttributeError:
        raise AttributeError(f"module {earlier!r} has no attribute {name!r}", name=name) from None
    warnings.warn(
        f"{earlier}.{name} is deprecated: use {path}.{present}; the next release removes {earlier}.{name}",
        DeprecationWarning,
        stacklevel=depth,
    )
    return value


def _present_module(earlier: str, path: str) -> ModuleType:
    """Raises ModuleNotFoundError with the command that installs `meshtools`, if it is missing."""
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        if error.name != _TOOLS:
            raise
        raise ModuleNotFoundError(
            f"{earlier} is now {path}, in the package shardmesh-tools: run pip install 'shardmesh[tools]', "
            "or pip install ./tools in a clone of Shardmesh",
            name=_TOOLS,
        ) from None


class _EarlierModule(ModuleType):
    """A module at an earlier path; a lookup finds the name in the current module and warns."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name)
        path = self.__name__.removeprefix(f"{_PACKAGE}.")
        if f"{path}.{name}" in MOVED:  # `from meshsdk.top import gpus`: the warning follows with a name of it
            return import_module(f"{self.__name__}.{name}")
        home, present = MOVED[path], RENAMED.get(path, {}).get(name, name)
        if name in ELSEWHERE.get(path, {}):
            home, _, present = ELSEWHERE[path][name].rpartition(".")
        return _find_moved(self.__name__, name, home, present, depth=3)

    def __dir__(self) -> list[str]:
        path = self.__name__.removeprefix(f"{_PACKAGE}.")
        changed = {new: old for old, new in RENAMED.get(path, {}).items()}
        module = _present_module(self.__name__, present_path(MOVED[path]))
        return sorted({*(changed.get(name, name) for name in dir(module)), *ELSEWHERE.get(path, {})})


class _EarlierPaths(MetaPathFinder, Loader):
    """The last finder: Python asks it only for modules that no other finder has."""

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
            spec.name, f"Earlier path of `{present_path(MOVED[spec.name.partition('.')[2]])}`."
        )

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are looked up when they are used."""
