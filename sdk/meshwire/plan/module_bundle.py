"""A module of user ops together with the wheels that it imports, as one body.

Law: the first line is JSON, {"source": bytes, "wheels": [[name, bytes], …]}; the rest is the source and then
the wheels, one after the other. Wheels are pure Python: they are imported from memory, where no compiled code
can be.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from meshwire.strict_json import PlanError, shown_value

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_WHEELS: Final = 32
MAX_WHEEL_BYTES: Final = 32 << 20
"""Of all wheels of a module."""
_NAME = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9_.]*)-[A-Za-z0-9_.+!]+(-[A-Za-z0-9_.]+)?-[a-z0-9_.]+-none-any\.whl"
)
_OURS = ("numpy", "meshsdk", "meshwire", "meshd")


def join_bundle(source: bytes, wheels: Mapping[str, bytes]) -> bytes:
    """Return the body. Raises PlanError for wheels that cannot come along."""
    check_wheels(wheels)
    names = sorted(wheels)
    head = {"source": len(source), "wheels": [[name, len(wheels[name])] for name in names]}
    return b"".join([json.dumps(head).encode(), b"\n", source, *(wheels[name] for name in names)])


def split_bundle(body: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Return source and wheels. Raises PlanError."""
    first, _, rest = body.partition(b"\n")
    try:
        head = json.loads(first[: 64 << 10])
        sizes = [int(head["source"]), *(int(size) for _, size in head["wheels"])]
        names = [str(name) for name, _ in head["wheels"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PlanError("wheels", f"not a module with wheels: {shown_value(str(error))}") from error
    if min(sizes) < 0 or sum(sizes) != len(rest) or len(set(names)) != len(names):
        raise PlanError("wheels", "the sizes of source and wheels do not add up")
    parts, at = list[bytes](), 0
    for size in sizes:
        parts.append(rest[at : at + size])
        at += size
    wheels = dict(zip(names, parts[1:], strict=True))
    check_wheels(wheels)
    return parts[0], wheels


def check_wheels(wheels: Mapping[str, Any]) -> None:
    """Raises PlanError for names, numbers or sizes that are not allowed."""
    for name in wheels:
        match = _NAME.fullmatch(name)
        if match is None:
            raise PlanError(
                "wheels",
                f"{shown_value(name)} is not a pure-Python wheel (…-none-any.whl): install a library with "
                "compiled code in the environment of meshd on every node",
            )
        if match[1].lower() in _OURS:
            raise PlanError("wheels", f"{match[1]} is the node's own, and cannot come as a wheel")
    if len(wheels) > MAX_WHEELS or sum(map(len, wheels.values())) > MAX_WHEEL_BYTES:
        raise PlanError("wheels", f"at most {MAX_WHEELS} wheels of {MAX_WHEEL_BYTES >> 20} MiB together")
