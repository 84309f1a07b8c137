"""Types shared by all specs: descriptions of kinds, field types, and Kubernetes quantities in bytes.

Law: a constraint belongs to the field it restricts: ranges and patterns in `Meta`, relations between
fields as CEL in `rules` (of a class) or `Meta(extra_json_schema=…)` (of a field).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

_UNITS: Final = {"": 1} | {unit: 1000 ** (n + 1) for n, unit in enumerate("kMGTP")}
_BINARY: Final = {f"{unit}i": 1 << (10 * (n + 1)) for n, unit in enumerate("KMGTP")}


def parse_quantity(text: str) -> int:
    """Return the bytes of a quantity such as `1.5Ti`. Raises ValueError."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)", text)
    unit = (_UNITS | _BINARY).get(found[2]) if found else None
    if found is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write e.g. 512Mi or 1.5Ti")
    return int(float(found[1]) * unit)


GROUP: Final = "shardmesh.io"
VERSION: Final = "v1alpha1"

T = TypeVar("T")


class ResourceError(ValueError):
    """A resource is invalid; the message names the field."""


class Rule(NamedTuple):
    """A CEL rule over `self`; one that uses `oldSelf` is evaluated on updates."""

    rule: str
    message: str


class Column(NamedTuple):
    """A column of `kubectl get`. `wide`: only with `-o wide`."""

    name: str
    path: str
    type: Literal["string", "integer", "number", "boolean", "date"] = "string"
    wide: bool = False


class Part(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """A part of a spec or a status; `rules` relate its fields."""

    rules: ClassVar[tuple[Rule, ...]] = ()


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of resource. `rules` apply to the whole object, of whose metadata CEL sees only the name."""

    name: str
    short: str
    summary: str
    spec: type[Part]
    status: type[Part]
    columns: tuple[Column, ...]
    rules: tuple[Rule, ...] = ()

    @property
    def plural(self) -> str:
        """The name in API paths."""
        return f"{self.name.lower()}s"


def immutable(what: str) -> dict[str, Any]:
    """Return the schema of a field that is set once: `Meta(extra_json_schema=immutable("source"))`."""
    message = f"{what} cannot be changed; create a new resource"
    return {"x-kubernetes-validations": [{"rule": "self == oldSelf", "message": message}]}


def keyed(*keys: str) -> dict[str, Any]:
    """Return the schema of a list keyed by these fields, which server-side apply merges item by item."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


SET: Final[dict[str, Any]] = {"x-kubernetes-list-type": "set"}

Name = Annotated[str, Meta(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
ShortName = Annotated[str, Meta(min_length=1, max_length=20, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")]
ResourceName = Annotated[str, Meta(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$")]
LabelKey = Annotated[
    str,
    Meta(min_length=1, max_length=317, pattern=r"^([a-z0-9.-]+/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"),
]
Labels = Annotated[dict[str, Annotated[str, Meta(max_length=63)]], Meta(max_length=32)]
Annotations = Annotated[dict[str, Annotated[str, Meta(max_length=4096)]], Meta(max_length=32)]
Size = Annotated[
    str, Meta(min_length=1, max_length=32, pattern=r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$")
]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[int, Meta(ge=0, le=315_360_000)]
Text = Annotated[str, Meta(max_length=1024)]
FreeObject = Annotated[
    dict[str, Any],
    Meta(extra_json_schema={"x-kubernetes-preserve-unknown-fields": True, "additionalProperties": None}),
]


class Reference(Part, frozen=True, kw_only=True):
    """An object in the same namespace, by name."""

    name: Annotated[ResourceName, Meta(description="Name of the object.")]


class SecretKey(Part, frozen=True, kw_only=True):
    """One entry of a Secret in the same namespace."""

    name: Annotated[ResourceName, Meta(description="Name of the Secret.")]
    key: Annotated[
        str, Meta(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$", description="Key of the entry.")
    ]


class Condition(Part, frozen=True, kw_only=True):
    """One aspect of a resource's state, as Kubernetes' metav1.Condition."""

    type: Annotated[str, Meta(min_length=1, max_length=316, description="The aspect.")]
    status: Annotated[Literal["True", "False", "Unknown"], Meta(description="Whether it holds.")]
    reason: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=1024,
            pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
            description="One word, for programs.",
        ),
    ]
    message: Annotated[str, Meta(max_length=32768, description="A sentence, for people.")]
    last_transition_time: Annotated[
        str, Meta(description="When `status` last changed.", extra_json_schema={"format": "date-time"})
    ]
    observed_generation: (
        Annotated[int, Meta(description="The generation of the spec that it refers to.")] | None
    ) = None


Conditions = Annotated[
    tuple[Condition, ...],
    Meta(max_length=16, description="Conditions.", extra_json_schema=keyed("type")),
]
ObservedGeneration = (
    Annotated[int, Meta(description="The generation of the spec that this status refers to.")] | None
)


def parse(kind: type[T], document: Any) -> T:
    """Parse a document from the API; unknown fields are ignored. Raises ResourceError."""
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise ResourceError(str(error).replace("$", kind.__name__.lower().removeprefix("mesh"), 1)) from error


def plain(value: object) -> Any:
    """Return the value as a document for the API, without defaults."""
    return msgspec.to_builtins(value)
