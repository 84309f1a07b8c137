"""User modules: documents of source and declarations, named by their hash, and their ops as definitions.

Law: a version names one document for ever, and bytes with another hash are never run. Each process
caches the modules it has loaded; the loader is set once, at startup.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from meshd.transform.assets import MissingAssetError, asset, no_assets
from meshd.transform.errors import UnknownBuildError, UnknownOpError
from meshd.transform.op_types import FieldType, OpDefinition
from meshd.transform.parameters import Parameter, with_description
from meshwire.plan.module_bundle import read_objects
from meshwire.plan.op_declarations import (
    BYTES,
    VERSION_PREFIX,
    checked_argument,
    output_shape,
    output_shapes,
    parse_declarations,
    split_name,
)
from meshwire.strict_json import canonical_json, checked_object, join_path, shown_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshd.transform.assets import AssetLoader
    from meshwire.plan.keyed_random import KeyedRandom
    from meshwire.plan.module_bundle import SharedObject
    from meshwire.plan.op_declarations import Argument, OpDeclaration, ValueType

FORMAT: Final = 1
_KEPT: Final = 256


class UserModule(msgspec.Struct, frozen=True):
    """A pushed module. `version` is `sha256:` plus the hash of the document.

    `name` is the name of the file and appears only in messages.
    """

    version: str
    name: str
    source: bytes
    ops: Mapping[str, OpDeclaration]
    wheels: Mapping[str, bytes] = msgspec.field(default_factory=dict)
    objects: tuple[SharedObject, ...] = ()

    @property
    def memory(self) -> int:
        """The largest memory that one of its ops declares."""
        return max(declared.memory for declared in self.ops.values())

    @property
    def digest(self) -> str:
        return self.version.removeprefix(VERSION_PREFIX)


def encode_module(
    source: str,
    ops: Mapping[str, OpDeclaration],
    wheels: Mapping[str, bytes] | None = None,
    objects: Sequence[SharedObject] = (),
) -> bytes:
    """Return the document of a module, which is stored and hashed."""
    listed = [ops[name].document() for name in sorted(ops)]
    found: dict[str, Any] = {"format": FORMAT, "ops": listed, "source": source}
    if wheels:
        found["wheels"] = {name: base64.b64encode(data).decode() for name, data in sorted(wheels.items())}
    if objects:
        found["objects"] = [list(each) for each in objects]
    return json.dumps(found, sort_keys=True).encode() if wheels else canonical_json(found)


def parse_module(name: str, data: bytes) -> UserModule:
    """Parse the document of a module, as a node wrote it."""
    value = checked_object(json.loads(data), "", ("format", "ops", "source", "wheels", "objects"))
    version = VERSION_PREFIX + hashlib.sha256(data).hexdigest()
    wheels = {wheel: base64.b64decode(text) for wheel, text in value.get("wheels", {}).items()}
    ops, objects = parse_declarations(value["ops"]), read_objects(value.get("objects", []))
    return UserModule(version, name, str(value["source"]).encode(), ops, wheels, objects)


class UserOpRunner(Protocol):
    """Runs the ops of modules in sandbox processes: `SandboxProcessPool`, in a transform process."""

    def run_op(
        self, module: UserModule, declared: OpDeclaration, args: Mapping[str, Any], key: int, value: Any
    ) -> Any:
        """Return an op's result for a value. Raises BadSampleError, WrongOutputError."""
        ...


class UserOperation(msgspec.Struct, frozen=True):
    """An op of a module with its arguments, as chains run it."""

    module: UserModule
    declared: OpDeclaration
    args: Mapping[str, Any]
    processes: UserOpRunner | None

    def infer(self, field: FieldType) -> FieldType:
        taken, made = self.declared.input, self.declared.output
        if not _fits(taken, field):
            raise ValueError(f"needs {taken}, not {field}")
        try:
            shape = output_shape(self.declared, field.shape, self.args)
        except ValueError as error:
            raise ValueError(f"needs {taken}, not {field}: {error}") from None
        return _field_type(made, shape)

    def apply(self, value: Any, random: KeyedRandom) -> Any:
        if self.processes is None:
            raise RuntimeError("this process runs no user ops")
        key = random.bits() if self.declared.random else 0
        return self.processes.run_op(self.module, self.declared, self.args, key, value)

    def infer_all(self, fields: Sequence[FieldType]) -> tuple[FieldType, ...]:
        """See `MultiFieldOp.infer_all`."""
        inputs = self.declared.inputs
        if len(inputs) != len(fields):
            raise ValueError(f"takes {len(inputs)} fields ({', '.join(dict(inputs))}), not {len(fields)}")
        for (name, taken), field in zip(inputs, fields, strict=True):
            if not _fits(taken, field):
                raise ValueError(f"needs {taken} as {name}, not {field}")
        shapes = output_shapes(self.declared, [field.shape for field in fields], self.args)
        made = {
            name: _field_type(value, shape)
            for (name, value), shape in zip(self.declared.outputs, shapes, strict=True)
        }
        return tuple(made.get(name, field) for (name, _), field in zip(inputs, fields, strict=True))

    def apply_all(self, values: Sequence[Any], random: KeyedRandom) -> tuple[Any, ...]:
        """See `MultiFieldOp.apply_all`."""
        if self.processes is None:
            raise RuntimeError("this process runs no user ops")
        key = random.bits() if self.declared.random else 0
        made = self.processes.run_op(self.module, self.declared, self.args, key, tuple(values))
        new = dict(zip(dict(self.declared.outputs), made, strict=True))
        return tuple(
            new.get(name, value) for (name, _), value in zip(self.declared.inputs, values, strict=True)
        )


