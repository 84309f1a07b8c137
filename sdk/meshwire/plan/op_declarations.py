"""Declarations of user ops: inputs, outputs, arguments and limits, as the module states them.

Law: a declaration is plain JSON, the same for the same source. It comes from an untrusted process, so every
fault in it raises PlanError with its path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from meshwire.strict_json import (
    PlanError,
    checked_choice,
    checked_integer,
    checked_json,
    checked_number,
    checked_object,
    checked_text,
    join_path,
    required_field,
    shown_value,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Kind = Literal["bytes", "image", "array"]
Extent = int | str | None
"""Size of one axis: a number, a name (the same name is the same number), or None if samples differ."""

KINDS: Final = ("bytes", "image", "array")
LAYOUTS: Final = ("", "hwc", "chw")
ARGUMENTS: Final = ("any", "bool", "bytes", "dict", "float", "int", "list", "str")
MAX_SOURCE: Final = 1 << 20
"""Maximum bytes of a module's file."""
MAX_OPS: Final = 64
MAX_AXES: Final = 16
MAX_VALUES: Final = 16
"""Maximum values of one op."""
MAX_EXTENT: Final = 1 << 31
SECONDS: Final = 10.0
MEMORY: Final = 1 << 30
_MODULE = re.compile(r"[a-z][a-z0-9_\-]{0,39}")
_FUNCTION = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,49}")


@dataclass(frozen=True, slots=True)
class ValueType:
    """The type of a function's input or output. For an input, `dtype` "" and `shape` None accept any."""

    kind: Kind
    dtype: str = ""
    shape: tuple[Extent, ...] | None = None
    layout: str = ""

    def __str__(self) -> str:
        sizes = (
            "…" if self.shape is None else "×".join("?" if item is None else str(item) for item in self.shape)
        )
        layout = f" ({self.layout})" if self.layout else ""
        return "bytes" if self.kind == "bytes" else f"{self.kind}{layout} {self.dtype or 'any'}[{sizes}]"

    def document(self) -> dict[str, Any]:
        shape = None if self.shape is None else list(self.shape)
        return {"kind": self.kind, "dtype": self.dtype, "shape": shape, "layout": self.layout}


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of an op. `type`: one of ARGUMENTS; `bytes` is the content of an object, given by its
    address. An argument without a default is required."""

    name: str
    type: str = "any"
    required: bool = True
    default: Any = None

    def document(self) -> dict[str, Any]:
        default = {} if self.required else {"default": self.default}
        return {"name": self.name, "type": self.type, **default}


@dataclass(frozen=True, slots=True)
class OpDeclaration:
    """One op of a module. `seconds`: time limit per sample; `memory`: limit in bytes, in addition to what
    its imports use. `inputs`: for an op over several values, their names and types, in order, and `outputs`
    those of them that it replaces; `input` and `output` are then the first."""

    name: str
    input: ValueType
    output: ValueType
    arguments: tuple[Argument, ...] = ()
    random: bool = False
    seconds: float = SECONDS
    memory: int = MEMORY
    summary: str = ""
    inputs: tuple[tuple[str, ValueType], ...] = ()
    outputs: tuple[tuple[str, ValueType], ...] = ()

    @property
    def input_signature(self) -> str:
        return _describe_values(self.inputs) if self.inputs else str(self.input)

    @property
    def output_signature(self) -> str:
        return _describe_values(self.outputs) if self.outputs else str(self.output)

    def document(self) -> dict[str, Any]:
        values: dict[str, Any] = {"input": self.input.document(), "output": self.output.document()}
        if self.inputs:  # lists, because their order matters
            values = {
                "inputs": [[name, value.document()] for name, value in self.inputs],
                "outputs": [[name, value.document()] for name, value in self.outputs],
            }
        return {
            "name": self.name,
            **values,
            "arguments": [argument.document() for argument in self.arguments],
            "random": self.random,
            "seconds": self.seconds,
            "memory": self.memory,
            "summary": self.summary,
        }


def _describe_values(values: Sequence[tuple[str, ValueType]]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in values)


BYTES: Final = ValueType("bytes", "uint8", (None,))


# --- parsing declarations from an untrusted process -------------------------------------------------------


def parse_declarations(value: Any) -> dict[str, OpDeclaration]:
    """Parse the ops of a module by name. Raises PlanError."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_OPS:
        raise PlanError(
            "ops", f"a module must declare 1…{MAX_OPS} ops; decorate functions with @op(input=…, output=…)"
        )
    read = [parse_declaration(item, f"ops[{number}]") for number, item in enumerate(value)]
    names = [declared.name for declared in read]
    if len(set(names)) != len(names):
        raise PlanError("ops", "two ops have the same name; rename one")
    return {declared.name: declared for declared in read}


