"""Op registry: name, version, parameters and implementation of every op.

Law: within one version, an op's output for given bytes, arguments and draws never changes. A change is
a new version, and existing plans keep the old one. Seam: a new op is one class with `@operation` in
`builtin/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from meshd.transform.assets import BadAssetError, no_assets
from meshd.transform.errors import MissingLibraryError, UnknownBuildError, UnknownOpError
from meshd.transform.op_types import Complete, MixingOp, OpDefinition, Operation
from meshd.transform.parameters import parse_arguments
from meshd.transform.sandbox.user_op_definitions import MODULES
from meshwire.plan.op_declarations import is_user_op
from meshwire.strict_json import PlanError, join_path, shown_value, suggestion

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from meshd.transform.assets import AssetLoader
    from meshd.transform.parameters import Parameter
    from meshwire.plan.plan_spec import OpSpec

__all__ = [
    "OPS",
    "Complete",
    "MixingOp",
    "OpDefinition",
    "Operation",
    "build",
    "describe_op",
    "find",
    "latest",
    "list_ops",
    "operation",
    "versions",
]

OPS: dict[str, dict[str, OpDefinition]] = {}
_Class = TypeVar("_Class", bound=type[Any])


def operation(
    name: str,
    *parameters: Parameter,
    version: str = "1",
    random: bool = False,
    moves: bool = False,
    takes: str = "",
    gives: str = "",
    refuses: str = "",
    inputs: tuple[str, ...] = (),
) -> Callable[[_Class], _Class]:
    """Register a class as an op; it is built with the parsed arguments by name.

    docs/ops.md and `mesh op show` print the first paragraph of its docstring, `takes`, `gives` and `refuses`.
    `random`, `moves`, `inputs`: see `OpDefinition`.
    """

    def register(cls: _Class) -> _Class:
        builds = OPS.setdefault(name, {})
        if version in builds:
            raise ValueError(f"the op {name!r} is registered twice in version {version}")
        summary = " ".join((cls.__doc__ or "").strip().split("\n\n")[0].split())
        builds[version] = OpDefinition(
            name,
            version,
            parameters,
            cls,
            random,
            summary,
            getattr(cls, "complete", None),
            takes,
            gives,
            refuses,
            cls.__module__.rpartition(".")[2],
            inputs,
            moves,
        )
        return cls

    return register


def find(
    name: str, version: str, path: str, ops: Mapping[str, dict[str, OpDefinition]] = OPS
) -> OpDefinition:
    """Return the op of a name; version "" means the latest, but a user op needs a version.

    Raises UnknownOpError, UnknownBuildError.
    """
    if is_user_op(name):
        return MODULES.find_op(name, version, path)
    builds = ops.get(name)
    if builds is None:
        raise UnknownOpError(
            join_path(path, "op"), f"there is no op {shown_value(name)}{suggestion(name, ops)}"
        )
    if not version:
        return builds[max(builds, key=_version_order)]
    if version not in builds:
        have = ", ".join(sorted(builds, key=_version_order))
        raise UnknownBuildError(
            join_path(path, "version"),
            f"this node has {name!r} in version {have}, not {shown_value(version)}; create the plan again, "
            "or use a "
            "node of the release that created it",
        )
    return builds[version]


def _version_order(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in version.split("."))


def latest(ops: Mapping[str, dict[str, OpDefinition]] = OPS) -> list[OpDefinition]:
    """Return the latest version of every op, sorted by name."""
    return [builds[max(builds, key=_version_order)] for _, builds in sorted(ops.items())]


def versions(name: str, ops: Mapping[str, dict[str, OpDefinition]] = OPS) -> list[str]:
    """Return the versions of a known op, oldest first."""
    return sorted(ops[name], key=_version_order)


def build(op: OpSpec, path: str, load: AssetLoader = no_assets) -> tuple[OpDefinition, Operation]:
    """Return the op of a spec and build it with checked arguments.

    Raises PlanError with the path of the bad field (UnknownBuildError if this node lacks a library),
    MissingAssetError.
    """
    definition = find(op.op, op.version, path)
    arguments = parse_arguments(definition.parameters, op.args, join_path(path, "args"))
    for name in definition.assets:
        if arguments[name] is not None:
            arguments[name] = load(arguments[name])
    try:
        return definition, definition.build(**arguments)
    except BadAssetError as error:
        raise PlanError(f"{path}.args.{error.parameter}", error.reason) from error
    except MissingLibraryError as error:
        raise UnknownBuildError(join_path(path, "op"), str(error)) from error


def list_ops(more: Sequence[OpDefinition] = ()) -> list[dict[str, Any]]:
    """Return a short description of the latest version of every op, sorted by name, then of `more`."""
    return [
        {
            "op": found.name,
            "version": found.version,
            "summary": found.summary,
            "takes": found.takes,
            "gives": found.gives,
            "arguments": [parameter.name for parameter in found.parameters],
        }
        for found in (*latest(), *more)
    ]


def describe_op(found: OpDefinition) -> dict[str, Any]:
    """Return the full description of an op, as plain JSON values."""
    return {
        "op": found.name,
        "version": found.version,
        "versions": [found.version] if is_user_op(found.name) else versions(found.name),
        "summary": found.summary,
        "takes": found.takes,
        "gives": found.gives,
        "refuses": found.refuses,
        "random": found.random,
        "mixes": found.is_mixing,
        "arguments": [_argument(parameter) for parameter in found.parameters],
        **({"inputs": list(found.inputs)} if found.is_multi_field else {}),
    }


def _argument(parameter: Parameter) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": parameter.name,
        "kind": parameter.kind,
        "required": parameter.required,
    }
    return document if parameter.required else document | {"default": parameter.default}
