"""Tensor frames: alignment, stock readers, checksums filled in afterwards, every dtype."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from meshwire.frame.tensor_frame import (
    BODY_ALIGNMENT,
    DTYPES,
    TENSOR_ALIGNMENT,
    FrameError,
    dtype_code,
    frame_layout,
    header_size,
    parse_frame_header,
    tensor_views,
    verify_frame,
)

METADATA = {"version": "1", "plan": "ab" * 32, "epoch": "0", "step": "17"}
FIELDS: list[tuple[str, str, tuple[int, ...]]] = [
    ("image", "uint8", (3, 5, 7)),
    ("label", "int64", (3,)),
    ("caption.data", "U8", (11,)),
    ("caption.offsets", "I64", (4,)),
    ("empty", "F32", (0, 4)),
    ("scalar", "F64", ()),
    ("__pos", "I64", (3,)),
    ("__status", "U8", (3,)),
]


def filled(fields: list[tuple[str, Any, tuple[int, ...]]] = FIELDS) -> bytes:
    frame = frame_layout(fields, METADATA)
    data = bytearray(np.random.default_rng(1).bytes(frame.size))
    for slot in parse_frame_header(frame.header).tensors.values():
        if slot.name.startswith("__pad"):
            slot.view(data)[...] = 0
    frame.seal(data)
    return bytes(data)


def test_body_and_tensors_are_aligned() -> None:
    header = parse_frame_header(filled())
    assert header.body % BODY_ALIGNMENT == 0
    tensors = [slot for name, slot in header.tensors.items() if not name.startswith("__pad.")]
    assert [slot.name for slot in tensors] == [name for name, _, _ in FIELDS]
    assert all(slot.offset % TENSOR_ALIGNMENT == 0 for slot in tensors)


def test_stock_safetensors_reads_it() -> None:
    data = filled()
    stock = safetensors.numpy.load(data)
    ours = tensor_views(data)
    assert {name for name in stock if not name.startswith("__pad.")} == set(ours)
    for name, array in ours.items():
        assert stock[name].dtype == array.dtype
        assert stock[name].shape == array.shape
        assert stock[name].tobytes() == array.tobytes()
    assert ours["image"].shape == (3, 5, 7)
    assert ours["scalar"].shape == ()


def test_views_share_the_buffer() -> None:
    buffer = bytearray(filled())
    tensor_views(buffer)["label"][0] = 42
    assert tensor_views(bytes(buffer))["label"][0] == 42


def test_checksums_are_filled_in_without_moving_anything() -> None:
    frame = frame_layout(FIELDS, METADATA)
    assert len(frame.header_with(dict.fromkeys(frame.tensors, 2**32 - 1))) == len(frame.header)
    assert header_size(frame.header[:8]) == len(frame.header)
    data = filled()
    assert parse_frame_header(data).checksums().keys() == {name for name, _, _ in FIELDS}
    verify_frame(data)


def test_a_flipped_bit_is_named() -> None:
    data = bytearray(filled())
    data[parse_frame_header(bytes(data)).tensors["label"].offset] ^= 1
    with pytest.raises(FrameError, match="label"):
        verify_frame(bytes(data))


def test_checksums_of_absent_tensors_and_bad_digits_are_refused() -> None:
    frame = frame_layout([("a", "U8", (1,))], {"crc32c": json.dumps({"b": "00000000"})}, checksums=False)
    with pytest.raises(FrameError, match="'b'"):
        verify_frame(frame.header + b"\0")
    for text in ("[]", "{", '{"a": "xyz"}', '{"a": null}'):
        header = frame_layout([("a", "U8", (1,))], {"crc32c": text}, checksums=False).header
        with pytest.raises(FrameError):
            parse_frame_header(header).checksums()


def test_frames_without_checksums_have_none() -> None:
    frame = frame_layout(FIELDS, METADATA, checksums=False)
    assert parse_frame_header(frame.header).checksums() == {}
    data = bytearray(frame.size)
    frame.seal(data)
    assert bytes(data[: len(frame.header)]) == frame.header


@pytest.mark.parametrize("code", DTYPES)
def test_every_dtype_goes_round(code: str) -> None:
    data = filled([("x", code, (2, 3))])
    assert tensor_views(data)["x"].dtype == DTYPES[code]
    assert parse_frame_header(data).tensors["x"].dtype == code


def test_dtypes_are_taken_by_any_of_their_names() -> None:
    assert (
        dtype_code("uint8") == dtype_code(np.uint8) == dtype_code(np.dtype("u1")) == dtype_code("U8") == "U8"
    )
    assert dtype_code("bfloat16") == "BF16"
    assert dtype_code("float16") == "F16"
    with pytest.raises(FrameError, match="cast"):
        dtype_code("complex64")


@pytest.mark.parametrize("name", ["__pad.0", "__metadata__", "twice"])
def test_reserved_and_doubled_names_are_refused(name: str) -> None:
    with pytest.raises(FrameError, match="reserved"):
        frame_layout([("twice", "U8", (1,)), (name, "U8", (1,))], {})


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(FrameError, match="shape"):
        frame_layout([("x", "U8", (-1,))], {})
    with pytest.raises(FrameError, match="shape"):
        frame_layout([("x", "U8", (0, 2**40, 2**40))], {})
    with pytest.raises(FrameError, match="bytes"):
        frame_layout([("x", "F64", (2**46,))], {})


def test_many_tensors_make_a_longer_header() -> None:
    data = filled([(f"tensor-{index}", "U8", (index,)) for index in range(200)])
    assert parse_frame_header(data).body % BODY_ALIGNMENT == 0
    assert parse_frame_header(data).body > BODY_ALIGNMENT
    assert len(safetensors.numpy.load(data)) > 200


def head(entries: object, *, length: int | None = None) -> bytes:
    text = json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text


def tensor(**changes: object) -> dict[str, object]:
    return {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4], **changes}}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x02",
        b"\x02" + bytes(7),
        head({}, length=2**63),
        head({}, length=1),
        head([]),
        head({"__metadata__": []}),
        head({"__metadata__": {"a": 1}}),
        head({"a": 7}),
        head({"a": {"dtype": "U8", "shape": [4]}}),
        head(tensor(extra=1)),
        head(tensor(dtype="U9")),
        head(tensor(dtype=["U8"])),
        head(tensor(shape=[5])),
        head(tensor(shape=[-4])),
        head(tensor(shape=[True, 4])),
        head(tensor(shape=[4.0])),
        head(tensor(shape="4")),
        head(tensor(shape=[1] * 33 + [4])),
        head(tensor(data_offsets=[0])),
        head(tensor(shape=[0, 2**48, 2**48], data_offsets=[0, 0])),
        head(tensor(data_offsets=[4, 0])),
        head(tensor(data_offsets=[4, 8])),
        head(tensor(data_offsets=[-4, 0])),
        head(tensor(data_offsets=[0, 2**64])),
        head(tensor(shape=[2**60, 2**60], data_offsets=[0, 4])),
        head({**tensor(), "b": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}}),
        head({**tensor(), "b": {"dtype": "U8", "shape": [2], "data_offsets": [5, 7]}}),
        (2).to_bytes(8, "little") + b"\xff\xfe",
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
        (22).to_bytes(8, "little") + b'{"a":{},"a":{}}       ',
    ],
)
def test_headers_that_lie_are_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        parse_frame_header(data)


def test_a_frame_that_was_cut_short_is_refused() -> None:
    data = filled()
    for end in (len(data) - 1, parse_frame_header(data).body, 100):
        with pytest.raises(FrameError):
            tensor_views(data[:end])
        with pytest.raises(FrameError):
            verify_frame(data[:end])
