"""A module of user ops together with the wheels that it imports, as one body.

Law: the first line is JSON, {"source": bytes, "wheels": [[name, bytes], …], "objects": [[wheel, file, bytes],
…]}; the rest is the source and then the wheels, one after the other. Only the client that pushes and the
confined process that imports look into a wheel; `objects` tells nodes how much memory its shared objects take
before that process gives up its rights.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from meshwire.strict_json import PlanError, shown_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MAX_WHEELS: Final = 32
MAX_WHEEL_BYTES: Final = 32 << 20
"""Of all wheels of a module."""
MAX_OBJECTS: Final = 192
MAX_OBJECT_BYTES: Final = 128 << 20
"""Of all shared objects in the wheels of a module, unpacked."""
SHARED_OBJECT: Final = re.compile(r".*\.so(?:\.[0-9]+)*")
_NAME = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9_.]*)-[A-Za-z0-9_.+!]+(?:-[0-9][A-Za-z0-9_.]*)?"
    r"-[a-z0-9_.]+-([a-z0-9_.]+)-([a-z0-9_.]+)\.whl"
)
_FILE = re.compile(r"[A-Za-z0-9_+.-]{1,100}(?:/[A-Za-z0-9_+.-]{1,100}){0,15}")
_OURS = ("numpy", "meshsdk", "meshwire", "meshd")


class SharedObject(NamedTuple):
    """A shared object in a wheel; `size` in bytes, unpacked."""

    wheel: str
    file: str
    size: int


def is_pure(wheel: str) -> bool:
    """Return whether a wheel is, by its name, without compiled code."""
    match = _NAME.fullmatch(wheel)
    return match is not None and (match[2], match[3]) == ("none", "any")


def join_bundle(source: bytes, wheels: Mapping[str, bytes]) -> bytes:
    """Return the body. Raises PlanError for wheels that cannot come along."""
    check_wheels(wheels)
    names = sorted(wheels)
    head: dict[str, Any] = {"source": len(source), "wheels": [[name, len(wheels[name])] for name in names]}
    objects = [found for name in names if not is_pure(name) for found in _objects_of(name, wheels[name])]
    if objects:
        check_objects(objects, wheels)
        head["objects"] = [list(each) for each in objects]
    return b"".join([json.dumps(head).encode(), b"\n", source, *(wheels[name] for name in names)])


def _objects_of(name: str, wheel: bytes) -> list[SharedObject]:
    try:
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            return [
                SharedObject(name, item.filename, item.file_size)
                for item in archive.infolist()
                if SHARED_OBJECT.fullmatch(item.filename)
            ]
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise PlanError("wheels", f"{name} is not a wheel: {error}") from error


def split_bundle(body: bytes) -> tuple[bytes, dict[str, bytes], tuple[SharedObject, ...]]:
    """Return source, wheels, and the shared objects that the client says are in them. Raises PlanError."""
    first, _, rest = body.partition(b"\n")
    try:
        head = json.loads(first[: 64 << 10])
        sizes = [int(head["source"]), *(int(size) for _, size in head["wheels"])]
        names = [str(name) for name, _ in head["wheels"]]
        objects = read_objects(head.get("objects", []))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PlanError("wheels", f"not a module with wheels: {shown_value(str(error))}") from error
    if min(sizes) < 0 or sum(sizes) != len(rest) or len(set(names)) != len(names):
        raise PlanError("wheels", "the sizes of source and wheels do not add up")
    parts, at = list[bytes](), 0
    for size in sizes:
        parts.append(rest[at : at + size])
        at += size
    wheels = dict(zip(names, parts[1:], strict=True))
    check_wheels(wheels)
    check_objects(objects, wheels)
    return parts[0], wheels, objects


def read_objects(listed: Iterable[Sequence[Any]]) -> tuple[SharedObject, ...]:
    """Return shared objects from [wheel, file, bytes] each. Raises ValueError, TypeError."""
    return tuple(SharedObject(str(wheel), str(file), int(size)) for wheel, file, size in listed)


def check_wheels(wheels: Mapping[str, Any]) -> None:
    """Raises PlanError for names, numbers or sizes that are not allowed."""
    for name in wheels:
        match = _NAME.fullmatch(name)
        if match is None:
            raise PlanError(
                "wheels",
                f"{shown_value(name)} is not the name of a wheel (NAME-VERSION-PYTHON-ABI-PLATFORM.whl)",
            )
        if match[1].lower() in _OURS:
            raise PlanError("wheels", f"{match[1]} is the node's own, and cannot come as a wheel")
    if len(wheels) > MAX_WHEELS or sum(map(len, wheels.values())) > MAX_WHEEL_BYTES:
        raise PlanError(
            "wheels",
            f"at most {MAX_WHEELS} wheels of {MAX_WHEEL_BYTES >> 20} MiB together; what is larger must be "
            "installed in the environment of meshd on every node",
        )


def check_objects(objects: Sequence[SharedObject], wheels: Mapping[str, Any]) -> None:
    """Raises PlanError for shared objects that no wheel can have, or that are too many or too large."""
    for wheel, file, size in objects:
        if wheel not in wheels or is_pure(wheel):
            raise PlanError("objects", f"{shown_value(wheel)} has no compiled code")
        if (
            not _FILE.fullmatch(file)
            or ".." in file.split("/")
            or not SHARED_OBJECT.fullmatch(file)
            or size < 0
        ):
            raise PlanError("objects", f"{shown_value(file)} in {wheel} is not a shared object")
    if len({(wheel, file) for wheel, file, _ in objects}) != len(objects):
        raise PlanError("objects", "a shared object is listed twice")
    if len(objects) > MAX_OBJECTS or sum(size for _, _, size in objects) > MAX_OBJECT_BYTES:
        raise PlanError(
            "objects",
            f"at most {MAX_OBJECTS} shared objects of {MAX_OBJECT_BYTES >> 20} MiB together, unpacked; what "
            "is larger must be installed in the environment of meshd on every node",
        )
