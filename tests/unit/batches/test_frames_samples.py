"""Sample frames: index first, aligned blobs, late failures marked, ragged fields."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from meshwire.frame.sample_frames import (
    BLOB_ALIGNMENT,
    SampleFrame,
    ragged_rows,
    sample_layout,
)
from meshwire.frame.tensor_frame import FrameError, Status, frame_layout, header_size, tensor_views

BLOBS = [b"first", b"", b"x" * 1000, b"last one"]
NAMES = ["a/1", "a/2", "ü", ""]


def built(status: list[int] | None = None) -> bytes:
    frame = sample_layout([len(blob) for blob in BLOBS], {"version": "1"}, NAMES)
    data = bytearray(frame.size)
    for blob, (start, length) in zip(BLOBS, frame.places.tolist(), strict=True):
        data[start : start + length] = blob
    frame.seal(data, np.array(status or [0] * len(BLOBS), dtype=np.uint8))
    return bytes(data)


def test_blobs_come_back_by_row_with_names() -> None:
    frame = SampleFrame(built())
    assert [bytes(blob) for blob in frame] == BLOBS
    assert [frame.name(row) for row in range(4)] == NAMES
    assert frame.metadata["version"] == "1"
    frame.verify()


def test_it_is_aligned_and_stock_safetensors_reads_it() -> None:
    places = sample_layout([len(blob) for blob in BLOBS], {}).places
    assert (places[:, 0] % BLOB_ALIGNMENT == 0).all()
    stock = safetensors.numpy.load(built())
    assert stock["__index"].shape == (4, 2)
    assert list(stock["__status"]) == [0, 0, 0, 0]


def test_it_can_be_written_in_stream_order() -> None:
    frame = sample_layout([len(blob) for blob in BLOBS], {"version": "1"}, NAMES)
    stream = bytearray(frame.head)
    for blob, (start, _) in zip(BLOBS, frame.places.tolist(), strict=True):
        stream += bytes(start - len(stream)) + blob
    assert len(stream) == frame.trailer
    sums = np.frombuffer(built(), dtype=np.uint8)
    expected = tensor_views(sums.tobytes())["__crc32c"]
    stream += frame.trailer_bytes(np.zeros(4, dtype=np.uint8), expected)
    assert bytes(stream) == built()


def test_without_blobs_and_without_names() -> None:
    frame = sample_layout([], {})
    data = bytearray(frame.size)
    frame.seal(data, np.zeros(0, dtype=np.uint8))
    assert len(SampleFrame(bytes(data))) == 0
    plain = sample_layout([1], {})
    data = bytearray(plain.size)
    plain.seal(data, np.zeros(1, dtype=np.uint8))
    assert SampleFrame(bytes(data)).name(0) is None


def test_damage_is_named_unless_the_blob_was_marked_failed() -> None:
    data = bytearray(built([0, 0, Status.FAILED, 0]))
    places = sample_layout([len(blob) for blob in BLOBS], {"version": "1"}, NAMES).places
    data[places[2, 0]] ^= 1
    SampleFrame(bytes(data)).verify()
    data[places[3, 0]] ^= 1
    with pytest.raises(FrameError, match="sample 3"):
        SampleFrame(bytes(data)).verify()


@pytest.mark.parametrize("sizes", [[-1], [[1]], [2**62]])
def test_impossible_sizes_are_refused(sizes: list[int]) -> None:
    with pytest.raises(FrameError):
        sample_layout(sizes, {})


def test_names_must_fit() -> None:
    with pytest.raises(FrameError, match="names"):
        sample_layout([1, 2], {}, ["one"])


@pytest.mark.parametrize(
    "index", [[[0, 9]], [[-1, 1]], [[0, -1]], [[8, 1]], [[2**62, 2**62]], [[4, 2**63 - 1]], [[0, 1], [1, 1]]]
)
def test_an_index_that_leaves_the_blobs_is_refused(index: list[list[int]]) -> None:
    values = np.array(index, dtype=np.int64)
    shapes = [("__index", "I64", values.shape), ("__blobs", "U8", (8,))]
    frame = frame_layout([*shapes, ("__status", "U8", (1,)), ("__crc32c", "U32", (1,))], {}, checksums=False)
    data = bytearray(frame.size)
    data[: header_size(frame.header)] = frame.header
    frame.tensors["__index"].view(data)[...] = values
    with pytest.raises(FrameError):
        SampleFrame(bytes(data))


@pytest.mark.parametrize(
    "fields",
    [
        [("__index", "I64", (1, 2))],
        [
            ("__index", "I32", (1, 2)),
            ("__blobs", "U8", (8,)),
            ("__status", "U8", (1,)),
            ("__crc32c", "U32", (1,)),
        ],
        [
            ("__index", "I64", (2,)),
            ("__blobs", "U8", (8,)),
            ("__status", "U8", (1,)),
            ("__crc32c", "U32", (1,)),
        ],
        [
            ("__index", "I64", (1, 2)),
            ("__blobs", "U8", (8, 1)),
            ("__status", "U8", (1,)),
            ("__crc32c", "U32", (1,)),
        ],
        [
            ("__index", "I64", (1, 2)),
            ("__blobs", "U8", (8,)),
            ("__status", "U8", (2,)),
            ("__crc32c", "U32", (1,)),
        ],
    ],
)
def test_frames_of_another_form_are_refused(fields: list[tuple[str, str, tuple[int, ...]]]) -> None:
    frame = frame_layout(fields, {}, checksums=False)
    with pytest.raises(FrameError):
        SampleFrame(frame.header + bytes(frame.size))


def test_ragged_fields_are_cut_into_rows() -> None:
    frame = frame_layout([("text.data", "U8", (8,)), ("text.offsets", "I64", (4,))], {})
    data = bytearray(frame.size)
    frame.tensors["text.data"].view(data)[:] = np.frombuffer(b"abcdefgh", dtype=np.uint8)
    frame.tensors["text.offsets"].view(data)[:] = [0, 3, 3, 8]
    frame.seal(data)
    assert [row.tobytes() for row in ragged_rows(tensor_views(data), "text")] == [b"abc", b"", b"defgh"]


@pytest.mark.parametrize(
    "offsets",
    [[], [1, 8], [0, 7], [0, 9], [0, 5, 3, 8], [0, -1, 8], [0, 3 * 2**61, -3 * 2**61, 8]],
)
def test_ragged_offsets_that_lie_are_refused(offsets: list[int]) -> None:
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "x.data": np.zeros(8, dtype=np.uint8),
        "x.offsets": np.array(offsets, dtype=np.int64),
    }
    with pytest.raises(FrameError, match="rows"):
        ragged_rows(arrays, "x")
    with pytest.raises(FrameError, match="no ragged field"):
        ragged_rows(arrays, "y")


def test_the_metadata_is_json_safe() -> None:
    frame = sample_layout([1], {"fields": json.dumps(["image", "label"])})
    data = bytearray(frame.size)
    frame.seal(data, np.zeros(1, dtype=np.uint8))
    assert json.loads(SampleFrame(bytes(data)).metadata["fields"]) == ["image", "label"]
