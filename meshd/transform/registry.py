"""The ops a node knows: name, version, parameters and the class that does the work.

Law: an op's output for given bytes, arguments and draws never changes within one version; a change is a new
version, and old plans keep asking for the old one. Seam: a new op is one class with `@operation` in
`builtin/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from meshd.transform.assets import BadAssetError, asset, no_assets
from meshd.transform.errors import UnknownBuildError, UnknownOpError
from meshd.transform.parameters import parse_arguments
from meshwire.documents import PlanError, join, shown, suggestion

if TYPE_CHECKING:
    from meshd.transform.assets import Load
    from meshd.transform.fieldtypes import FieldType
    from meshd.transform.parameters import Parameter
    from meshwire.plans import OpSpec
    from meshwire.randomness import KeyedRandom


Complete = Callable[[Mapping[str, Any], Callable[[], bytes]], dict[str, Any]]
"""(arguments given, reader of the first sample's bytes) → all arguments. Raises BadSampleError."""


class Operation(Protocol):
    """One op with its arguments. Instances are shared by all samples and hold no state."""

    def infer(self, field: FieldType) -> FieldType:
        """The type `apply` makes of a value of type `field`. Raises ValueError when it takes none such."""
        ...

    def apply(self, value: Any, random: KeyedRandom) -> Any:
        """The value for one sample. Raises BadSampleError when the data is at fault."""
        ...


class Mixing(Operation, Protocol):
    """An op over the two rows of a pair (positions p and p ^ 1). Its `apply` is for a row that is
    alone."""

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The fields whose values go with the weight; None: every label of the dataset."""
        ...

    def mix(self, value: Any, other: Any, random: KeyedRandom) -> tuple[Any, float]:
        """(the mixed value, the weight of `value` in it: 0…1). `random` is keyed by the pair: both rows
        draw the same.
        """
        ...


@dataclass(frozen=True, slots=True)
class OpDefinition:
    """An op as the registry holds it. `random`: whether it draws (others get no key of their own);
    `complete`: finds arguments left out in the dataset's first sample. For its users: `takes` and `gives`
    are kinds with shapes and dtypes, `refuses` is what makes a sample bad, `subject` the module's name.
    """

    name: str
    version: str
    parameters: tuple[Parameter, ...]
    build: Callable[..., Operation]
    random: bool
    summary: str
    complete: Complete | None = None
    takes: str = ""
    gives: str = ""
    refuses: str = ""
    subject: str = ""

    @property
    def assets(self) -> tuple[str, ...]:
        """The parameters whose values are assets."""
        return tuple(parameter.name for parameter in self.parameters if parameter.parse is asset)

    @property
    def mixes(self) -> bool:
        """Whether what it builds is a Mixing."""
        return hasattr(self.build, "mix")


OPS: dict[str, dict[str, OpDefinition]] = {}
_Class = TypeVar("_Class", bound=type[Any])


def operation(
    name: str,
    *parameters: Parameter,
    version: str = "1",
    random: bool = False,
    takes: str = "",
    gives: str = "",
    refuses: str = "",
) -> Callable[[_Class], _Class]:
    """Registers a class as an op; it is built with the parsed arguments by name.

    Its docstring's first paragraph, `takes`, `gives` and `refuses` are what docs/ops.md and `mesh op show`
    print.
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
        )
        return cls

    return register


def find(
    name: str, version: str, path: str, ops: Mapping[str, dict[str, OpDefinition]] = OPS
) -> OpDefinition:
    """The op of a name; version "" takes the latest. Raises UnknownOpError, UnknownBuildError."""
    builds = ops.get(name)
    if builds is None:
        raise UnknownOpError(join(path, "op"), f"there is no op {shown(name)}{suggestion(name, ops)}")
    if not version:
        return builds[max(builds, key=_version_order)]
    if version not in builds:
        have = ", ".join(sorted(builds, key=_version_order))
        raise UnknownBuildError(
            join(path, "version"),
            f"this node has {name!r} in version {have}, not {shown(version)}; make the plan anew, or ask a "
            "node of the release that made it",
        )
    return builds[version]


def _version_order(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in version.split("."))


def latest(ops: Mapping[str, dict[str, OpDefinition]] = OPS) -> list[OpDefinition]:
    """Every op in its latest version, by name."""
    return [builds[max(builds, key=_version_order)] for _, builds in sorted(ops.items())]


def versions(name: str, ops: Mapping[str, dict[str, OpDefinition]] = OPS) -> list[str]:
    """The versions of a known op, oldest first."""
    return sorted(ops[name], key=_version_order)


def build(op: OpSpec, path: str, load: Load = no_assets) -> tuple[OpDefinition, Operation]:
    """The op of a spec with its arguments checked. Raises PlanError with the path of the bad field,
    MissingAssetError.
    """
    definition = find(op.op, op.version, path)
    arguments = parse_arguments(definition.parameters, op.args, join(path, "args"))
    for name in definition.assets:
        if arguments[name] is not None:
            arguments[name] = load(arguments[name])
    try:
        return definition, definition.build(**arguments)
    except BadAssetError as error:
        raise PlanError(f"{path}.args.{error.parameter}", error.reason) from error
