"""Frames that come in parts: however rows are dealt out, they make what one node sends, or an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire.frame.split_frames import ROW_TENSOR, SplitFrameReader, part_metadata
from meshwire.frame.tensor_frame import FrameError, frame_layout, tensor_views

if TYPE_CHECKING:
    import numpy.typing as npt

WIDE = 20_000  # bytes of a row that is received in place


def columns(rows: int) -> dict[str, npt.NDArray[np.generic]]:
    draw = np.random.default_rng(rows)
    return {
        "image": draw.integers(0, 255, (rows, WIDE), dtype=np.uint8),
        "tokens": draw.integers(0, 9, (rows, 7), dtype=np.int32),
        "__pos": np.arange(rows, dtype=np.int64),
        "__status": np.zeros(rows, dtype=np.uint8),
    }


def frame(arrays: dict[str, npt.NDArray[np.generic]], metadata: dict[str, str]) -> bytearray:
    made = frame_layout([(name, array.dtype, array.shape) for name, array in arrays.items()], metadata)
    room = bytearray(made.size)
    for name, slot in made.tensors.items():
        room[slot.offset : slot.offset + slot.nbytes] = arrays[name].tobytes()
    made.seal(room)
    return room


def part(whole: dict[str, npt.NDArray[np.generic]], places: list[int], rows: int, step: int = 5) -> bytearray:
    kept = {
        ROW_TENSOR: np.array(places, dtype=np.int64),
        **{name: each.take(places, 0, mode="wrap") for name, each in whole.items()},
    }
    return frame(kept, part_metadata({"version": "1", "step": str(step)}, 3, rows))


def take(joining: SplitFrameReader, data: bytearray) -> None:
    at = 0

    def fill(view: memoryview) -> None:
        nonlocal at
        view[:] = data[at : at + len(view)]
        at += len(view)

    joining.read_part(len(data), fill, verify=True)
    assert at == len(data)


def joint(rows: int) -> SplitFrameReader:
    return SplitFrameReader(rows, 5, lambda size: memoryview(bytearray(size)))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.permutations(range(4)))
def test_parts_make_the_whole(owners: list[int], turns: list[int]) -> None:
    rows = len(owners)
    whole = columns(rows)
    parts = [part(whole, [n for n in range(rows) if owners[n] == owner], rows) for owner in turns]
    joining = joint(rows)
    for each in parts:
        take(joining, each)
    found, size = joining.tensor_views()
    one = frame(whole, {"version": "1", "step": "5"})
    expected = tensor_views(one)
    assert size == len(one)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 1 << 20), st.integers(1, 255))
def test_damage_is_an_error(at: int, bits: int) -> None:
    """Of a header, of places, of rows: never a frame with other values."""
    whole = columns(3)
    data = part(whole, [0, 2], 3)
    data[at % len(data)] ^= bits
    joining = joint(3)
    try:
        take(joining, part(whole, [1], 3))
        take(joining, data)
        found, _ = joining.tensor_views()
    except (FrameError, UnicodeDecodeError):
        return
    assert all(np.array_equal(found[name], whole[name]) for name in found)  # spaces, pads, a name of metadata


@pytest.mark.parametrize("wrong", [[0, 1, 1], [1, 0], [0, 3], [-1, 0], [2]])
def test_rows_out_of_place_are_an_error(wrong: list[int]) -> None:
    joining, whole = joint(3), columns(3)
    take(joining, part(whole, [2], 3))
    with pytest.raises(FrameError):
        take(joining, part(whole, wrong, 3))


def test_what_is_missing_or_of_another_frame_is_an_error() -> None:
    whole = columns(3)
    joining = joint(3)
    take(joining, part(whole, [0], 3))
    with pytest.raises(FrameError, match="1 of 3"):
        joining.tensor_views()
    for other in (
        part(whole, [1], 4),
        part(whole, [1], 3, step=6),
        frame(whole, {"step": "5"}),
        bytearray(3),
    ):
        with pytest.raises(FrameError):
            take(joining, other)
    narrow = {name: each if name != "image" else each[:, :9] for name, each in whole.items()}
    with pytest.raises(FrameError, match="belong to different frames"):
        take(joining, part(narrow, [2], 3))