def parse_declaration(value: Any, path: str = "") -> OpDeclaration:
    """Parse one declaration. Raises PlanError."""
    values = ("input", "output", "inputs", "outputs")
    known = ("name", *values, "arguments", "random", "seconds", "memory", "summary")
    document = checked_object(checked_json(value, path), path, known)
    name = checked_text(required_field(document, "name", path), join_path(path, "name"), at_most=50)
    if not _FUNCTION.fullmatch(name):
        raise PlanError(
            join_path(path, "name"), f"{shown_value(name)} is not a valid op name; use letters, digits and _"
        )
    arguments = _parsed_arguments(document.get("arguments", []), join_path(path, "arguments"))
    random = document.get("random", False)
    if not isinstance(random, bool):
        raise PlanError(join_path(path, "random"), "expected true or false")
    inputs, outputs = _parsed_values(document, arguments, path)
    several = "inputs" in document
    return OpDeclaration(
        name,
        inputs[0][1],
        outputs[0][1],
        arguments,
        random,
        checked_number(document.get("seconds", SECONDS), join_path(path, "seconds"), 0.001, 3600.0),
        checked_integer(document.get("memory", MEMORY), join_path(path, "memory"), 1 << 20, 1 << 44),
        checked_text(document.get("summary", ""), join_path(path, "summary"), at_most=200),
        inputs if several else (),
        outputs if several else (),
    )


_Named = tuple[tuple[str, ValueType], ...]


def _parsed_values(
    document: Mapping[str, Any], arguments: Sequence[Argument], path: str
) -> tuple[_Named, _Named]:
    """Return inputs and outputs by name: "" for a single one."""
    if "inputs" not in document:
        taken = _value_type(required_field(document, "input", path), join_path(path, "input"))
        made = _value_type(required_field(document, "output", path), join_path(path, "output"))
        _check_output([taken], made, arguments, join_path(path, "output"))
        return (("", taken),), (("", made),)
    inputs = _named_values(document["inputs"], 2, join_path(path, "inputs"))
    outputs = _named_values(required_field(document, "outputs", path), 1, join_path(path, "outputs"))
    names = [name for name, _ in inputs]
    for name, made in outputs:
        where = join_path(join_path(path, "outputs"), name)
        if name not in names:
            raise PlanError(where, f"each output must replace an input: name one of {', '.join(names)}")
        _check_output([value for _, value in inputs], made, arguments, where)
    clash = {argument.name for argument in arguments} & set(names)
    if clash:
        raise PlanError(join_path(path, "inputs"), f"{min(clash)!r} is also an argument; rename one")
    return inputs, outputs


def _named_values(value: Any, least: int, path: str) -> _Named:
    if not isinstance(value, list) or not least <= len(value) <= MAX_VALUES:
        raise PlanError(path, f"expected {least}…{MAX_VALUES} values with their names and types")
    found = []
    for number, item in enumerate(value):
        where = f"{path}[{number}]"
        if not isinstance(item, list) or len(item) != 2:
            raise PlanError(where, f"expected a name and a type, got {shown_value(item)}")
        name = checked_text(item[0], where, at_most=50)
        if not _FUNCTION.fullmatch(name):
            raise PlanError(
                where, f"{shown_value(name)} is not a valid value name; use letters, digits and _"
            )
        found.append((name, _value_type(item[1], where)))
    if len({name for name, _ in found}) != len(found):
        raise PlanError(path, "two values have the same name")
    return tuple(found)


