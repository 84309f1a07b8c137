"""The op library of a node: what it can do to a field, in its own words.

Law: asks and reads; nothing about an op is known here beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from meshsdk.errors import MeshError
from meshsdk.transport import Request

if TYPE_CHECKING:
    from meshsdk.transport import Transport


@dataclass(frozen=True, slots=True)
class Argument:
    """`kind`: what may be given, in words. `default` only counts when it is not `required`."""

    name: str
    kind: str
    required: bool
    default: Any = None


@dataclass(frozen=True, slots=True)
class OpInfo:
    """`takes` and `gives` are kinds with dtypes and shapes; `refuses` is what makes a sample bad. An op
    that `mixes` rows of a batch is for plans only, as is one with several `inputs`.
    """

    op: str
    version: str
    versions: tuple[str, ...]
    summary: str
    takes: str
    gives: str
    refuses: str
    random: bool
    mixes: bool
    arguments: tuple[Argument, ...]
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OpLine:
    """An op in short; `arguments` by name."""

    op: str
    version: str
    summary: str
    takes: str
    gives: str
    arguments: tuple[str, ...]


def list_ops(transport: Transport) -> tuple[OpLine, ...]:
    """Every op of the node, by name."""
    answer = transport.json(Request("GET", "/-/ops"))
    try:
        return tuple(OpLine(**item | {"arguments": tuple(item["arguments"])}) for item in answer["ops"])
    except (KeyError, TypeError) as error:
        raise MeshError(
            f"the node's answer is no list of ops ({error}): is it of another release?"
        ) from error


def show_op(transport: Transport, name: str) -> OpInfo:
    """One op. Raises NotFoundError with the nearest name."""
    answer = transport.json(Request("GET", f"/-/ops/{quote(name, safe='')}"))
    try:
        arguments = tuple(Argument(**item) for item in answer["arguments"])
        lists = {name: tuple(answer.get(name, ())) for name in ("versions", "inputs")}
        return OpInfo(**answer | {"arguments": arguments, **lists})
    except (KeyError, TypeError) as error:
        raise MeshError(f"the node's answer is no op ({error}): is it of another release?") from error
