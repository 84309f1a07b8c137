"""Batches, meters and the sizes a loader computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from meshsdk.client.native_api import FieldSchema
from meshsdk.datasets.batch import Frame, Ragged, make_batch, open_frame
from meshsdk.errors import ConfigurationError, CorruptFrameError
from meshsdk.loader.arguments import frame_bytes
from meshsdk.loader.output_stage import make_stage
from meshsdk.loader_stats import Meter, Tally
from meshwire.frame import tensor_frame

if TYPE_CHECKING:
    from meshsdk.datasets.batch import Batch


def batch_of(arrays: dict[str, np.ndarray]) -> Batch:
    rows: dict[str, np.ndarray] = {"__pos": np.arange(3), "__status": np.zeros(3, np.uint8)}
    return make_batch(Frame(5, arrays | rows, 100), 2, lambda array: array)


def test_a_batch_is_a_mapping_of_its_fields() -> None:
    batch = batch_of({"image": np.zeros((3, 2, 2), np.uint8), "label": np.arange(3)})
    assert list(batch) == ["image", "label"]
    assert len(batch) == 2
    assert (batch.rows, batch.epoch, batch.step) == (3, 2, 5)
    assert dict(batch)["label"].tolist() == [0, 1, 2]
    assert "rows=3, image: uint8 [3, 2, 2]" in repr(batch)
    batch.status[1:] = 3
    assert repr(batch).startswith("Batch(epoch=2, step=5, rows=3 (2 flagged), image: uint8 [3, 2, 2]")
    with pytest.raises(KeyError, match="image, label"):
        batch["images"]


def test_several_fields_at_once_are_a_tuple() -> None:
    batch = batch_of({"image": np.zeros((3, 2), np.uint8), "label": np.arange(3)})
    labels, images = batch["label", "image"]
    assert (labels.shape, images.shape) == ((3,), (3, 2))
    assert "label" in batch
    both: object = ("label", "image")
    assert both not in batch
    with pytest.raises(KeyError, match="no field 'labels'; this batch has image, label"):
        batch["image", "labels"]


def test_only_unpacking_a_batch_warns() -> None:
    batch = batch_of({"image": np.zeros((3, 2), np.uint8), "label": np.arange(3)})
    with pytest.warns(UserWarning, match=r'batch\["image", "label"\]'):
        image, label = batch
    assert (image, label) == ("image", "label")
    first, *rest = batch  # no warning, and warnings are errors here
    assert [first, *rest] == [*batch] == list(batch) == sorted(batch) == [name for name in batch]
    assert {**batch}.keys() == dict(batch).keys() == set(batch)
    (one,) = batch_of({"label": np.arange(3)})
    assert one == "label"
    names, values = zip(*batch.items(), strict=True)
    assert names == ("image", "label")
    assert len(values) == 2


def test_a_batch_goes_to_a_device_as_trainers_move_it() -> None:
    arrays = {"x": np.zeros((3, 2)), "t.data": np.arange(4), "t.offsets": np.array([0, 1, 2, 4])}
    rows: dict[str, np.ndarray] = {"__pos": np.arange(3), "__status": np.zeros(3, np.uint8)}
    batch = make_batch(Frame(5, arrays | rows, 100), 2, torch.from_numpy)
    moved = batch.to("meta", non_blocking=True)
    text = moved["t"]
    assert {tensor.device.type for tensor in (moved["x"], text.data, text.offsets)} == {"meta"}
    assert moved.positions is batch.positions
    assert (moved.epoch, moved.step, moved.rows) == (2, 5, 3)
    assert batch.to("cpu")["x"].data_ptr() == batch["x"].data_ptr()
    with pytest.raises(ConfigurationError, match="output='torch'"):
        batch_of({"x": np.arange(3)}).to("cpu")


def test_ragged_rows() -> None:
    batch = batch_of({"text.data": np.arange(6, dtype=np.uint8), "text.offsets": np.array([0, 2, 2, 6])})
    text = batch["text"]
    assert isinstance(text, Ragged)
    assert [row.tolist() for row in text] == [[0, 1], [], [2, 3, 4, 5]]
    assert text[-1].tolist() == [2, 3, 4, 5]
    assert repr(text) == "Ragged(3 rows of uint8, 0 to 4 elements each)"
    assert repr(Ragged(text.data, np.zeros(1, int))) == "Ragged(0 rows of uint8)"
    with pytest.raises(IndexError, match="no row 3: the field has 3"):
        text[3]


def test_ragged_rows_have_their_shapes() -> None:
    arrays: dict[str, np.ndarray] = {
        "__pos": np.arange(3),
        "__status": np.zeros(3, np.uint8),
        "image.data": np.arange(10, dtype=np.uint8),
        "image.offsets": np.array([0, 6, 6, 10]),
        "image.shapes": np.array([[2, 3], [0, 3], [1, 4]]),
    }
    for convert in (np.asarray, torch.from_numpy):
        batch = make_batch(Frame(5, arrays, 100), 2, convert)
        assert list(batch) == ["image"]
        assert [tuple(row.shape) for row in batch["image"]] == [(2, 3), (0, 3), (1, 4)]
        assert batch["image"][0].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_field_that_is_merely_called_data_is_none_of_a_ragged_pair() -> None:
    assert list(batch_of({"my.data": np.arange(3), "x.offsets": np.arange(3)})) == ["my.data", "x.offsets"]


def test_positions_do_not_keep_the_slot() -> None:
    memory = np.arange(3)
    batch = make_batch(Frame(0, {"__pos": memory, "__status": memory}, 1), 0, lambda array: array)
    assert not np.shares_memory(batch.positions, memory)


def test_frames_are_checked() -> None:
    made = tensor_frame.frame_layout([("x", "uint8", (300,))], {"version": "1", "step": "4"})
    body = bytearray(made.size)
    made.seal(body)
    assert open_frame(memoryview(body), 4, verify=True).arrays["x"].shape == (300,)
    with pytest.raises(CorruptFrameError, match="another size or step"):
        open_frame(memoryview(body), 5, verify=True)
    with pytest.raises(CorruptFrameError, match="another size or step"):
        open_frame(memoryview(body + b"0"), 4, verify=True)
    body[-1] ^= 1
    with pytest.raises(CorruptFrameError, match="checksum"):
        open_frame(memoryview(body), 4, verify=True)
    assert open_frame(memoryview(body), 4, verify=False).step == 4
    with pytest.raises(CorruptFrameError):
        open_frame(memoryview(b"not a frame at all"), 4, verify=True)


def test_frame_sizes_are_known_beforehand_unless_ragged() -> None:
    image, label = FieldSchema("uint8", (3, 224, 224)), FieldSchema("int64", ())
    known = frame_bytes({"image": image, "label": label}, 256)
    rows = [("image", "uint8", (256, 3, 224, 224)), ("label", "int64", (256,))]
    real = tensor_frame.frame_layout(
        [*rows, ("__pos", "int64", (256,)), ("__status", "uint8", (256,))], {"plan": "a" * 64}
    ).size
    assert real <= known <= real + 32_768
    assert frame_bytes({"image": image, "text": FieldSchema("uint8", None)}, 256) == 0


def test_a_meter_adds_what_readers_did() -> None:
    meter = Meter(samples=2000, batches=2, waited=1.0, seconds=4.0)
    meter.absorb(Tally(retries=1, bytes=10, cpu=0.5, origins={"hit": 1}))
    stats = meter.snapshot(Tally(retries=2, bytes=5, cpu=0.5, origins={"hit": 1, "miss": 1}), 3)
    assert (stats.retries, stats.bytes, stats.overflows, stats.hits) == (3, 15, 3, 2)
    assert (stats.samples_per_second, stats.wait_share, stats.cpu_per_1000) == (500.0, 0.25, 0.5)
    assert meter.retries == 1  # reading does not add
    assert "500/s" in str(stats)


@pytest.mark.parametrize(
    ("device", "output", "named"),
    [
        (None, "jax", "output="),
        ("cuda", "numpy", "output='numpy'"),
        ("tpu", None, "device="),
        ("cuda", None, "GPU"),
    ],
)
def test_impossible_outputs_are_refused(device: str | None, output: str | None, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        make_stage(device, output)


@pytest.mark.parametrize("convert", [lambda array: array, torch.from_numpy], ids=["numpy", "torch"])
def test_ragged_rows_are_padded_with_their_counts(convert: Any) -> None:
    flat = Ragged(convert(np.arange(5)), convert(np.array([0, 2, 2, 5])))
    dense, counts = flat.padded(-1)
    assert dense.tolist() == [[0, 1, -1], [-1, -1, -1], [2, 3, 4]]
    assert counts.tolist() == [2, 0, 3]
    assert flat.padded(9, length=4)[0].tolist()[0] == [0, 1, 9, 9]
    with pytest.raises(ConfigurationError, match="3 elements, more than length=2"):
        flat.padded(length=2)
    shapes = np.array([[1, 4], [0, 0], [0, 4], [2, 4]])  # the second is a masked row
    boxes = Ragged(convert(np.arange(12, dtype=np.float32)), convert(np.array([0, 4, 4, 4, 12])), shapes)
    dense, counts = boxes.padded()
    assert (dense.shape, counts.tolist()) == ((4, 2, 4), [1, 0, 0, 2])
    assert dense[0].tolist() == [[0, 1, 2, 3], [0, 0, 0, 0]]
    assert dense[3].tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    none = Ragged(
        convert(np.zeros(0, np.float32)), convert(np.zeros(3, np.int64)), np.array([[0, 4], [0, 4]])
    )
    assert none.padded()[0].shape == (2, 0, 4)
    with pytest.raises(ConfigurationError, match="beyond their first axis"):
        Ragged(boxes.data, convert(np.array([0, 4, 12])), np.array([[1, 4], [4, 2]])).padded()
