"""Parser of `tf.Example` messages without TensorFlow: where each feature is, and the numbers in it.

Law: any bytes give what a protobuf parser would find, or an ExampleError; nothing is read beyond them. Of a
repeated key the last counts, as in any protobuf map.
https://protobuf.dev/programming-guides/encoding, tensorflow/core/example/{example,feature}.proto
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import numpy.typing as npt

MAX_LIST_BYTES: Final = 16 << 20
"""Maximum bytes of the numbers of one feature."""
MAX_FEATURES: Final = 10_000
"""Maximum features of one message."""
_VARINT, _EIGHT, _DELIMITED, _FOUR = 0, 1, 2, 5
FEATURE_KINDS: Final = {1: "bytes", 2: "float", 3: "int64"}
"""The members of a Feature's `oneof`, by field number."""


class ExampleError(ValueError):
    """The bytes are not a valid tf.Example message."""


class Feature(NamedTuple):
    """The location of a feature in its message: for a single `bytes` value that value, for numbers the
    whole Feature message. `kind` is "" if the feature is empty; `values`, for bytes, is 0, 1, or 2 for two
    or more."""

    kind: str
    begin: int
    end: int
    values: int = 1


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Decode a varint into (value, end)."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
    raise ExampleError("a number of the message is cut off, or longer than ten bytes")


def message_fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (field, wire type, begin, end) of each field of a message. Raises ExampleError."""
    while at < end:
        tag, at = _varint(data, at, end)
        wire = tag & 7
        if wire == _DELIMITED:
            size, at = _varint(data, at, end)
            stop = at + size
        elif wire == _VARINT:
            stop = _varint(data, at, end)[1]
        else:
            stop = at + {_EIGHT: 8, _FOUR: 4}.get(wire, end)
        if stop > end or not tag >> 3 or wire not in (_VARINT, _EIGHT, _DELIMITED, _FOUR):
            raise ExampleError("not a protobuf message")
        yield tag >> 3, wire, at, stop
        at = stop


def parse_features(data: bytes, wanted: Collection[bytes] | None = None) -> dict[bytes, Feature]:
    """Return the features of a `tf.Example` (or the context of a `tf.SequenceExample`) by name; with
    `wanted`, only those. Raises ExampleError."""
    found: dict[bytes, Feature] = {}
    seen = 0
    for field, wire, begin, end in message_fields(data, 0, len(data)):
        if field != 1:
            continue
        if wire != _DELIMITED:
            raise ExampleError("its first field is not a Features message")
        for number, kind, first, last in message_fields(data, begin, end):
            seen += 1
            if seen > MAX_FEATURES:
                raise ExampleError(f"it has more than {MAX_FEATURES} features")
            if number != 1:
                continue
            if kind != _DELIMITED:
                raise ExampleError("a feature is not a message")
            name, place = _entry(data, first, last)
            if wanted is None or name in wanted:
                found[name] = Feature("", 0, 0, 0) if place is None else _feature(data, *place)
    return found


def _entry(data: bytes, begin: int, end: int) -> tuple[bytes, tuple[int, int] | None]:
    """Return the name and the location of the Feature of a map entry."""
    name, place = b"", None
    for field, wire, first, last in message_fields(data, begin, end):
        if wire != _DELIMITED:
            raise ExampleError("a feature's name or value has the wrong type")
        if field == 1:
            name = data[first:last]
        elif field == 2:
            if place is not None:
                raise ExampleError("a feature has two values")
            place = first, last
    return name, place


def _feature(data: bytes, begin: int, end: int) -> Feature:
    """Locate the value of a Feature message."""
    found = _list(data, begin, end)
    if found is None:
        return Feature("", begin, end, 0)
    kind, first, last = found
    if kind != "bytes":
        return Feature(kind, begin, end)
    values = list(islice(message_fields(data, first, last), 2))
    if any(field != 1 or wire != _DELIMITED for field, wire, _, _ in values):
        raise ExampleError("a list of bytes contains another type")
    if len(values) != 1:
        return Feature(kind, begin, begin, len(values))
    return Feature(kind, values[0][2], values[0][3])


def _list(data: bytes, begin: int, end: int) -> tuple[str, int, int] | None:
    """Return the kind and location of the list of a Feature, or None if it has none."""
    lists = list(islice(message_fields(data, begin, end), 2))
    if not lists:
        return None
    field, wire, first, last = lists[0]
    if len(lists) > 1 or wire != _DELIMITED or field not in FEATURE_KINDS:
        raise ExampleError("a feature must have exactly one list of values")
    return FEATURE_KINDS[field], first, last


def parse_numbers(feature: bytes) -> npt.NDArray[Any]:
    """Decode the values of a numeric Feature message as int64[n] or float32[n]. Raises ExampleError."""
    if len(feature) > MAX_LIST_BYTES:
        raise ExampleError(f"a feature of {len(feature)} bytes; at most {MAX_LIST_BYTES} are allowed")
    found = _list(feature, 0, len(feature))
    if found is None or found[0] == "bytes":
        raise ExampleError("the feature holds bytes" if found else "the feature is empty")
    kind, begin, end = found
    single = _FOUR if kind == "float" else _VARINT
    runs = []
    for field, wire, first, last in message_fields(feature, begin, end):
        if field != 1 or wire not in (_DELIMITED, single):
            raise ExampleError(f"a list of {kind} contains another type")
        runs.append(feature[first:last])
    packed = b"".join(runs)  # unpacked values have the same encoding as those of a packed run
    if kind == "int64":
        return _varints(packed)
    if any(len(run) % 4 for run in runs):
        raise ExampleError("a list of float ends within a number")
    return np.frombuffer(packed, "<f4").astype(np.float32)


def _varints(packed: bytes) -> npt.NDArray[np.int64]:
    octets = np.frombuffer(packed, np.uint8)
    lasts = np.flatnonzero(octets < 0x80)
    if octets.size and (not lasts.size or int(lasts[-1]) != octets.size - 1):
        raise ExampleError("a list of int64 ends within a number")
    firsts = np.concatenate(([0], lasts[:-1] + 1)) if lasts.size else lasts
    lengths = lasts - firsts + 1
    longest = int(lengths.max(initial=0))
    if longest > 10:
        raise ExampleError("a number of more than ten bytes")
    values = np.zeros(lasts.size, np.uint64)
    for group in range(longest):
        has = lengths > group
        bits = (octets[firsts[has] + group] & 0x7F).astype(np.uint64)
        values[has] |= bits << np.uint64(7 * group)
    return values.view(np.int64)