def _fits(taken: ValueType, field: FieldType) -> bool:
    kind = field.kind == taken.kind or (taken.kind == "array" and field.kind in ("image", "label"))
    return kind and taken.dtype in ("", field.dtype) and taken.layout in ("", field.layout)


def _field_type(made: ValueType, shape: tuple[int | None, ...]) -> FieldType:
    if made == BYTES:
        return FieldType("bytes", "uint8", (None,))
    layout: Any = made.layout
    return FieldType(made.kind, made.dtype, shape, layout)


class UserModuleCache:
    """The modules that one process knows. Not thread-safe, except for lookups of known modules."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, UserModule] = OrderedDict()
        self._load: AssetLoader = no_assets
        self.processes: UserOpRunner | None = None

    def __repr__(self) -> str:
        return f"<UserModuleCache {len(self._known)}>"

    def set_loader(self, load: AssetLoader) -> None:
        """Set the loader for documents that callers do not pass."""
        self._load = load

    def find_op(self, name: str, version: str, path: str, load: AssetLoader | None = None) -> OpDefinition:
        """Return the definition of `module/function`.

        Raises UnknownOpError, UnknownBuildError, SourceGoneError.
        """
        module_name, function = split_name(name)
        module = self._module(name, module_name, version, path, load or self._load)
        declared = module.ops.get(function)
        if declared is None:
            have = ", ".join(f"{module_name}/{other}" for other in sorted(module.ops))
            raise UnknownOpError(
                join_path(path, "op"), f"the module has no op {shown_value(name)}; it has {have}"
            )
        return op_definition(module, name, declared, self.processes)

    def _module(self, name: str, module_name: str, version: str, path: str, load: AssetLoader) -> UserModule:
        known = self._known.get(version)
        if known is None:
            if not version.startswith(VERSION_PREFIX):
                raise UnknownBuildError(
                    join_path(path, "version"),
                    f"{shown_value(version)} is not a version of {name!r}; expected sha256:HEX",
                )
            try:
                data = load(version.removeprefix(VERSION_PREFIX)).data
            except MissingAssetError as error:
                raise missing_build_error(name, version, path) from error
            known = self._known[version] = _parse(name, module_name, data, path)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return known

    def forget(self, version: str) -> None:
        """Drop a module that was removed."""
        self._known.pop(version, None)


def _parse(name: str, module_name: str, data: bytes, path: str) -> UserModule:
    try:
        return parse_module(module_name, data)
    except (ValueError, KeyError, TypeError) as error:
        raise UnknownBuildError(
            join_path(path, "version"), f"the document is not a build of {name!r}: {error}"
        ) from error


MODULES = UserModuleCache()
"""The modules of this process."""


def missing_build_error(name: str, version: str, path: str) -> UnknownBuildError:
    """Return the error for a build that was removed, or never pushed."""
    return UnknownBuildError(
        join_path(path, "version"),
        f"this node has no build {version[:19]}… of {name!r}: it was removed, or pushed elsewhere; push "
        "the same file again (mesh op push), or create the plan again with the latest build",
    )


def op_definition(
    module: UserModule, name: str, declared: OpDeclaration, processes: UserOpRunner | None = None
) -> OpDefinition:
    """Return an op of a module as a definition of the registry."""

    def build(**args: Any) -> UserOperation:
        return UserOperation(module, declared, args, processes)

    return OpDefinition(
        name,
        module.version,
        tuple(map(_parameter, declared.arguments)),
        build,
        declared.random,
        declared.summary,
        takes=declared.input_signature,
        gives=declared.output_signature,
        subject=module.name,
        inputs=tuple(dict(declared.inputs)),
    )


def _parameter(argument: Argument) -> Parameter:
    parse = (
        asset
        if argument.type == "bytes"
        else with_description(partial(checked_argument, argument), argument.type)
    )
    if argument.required:
        return Parameter(argument.name, parse)
    return Parameter(argument.name, parse, argument.default)
