"""Types all specs share: how a kind describes itself, field types, and Kubernetes quantities in bytes.

Law: a constraint belongs to the field it restricts: ranges and patterns in `Meta`, agreements between
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
    """`1.5Ti` → bytes. Raises ValueError."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)", text)
    unit = (_UNITS | _BINARY).get(found[2]) if found else None
    if found is None or unit is None:
        raise ValueError(f"{text!r} is no size such as 512Mi or 1.5Ti")
    return int(float(found[1]) * unit)


GROUP: Final = "shardmesh.io"
VERSION: Final = "v1alpha1"

T = TypeVar("T")


class ResourceError(ValueError):
    """A resource is not what its kind says; the message names the field."""


class Rule(NamedTuple):
    """A CEL rule over `self` (and `oldSelf`: then it is judged when something changes)."""

    rule: str
    message: str


class Column(NamedTuple):
    """A column of `kubectl get`. `wide`: only with `-o wide`."""

    name: str
    path: str
    type: Literal["string", "integer", "number", "boolean", "date"] = "string"
    wide: bool = False


class Part(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """A piece of a spec or a status; `rules` hold between its fields."""

    rules: ClassVar[tuple[Rule, ...]] = ()


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of resource. `rules` are over the whole object: of its metadata, only the name is to be seen."""

    name: str
    short: str
    summary: str
    spec: type[Part]
    status: type[Part]
    columns: tuple[Column, ...]
    rules: tuple[Rule, ...] = ()

    @property
    def plural(self) -> str:
        """Its name in paths."""
        return f"{self.name.lower()}s"


def immutable(what: str) -> dict[str, Any]:
    """`Meta(extra_json_schema=immutable("source"))`: set once."""
    message = f"{what} cannot be changed; make a new resource"
    return {"x-kubernetes-validations": [{"rule": "self == oldSelf", "message": message}]}


def keyed(*keys: str) -> dict[str, Any]:
    """A list that is a map by these fields: server-side apply merges it item by item."""
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
    """Something in the same namespace, by name."""

    name: Annotated[ResourceName, Meta(description="Its name.")]


class SecretKey(Part, frozen=True, kw_only=True):
    """One entry of a Secret in the same namespace."""

    name: Annotated[ResourceName, Meta(description="Of the Secret.")]
    key: Annotated[
        str, Meta(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$", description="Of the entry.")
    ]


class Condition(Part, frozen=True, kw_only=True):
    """One side of how a resource is, as Kubernetes' metav1.Condition."""

    type: Annotated[str, Meta(min_length=1, max_length=316, description="What is judged.")]
    status: Annotated[Literal["True", "False", "Unknown"], Meta(description="The judgement.")]
    reason: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=1024,
            pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
            description="One word for programs.",
        ),
    ]
    message: Annotated[str, Meta(max_length=32768, description="A sentence for people.")]
    last_transition_time: Annotated[
        str, Meta(description="When `status` last changed.", extra_json_schema={"format": "date-time"})
    ]
    observed_generation: (
        Annotated[int, Meta(description="The generation of the spec that was judged.")] | None
    ) = None


Conditions = Annotated[
    tuple[Condition, ...],
    Meta(max_length=16, description="How it is, side by side.", extra_json_schema=keyed("type")),
]
ObservedGeneration = Annotated[int, Meta(description="The generation of the spec this speaks of.")] | None


def parse(kind: type[T], document: Any) -> T:
    """The value of what a cluster sent; unknown fields are passed over. Raises ResourceError."""
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise ResourceError(str(error).replace("$", kind.__name__.lower().removeprefix("mesh"), 1)) from error


def plain(value: object) -> Any:
    """The value as a cluster takes it: without what is at its default."""
    return msgspec.to_builtins(value)
