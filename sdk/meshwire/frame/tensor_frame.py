"""Tensor frames: batches as safetensors files with a body aligned to 4096 bytes and tensors aligned to 128.

Law: stock `safetensors` reads every frame; `parse_frame_header` turns any bytes into a header or a
FrameError.
Invariant: tensors tile the body; gaps are explicit `__pad.k` tensors, because the format forbids holes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshwire.checksums.crc import crc32c

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    Buffer = bytes | bytearray | memoryview

CONTENT_TYPE = "application/vnd.shardmesh.tensors"
FRAME_VERSION = "1"
BODY_ALIGNMENT = 4096
TENSOR_ALIGNMENT = 128
MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 1 << 16
MAX_BODY_BYTES = 1 << 48
PAD_PREFIX = "__pad."
CHECKSUMS = "crc32c"

# numpy has no BF16 type: it is carried as its 16 raw bits.
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
_CODES = {dtype.name: code for code, dtype in DTYPES.items() if code != "BF16"} | {"bfloat16": "BF16"}


class Status(IntEnum):
    """State of a row or blob: the values of `__status`."""

    OK = 0
    SUBSTITUTED = 1
    MASKED = 2
    PAD = 3
    FAILED = 4  # a gathered item that could not be read; its bytes are zeros


class FrameError(ValueError):
    """The bytes are not a frame, or the frame was damaged in transit."""


def dtype_code(dtype: str | np.dtype[Any] | type) -> str:
    """Return the safetensors code of a dtype given as its code ("U8"), its numpy name ("uint8", "bfloat16")
    or a numpy dtype. Raises FrameError.
    """
    if isinstance(dtype, str):
        return _code_of_name(dtype)
    return _code_of_type(dtype)


@lru_cache(maxsize=256)
def _code_of_name(dtype: str) -> str:
    return dtype if dtype in DTYPES else _code_of_type(dtype)


def _code_of_type(dtype: str | np.dtype[Any] | type) -> str:
    name = "bfloat16" if dtype == "bfloat16" else str(np.dtype(dtype).name)
    if name not in _CODES:
        raise FrameError(f"frames cannot carry {name}; cast it to one of {', '.join(sorted(_CODES))}")
    return _CODES[name]


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """The location of a tensor: `offset` in bytes from the start of the frame."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def view(self, frame: Buffer) -> npt.NDArray[Any]:
        """Return the tensor as a view of `frame`, writable if the buffer is."""
        count = math.prod(self.shape)
        return np.frombuffer(frame, dtype=DTYPES[self.dtype], count=count, offset=self.offset).reshape(
            self.shape
        )


@dataclass(frozen=True, slots=True)
class FrameLayout:
    """The layout of a frame. `header`: the bytes before the body; `size`: of the whole frame, in bytes;
    `tensors`: by name, in order of offset, without the padding; `entries`: the header's JSON of them, without
    braces. With `checksums` the header reserves room for them, and `seal` fills it in.
    """

    header: bytes
    tensors: Mapping[str, TensorSlot]
    size: int
    entries: str
    metadata: Mapping[str, str]
    checksums: bool

    def seal(self, frame: bytearray | memoryview) -> None:
        """Write the header with the checksums of the tensors already in `frame` (of length `size`)."""
        view = memoryview(frame)
        sums = {
            name: crc32c(view[slot.offset : slot.offset + slot.nbytes]) for name, slot in self.tensors.items()
        }
        view[: len(self.header)] = self.header_with(sums)

    def header_with(self, checksums: Mapping[str, int]) -> bytes:
        """Return the header with the crc32c of each tensor filled in; it is as long as `header`."""
        return self.header_of(self.metadata, checksums) if self.checksums else self.header

    def header_of(self, metadata: Mapping[str, str], checksums: Mapping[str, int]) -> bytes:
        """Return the header of a frame with the same tensors, these checksums, and perhaps other metadata, of
        which its length may depend."""
        sums = _render_checksums({name: checksums[name] for name in self.tensors})
        return _render_header(self.entries, {**metadata, CHECKSUMS: sums})


_encode: Final = json.JSONEncoder(separators=(",", ":")).encode
_quoted: Final = json.encoder.encode_basestring_ascii
_KNOWN_TENSORS: Final = 64


def _render_checksums(sums: Mapping[str, int]) -> str:
    return _render_texts({name: f"{value:08x}" for name, value in sums.items()})


def _render_texts(texts: Mapping[str, str]) -> str:
    """Return a JSON object of texts, without a JSON encoder, which takes longer to make than to use."""
    return "{" + ",".join([f"{_quoted(name)}:{_quoted(text)}" for name, text in texts.items()]) + "}"