def _value_type(value: Any, path: str) -> ValueType:
    document = checked_object(value, path, ("kind", "dtype", "shape", "layout"))
    kind = cast(
        "Kind", checked_choice(required_field(document, "kind", path), join_path(path, "kind"), KINDS)
    )
    dtype = document.get("dtype", "")
    if dtype:
        names = [f"{kind}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)]
        dtype = checked_choice(
            dtype, join_path(path, "dtype"), ["bool", *names, "float16", "float32", "float64"]
        )
    layout = checked_choice(document.get("layout", ""), join_path(path, "layout"), LAYOUTS)
    shape = _shape(document.get("shape"), join_path(path, "shape"))
    if kind == "bytes":
        return BYTES
    if kind == "image" and (dtype != "uint8" or not layout or shape is None or len(shape) != 3):
        raise PlanError(
            path, "an image must be uint8 with three axes and a layout; write image(height, width)"
        )
    return ValueType(kind, dtype, shape, layout if kind == "image" else "")


def _shape(value: Any, path: str) -> tuple[Extent, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) > MAX_AXES:
        raise PlanError(path, f"expected a list of at most {MAX_AXES} extents, got {shown_value(value)}")
    return tuple(_extent(item, f"{path}[{number}]") for number, item in enumerate(value))


def _extent(value: Any, path: str) -> Extent:
    if value is None:
        return None
    if isinstance(value, str):
        if not _FUNCTION.fullmatch(value):
            raise PlanError(
                path, f"{shown_value(value)} is not a valid extent name; use letters, digits and _"
            )
        return value
    return checked_integer(value, path, 0, MAX_EXTENT)


def _check_output(
    taken: Sequence[ValueType], made: ValueType, arguments: Sequence[Argument], path: str
) -> None:
    """Check that the output type is fully determined by the inputs and arguments."""
    if made.kind == "bytes":
        return
    if not made.dtype or made.shape is None:
        raise PlanError(path, 'an output needs a dtype and a shape; write array("float32", (3, None))')
    named = {item for value in taken for item in value.shape or () if isinstance(item, str)}
    named |= {argument.name for argument in arguments if argument.type == "int"}
    if made.kind == "image" and made.shape[0 if made.layout == "chw" else 2] is None:
        raise PlanError(path, "an image needs a fixed number of channels")
    for item in made.shape:
        if isinstance(item, str) and item not in named:
            raise PlanError(path, f"{item!r} must be an extent of the input or an argument annotated `int`")


def _parsed_arguments(value: Any, path: str) -> tuple[Argument, ...]:
    if not isinstance(value, list) or len(value) > MAX_OPS:
        raise PlanError(path, f"expected a list of at most {MAX_OPS} arguments")
    read = []
    for number, item in enumerate(value):
        where = f"{path}[{number}]"
        document = checked_object(item, where, ("name", "type", "default"))
        name = checked_text(required_field(document, "name", where), join_path(where, "name"), at_most=50)
        if not _FUNCTION.fullmatch(name):
            raise PlanError(join_path(where, "name"), f"{shown_value(name)} is not a valid argument name")
        kind = checked_choice(document.get("type", "any"), join_path(where, "type"), ARGUMENTS)
        if kind == "bytes" and document.get("default") is not None:
            raise PlanError(
                join_path(where, "default"), "an argument of type bytes can only have the default None"
            )
        read.append(Argument(name, kind, "default" not in document, document.get("default")))
    return tuple(read)


# --- arguments and types of one use ------------------------------------------------------------------------

_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "any": (object,),
    "bool": (bool,),
    "bytes": (str,),
    "dict": (dict,),
    "float": (int, float),
    "int": (int,),
    "list": (list,),
    "str": (str,),
}


def checked_argument(argument: Argument, value: Any, path: str) -> Any:
    """Return `value` if it has the argument's type. Raises PlanError."""
    wrong = isinstance(value, bool) and argument.type in ("int", "float")
    if wrong or not isinstance(value, _TYPES[argument.type]):
        raise PlanError(path, f"expected {argument.type}, got {shown_value(value)}")
    return float(value) if isinstance(value, int) and argument.type == "float" else value


def output_shape(
    declared: OpDeclaration, shape: Sequence[int | None], args: Mapping[str, Any]
) -> tuple[int | None, ...]:
    """Return the output's shape for an input of `shape`, with names resolved. Raises ValueError if `shape`
    does not fit the declared input."""
    bound: dict[str, int | None] = {
        argument.name: args[argument.name] for argument in declared.arguments if argument.type == "int"
    }
    taken = declared.input.shape
    if taken is not None:
        _bind(taken, shape, bound)
    return _fill_shape(declared.output, bound)


def output_shapes(
    declared: OpDeclaration, shapes: Sequence[Sequence[int | None]], args: Mapping[str, Any]
) -> tuple[tuple[int | None, ...], ...]:
    """Return the shapes of all outputs of an op over several values. Raises ValueError, naming the value."""
    bound: dict[str, int | None] = {
        argument.name: args[argument.name] for argument in declared.arguments if argument.type == "int"
    }
    for (name, value), shape in zip(declared.inputs, shapes, strict=True):
        if value.shape is not None:
            try:
                _bind(value.shape, shape, bound)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    return tuple(_fill_shape(value, bound) for _, value in declared.outputs)


def _fill_shape(made: ValueType, bound: Mapping[str, int | None]) -> tuple[int | None, ...]:
    return tuple(bound[item] if isinstance(item, str) else item for item in made.shape or ())


def _bind(taken: Sequence[Extent], shape: Sequence[int | None], bound: dict[str, int | None]) -> None:
    if len(taken) != len(shape):
        raise ValueError(f"expected {len(taken)} axes, got {len(shape)}")
    for axis, (item, extent) in enumerate(zip(taken, shape, strict=True)):
        if isinstance(item, int) and item != extent:
            raise ValueError(
                f"axis {axis} must have size {item}, not {'a varying size' if extent is None else extent}"
            )
        if isinstance(item, str) and bound.setdefault(item, extent) != extent:
            raise ValueError(f"axis {axis} is {item!r} and must have size {bound[item]}, not {extent}")


# --- names --------------------------------------------------------------------------------------------------

VERSION_PREFIX: Final = "sha256:"


def checked_module(name: str) -> str:
    """Return `name` if it is a valid module name. Raises PlanError."""
    if not _MODULE.fullmatch(name):
        raise PlanError(
            "name", f"{shown_value(name)} is not a valid module name; use lower-case letters, digits, _ and -"
        )
    return name


def is_user_op(name: str) -> bool:
    """Whether an op name refers to a function of a user module, such as `augment/brighten`."""
    return "/" in name


def split_name(name: str) -> tuple[str, str]:
    """Split `augment/brighten` into (module, function)."""
    module, _, function = name.partition("/")
    return module, function