def _render_header(entries: str, metadata: Mapping[str, str]) -> bytes:
    text = f'{{"__metadata__":{_render_texts(metadata)}{"," if entries else ""}{entries}}}'.encode()
    length = -(-(8 + len(text)) // BODY_ALIGNMENT) * BODY_ALIGNMENT
    return (length - 8).to_bytes(8, "little") + text.ljust(length - 8)


def frame_layout(
    fields: Iterable[tuple[str, str | np.dtype[Any] | type, Sequence[int]]],
    metadata: Mapping[str, str],
    *,
    checksums: bool = True,
) -> FrameLayout:
    """Lay out a frame of tensors (name, dtype, shape) in the order given.

    Raises FrameError for reserved or duplicate names and for dtypes that frames cannot carry.
    """
    described = tuple((name, dtype_code(dtype), tuple(map(int, shape))) for name, dtype, shape in fields)
    entries, places, size = _place_known(described) if len(described) <= _KNOWN_TENSORS else _place(described)
    if checksums:
        metadata = {**metadata, CHECKSUMS: _render_checksums(dict.fromkeys(places, 0))}
    header = _render_header(entries, metadata)
    body = len(header)
    tensors = {
        name: TensorSlot(name, code, shape, body + start, nbytes)
        for name, (code, shape, start, nbytes) in places.items()
    }
    return FrameLayout(header, tensors, body + size, entries, metadata, checksums)


Places = dict[str, tuple[str, tuple[int, ...], int, int]]


def _place(fields: tuple[tuple[str, str, tuple[int, ...]], ...]) -> tuple[str, Places, int]:
    """Return the header's JSON of some tensors, without braces; by name their dtype, shape, offset in the
    body and bytes; and the size of the body. Raises FrameError."""
    entries: dict[str, Any] = {}
    places: Places = {}
    cursor = 0
    for name, code, shape in fields:
        if name in places or name.startswith(PAD_PREFIX) or name == "__metadata__":
            raise FrameError(f"the tensor name {name!r} is a duplicate or reserved")
        if not _possible(shape):
            raise FrameError(f"tensor {name!r} has the invalid shape {shape}")
        start = -(-cursor // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
        if start > cursor:
            entries[f"{PAD_PREFIX}{len(entries)}"] = _entry("U8", (start - cursor,), cursor, start)
        cursor = start + math.prod(shape) * DTYPES[code].itemsize
        entries[name] = _entry(code, shape, start, cursor)
        places[name] = (code, shape, start, cursor - start)
    if cursor > MAX_BODY_BYTES:
        raise FrameError(f"a body of {cursor} bytes; frames can carry at most {MAX_BODY_BYTES}")
    return _encode(entries)[1:-1], places, cursor


# Frames of a plan mostly have tensors of the same shapes: what is placed is looked up among the last ones.
_place_known = lru_cache(maxsize=64)(_place)


def _possible(shape: tuple[int, ...]) -> bool:
    # numpy rejects a shape whose other extents are too large even if one extent is 0.
    return (
        len(shape) <= 32 and min(shape, default=0) >= 0 and math.prod(filter(None, shape)) <= MAX_BODY_BYTES
    )


def _entry(code: str, shape: tuple[int, ...], start: int, end: int) -> dict[str, Any]:
    return {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """A parsed frame header. `body`: offset of the body, and `size` of the whole frame, in bytes; `tensors`
    by name, in order of offset, padding included.
    """

    body: int
    size: int
    tensors: Mapping[str, TensorSlot]
    metadata: Mapping[str, str]

    def checksums(self) -> dict[str, int]:
        """Return the crc32c by tensor, empty if the frame carries none. Raises FrameError if they are
        malformed."""
        text = self.metadata.get(CHECKSUMS)
        if text is None:
            return {}
        value = _json_object(text.encode(errors="replace"), "the checksums")
        try:
            return {str(name): int(digits, 16) for name, digits in value.items()}
        except (TypeError, ValueError) as error:
            raise FrameError("the frame's checksums are malformed") from error


def header_size(first: Buffer) -> int:
    """Return the offset of the body in bytes, given the first 8 or more bytes of a frame. Raises
    FrameError."""
    if len(first) < 8:
        raise FrameError("a frame begins with 8 bytes of header length; got fewer")
    length = int.from_bytes(bytes(first[:8]), "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise FrameError(f"a header of {length} bytes; frames have 2…{MAX_HEADER_BYTES}")
    return 8 + length


def _json_object(text: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_no_doubles)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"{what} are not JSON") from error
    if not isinstance(value, dict):
        raise FrameError(f"{what} are not a JSON object")
    return value


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise FrameError("a name appears twice in the frame's header")
    return result


_METADATA: Final = b'{"__metadata__":'
_BLANKS: Final = " \t\r\n"
_PADDING: Final = b" " * BODY_ALIGNMENT
_KNOWN_BYTES: Final = 8192
_DECODER: Final = json.JSONDecoder(object_pairs_hook=_no_doubles)


def parse_frame_header(frame: Buffer) -> FrameHeader:
    """Parse the header of a frame from its first `header_size` bytes or more. Raises FrameError for any
    fault.
    """
    body = header_size(frame)
    if len(frame) < body:
        raise FrameError(f"the header has {body} bytes, but only {len(frame)} were given")
    metadata, entries = _split_header(_without_padding(bytes(frame[8:body])))
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FrameError("__metadata__ must map names to text")
    slots, end = _parse_known(entries, body) if len(entries) <= _KNOWN_BYTES else _parse_slots(entries, body)
    return FrameHeader(body, end, slots, metadata)


def _without_padding(text: bytes) -> bytes:
    """Return a header without the spaces at its end: to strip them, one by one, would take most of the time
    that a header takes."""
    end = text.rfind(b"}") + 1
    padding = len(text) - end
    return text[:end] if padding <= BODY_ALIGNMENT and text[end:] == _PADDING[:padding] else text


def _split_header(text: bytes) -> tuple[Any, bytes]:
    """Return the metadata, and the entries of the tensors as a JSON object, which is the same for most frames
    of a plan. Raises FrameError."""
    if text.startswith(_METADATA):
        try:
            told = text.decode()
            metadata, end = _DECODER.raw_decode(told, len(_METADATA))
        except (ValueError, RecursionError) as error:
            raise FrameError("the header's entries are not JSON") from error
        rest = told[end:].strip(_BLANKS)
        if rest.startswith(",") and not rest[1:].lstrip(_BLANKS).startswith("}"):
            return metadata, b"{" + rest[1:].encode()
        if rest != "}":
            raise FrameError("the header's entries are not JSON")
        return metadata, b"{}"
    document = _json_object(text, "the header's entries")
    metadata = document.pop("__metadata__", {})
    return metadata, json.dumps(document).encode()


def _parse_slots(entries: bytes, body: int) -> tuple[dict[str, TensorSlot], int]:
    """Return the tensors of a header's entries, and the end of the body. Raises FrameError."""
    document = _json_object(entries, "the header's entries")
    if "__metadata__" in document:
        raise FrameError("a name appears twice in the frame's header")
    if len(document) > MAX_TENSORS:
        raise FrameError(f"{len(document)} tensors; a frame can hold at most {MAX_TENSORS}")
    slots = sorted(
        (_parse_slot(name, entry, body) for name, entry in document.items()),
        key=lambda slot: (slot.offset, slot.nbytes),
    )
    end = body
    for slot in slots:
        if slot.offset != end:
            raise FrameError(f"tensor {slot.name[:60]!r} leaves a hole or overlaps another")
        end += slot.nbytes
    return {slot.name: slot for slot in slots}, end


_parse_known = lru_cache(maxsize=64)(_parse_slots)


def _parse_slot(name: str, entry: Any, body: int) -> TensorSlot:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise FrameError(f"tensor {name[:60]!r} needs dtype, shape and data_offsets, and nothing else")
    code = entry["dtype"]
    if not isinstance(code, str) or code not in DTYPES:
        raise FrameError(f"tensor {name[:60]!r} has an unknown dtype")
    shape, offsets = _extents(name, entry["shape"]), _extents(name, entry["data_offsets"])
    if not _possible(shape) or len(offsets) != 2 or offsets[1] < offsets[0]:
        raise FrameError(f"tensor {name[:60]!r} has a bad shape or bad offsets")
    nbytes = offsets[1] - offsets[0]
    if math.prod(shape) * DTYPES[code].itemsize != nbytes:
        raise FrameError(f"tensor {name[:60]!r}: its shape does not match its {nbytes} bytes")
    return TensorSlot(name, code, shape, body + offsets[0], nbytes)


def _extents(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, list) and all(type(item) is int and 0 <= item <= MAX_BODY_BYTES for item in value):
        return tuple(value)
    raise FrameError(f"tensor {name[:60]!r}: shape and data_offsets must be lists of integers of 0 or more")


def tensor_views(frame: Buffer, header: FrameHeader | None = None) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of a whole frame by name, without its padding, as views. Raises FrameError."""
    parsed = header or parse_frame_header(frame)
    if len(frame) < parsed.size:
        raise FrameError(
            f"the frame was truncated: it has {parsed.size} bytes, but only {len(frame)} were given"
        )
    return {
        name: slot.view(frame) for name, slot in parsed.tensors.items() if not name.startswith(PAD_PREFIX)
    }


def verify_frame(frame: Buffer, header: FrameHeader | None = None) -> None:
    """Raise FrameError naming the first tensor whose bytes do not match the crc32c in the header."""
    parsed = header or parse_frame_header(frame)
    if len(frame) < parsed.size:
        raise FrameError(
            f"the frame was truncated: it has {parsed.size} bytes, but only {len(frame)} were given"
        )
    body = memoryview(frame)
    for name, expected in parsed.checksums().items():
        slot = parsed.tensors.get(name)
        if slot is None or crc32c(body[slot.offset : slot.offset + slot.nbytes]) != expected:
            raise FrameError(f"tensor {name[:60]!r} does not match its checksum; fetch the frame again")
