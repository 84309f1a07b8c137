"""Programs moved as docs/migrating.md says: the same model on the same files learns as much as before.

Law: only the loader differs. Libraries that are not in the development environment (mosaicml-streaming,
litdata, TensorFlow) are tried where they are installed.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

import meshsdk as mesh
from meshsdk import ops
from tests.support.daemons import Daemon
from tests.support.torchvision_ops import no_torchvision_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from meshsdk.client.s3_client import Client

CLASSES, EPOCHS, BATCH, TRAIN, TEST = ("lying", "standing"), 6, 20, 160, 60


def pictures(count: int, seed: int) -> list[tuple[bytes, int]]:
    """JPEGs of 32 × 32 pixels with lying or standing stripes, and their labels."""
    random, made = np.random.default_rng(seed), []
    for number in range(count):
        wave = np.sin(np.arange(32) * random.uniform(0.5, 1.0))
        stripes = np.broadcast_to(wave if number % 2 else wave[:, None], (32, 32))
        colors = 128 + 60 * stripes[..., None] * random.uniform(0.5, 1, 3) + random.normal(0, 15, (32, 32, 3))
        body = io.BytesIO()
        Image.fromarray(np.clip(colors, 0, 255).astype("uint8")).save(body, "JPEG")
        made.append((body.getvalue(), number % 2))
    return made


def pixels(data: bytes) -> Any:
    return np.array(Image.open(io.BytesIO(data))).transpose(2, 0, 1)


def accuracy(epoch: Callable[[], Any]) -> float:
    """Train on the (images, labels) of each call of `epoch`; return the share of right test pictures."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 5), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
    )
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(EPOCHS):
        rows = 0
        for images, labels in epoch():
            assert images.shape[1:] == (3, 32, 32)
            loss = nn.functional.cross_entropy(model(images / 128 - 1), labels.long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rows += len(labels)
        assert rows == TRAIN
    test = pictures(TEST, 9)
    with torch.no_grad():
        found = model(torch.from_numpy(np.stack([pixels(data) for data, _ in test])) / 128 - 1).argmax(1)
    return float((found == torch.tensor([label for _, label in test])).float().mean())


def after(ds: mesh.Dataset) -> Callable[[], Any]:
    loader = mesh.Loader(ds, global_batch=BATCH, seed=7)
    return lambda: loader.as_tuples("image", "label")


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        Daemon.start(args=("--transform-workers", "2")) as daemon,
        mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client,
    ):
        client.create_bucket("moved")
        yield client


class Folder(Dataset[Any]):  # type: ignore[misc]
    """A folder, as `torchvision.datasets.ImageFolder` reads it."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*/*.jpg"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        file = self.files[number]
        return torch.from_numpy(pixels(file.read_bytes())), CLASSES.index(file.parent.name)


def from_folder(client: Client, folder: Path) -> tuple[Callable[[], Any], mesh.Dataset]:
    for number, (data, label) in enumerate(pictures(TRAIN, 1)):
        file = folder / CLASSES[label] / f"{number:03}.jpg"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(data)
        client.put("moved", f"folder/{CLASSES[label]}/{number:03}.jpg", data)
    loader = DataLoader(Folder(folder), batch_size=BATCH, shuffle=True)
    ds = mesh.open("s3://moved/folder", fields={"image": "jpg", "label": "@class"}, client=client)
    return lambda: loader, ds.map(ops.decode("image"), ops.center_crop("image", 32), ops.to_chw("image"))


def from_webdataset(client: Client, folder: Path) -> tuple[Callable[[], Any], mesh.Dataset]:
    import webdataset

    for shard in range(2):
        path = folder / f"train-{shard}.tar"
        with webdataset.TarWriter(str(path)) as writer:
            for number, (data, label) in enumerate(pictures(TRAIN, 1)):
                if number // (TRAIN // 2) == shard:
                    writer.write({"__key__": f"{number:03}", "jpg": data, "cls": str(label).encode()})
        client.put("moved", f"tars/{path.name}", path.read_bytes())
    stream = (
        webdataset.WebDataset(str(folder / "train-{0..1}.tar"), shardshuffle=2).shuffle(100).decode("pil")
    )
    chw = stream.to_tuple("jpg", "cls").map_tuple(lambda image: np.array(image).transpose(2, 0, 1), int)
    ds = mesh.open("s3://moved/tars", fields={"image": "jpg", "label": "cls"}, client=client)
    moved = ds.map(
        ops.decode("image"), ops.center_crop("image", 32), ops.to_chw("image"), ops.int_label("label")
    )
    return lambda: DataLoader(chw, batch_size=BATCH), moved


def from_huggingface(client: Client, folder: Path) -> tuple[Callable[[], Any], mesh.Dataset]:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Image as ImageFeature
    from datasets import load_dataset

    rows = pictures(TRAIN, 1)
    columns = {"image": [{"bytes": data, "path": None} for data, _ in rows], "label": [at for _, at in rows]}
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"image": pa.array(columns["image"], kind), "label": columns["label"]})
    pq.write_table(table, folder / "train.parquet")
    client.put("moved", "hub/train.parquet", (folder / "train.parquet").read_bytes())
    stream = load_dataset("parquet", data_files=str(folder / "train.parquet"), split="train", streaming=True)
    stream = stream.cast_column("image", ImageFeature()).shuffle(seed=7, buffer_size=100)
    stream = stream.map(lambda row: row | {"image": np.array(row["image"]).transpose(2, 0, 1)})

    def epoch() -> Any:
        for batch in DataLoader(stream.with_format("torch"), batch_size=BATCH):
            yield batch["image"], batch["label"]

    fields = {"image": "image.bytes", "label": "label"}
    ds = mesh.open("s3://moved/hub", fields=fields, kind="table", client=client)
    return epoch, ds.map(ops.decode("image"), ops.center_crop("image", 32), ops.to_chw("image"))


def from_mds(client: Client, folder: Path) -> tuple[Callable[[], Any], mesh.Dataset]:
    with no_torchvision_ops():  # it imports torchvision
        streaming = pytest.importorskip("streaming")
    with streaming.MDSWriter(out=str(folder / "mds"), columns={"image": "jpeg", "label": "int"}) as writer:
        for data, label in pictures(TRAIN, 1):
            writer.write({"image": Image.open(io.BytesIO(data)), "label": label})
    for file in sorted((folder / "mds").iterdir()):
        client.put("moved", f"mds/{file.name}", file.read_bytes())
    before = streaming.StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=BATCH)

    def collated(rows: list[Any]) -> Any:
        images = np.stack([np.array(row["image"]).transpose(2, 0, 1) for row in rows])
        return torch.from_numpy(images), torch.tensor([row["label"] for row in rows])

    ds = mesh.open("s3://moved/mds", kind="mds", client=client)
    moved = ds.map(
        ops.decode("image"),
        ops.center_crop("image", 32),
        ops.to_chw("image"),
        ops.frombuffer("label", "int64"),
    )
    return lambda: DataLoader(before, batch_size=BATCH, collate_fn=collated), moved


def from_tf_data(client: Client, folder: Path) -> tuple[Callable[[], Any], mesh.Dataset]:
    tf = pytest.importorskip("tensorflow")
    path, train = folder / "train.tfrecord", tf.train
    with tf.io.TFRecordWriter(str(path)) as writer:
        for data, label in pictures(TRAIN, 1):
            feature = {
                "image": train.Feature(bytes_list=train.BytesList(value=[data])),
                "label": train.Feature(int64_list=train.Int64List(value=[label])),
            }
            writer.write(train.Example(features=train.Features(feature=feature)).SerializeToString())
    client.put("moved", "records/train.tfrecord", path.read_bytes())
    spec = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}

    def parsed(record: Any) -> Any:
        row = tf.io.parse_single_example(record, spec)
        return tf.transpose(tf.io.decode_jpeg(row["image"], channels=3), (2, 0, 1)), row["label"]

    before = tf.data.TFRecordDataset(str(path)).shuffle(TRAIN, seed=7).map(parsed).batch(BATCH)

    def epoch() -> Any:
        for images, labels in before.as_numpy_iterator():
            yield torch.from_numpy(images), torch.from_numpy(labels)

    fields = {"image": "image", "label": "label"}
    ds = mesh.open("s3://moved/records", fields=fields, kind="tfrecord", client=client)
    moved = ds.map(
        ops.decode("image"),
        ops.center_crop("image", 32),
        ops.to_chw("image"),
        ops.feature("label", "integer"),
    )
    return epoch, moved


def from_litdata(client: Client, folder: Path) -> tuple[Callable[[], Any], mesh.Dataset]:
    pytest.importorskip("litdata")
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder / "lit"), chunk_bytes="64MB")
    for number, (data, label) in enumerate(pictures(TRAIN, 1)):
        writer.add_item(number, {"image": data, "label": label})
    writer.done()
    writer.merge()
    read = StreamingDataset(str(folder / "lit"), shuffle=True)
    with mesh.Writer("s3://moved/lit", client=client) as moving:
        for number in range(len(read)):
            row = read[number]
            moving.write({"jpg": row["image"], "cls": str(row["label"]).encode()})

    def epoch() -> Any:
        for batch in StreamingDataLoader(read, batch_size=BATCH, num_workers=0):
            yield torch.from_numpy(np.stack([pixels(data) for data in batch["image"]])), batch["label"]

    ds = mesh.open("s3://moved/lit", fields={"image": "jpg", "label": "cls"}, client=client)
    return epoch, ds.map(
        ops.decode("image"), ops.center_crop("image", 32), ops.to_chw("image"), ops.int_label("label")
    )


@pytest.mark.parametrize(
    "move", [from_folder, from_webdataset, from_huggingface, from_mds, from_litdata, from_tf_data]
)
@pytest.mark.filterwarnings("default")  # of the other libraries
def test_a_moved_program_learns_as_much(move: Any, client: Client, tmp_path: Path) -> None:
    before, ds = move(client, tmp_path)
    reached = {"before": accuracy(before), "after": accuracy(after(ds))}
    print(move.__name__, reached)
    assert min(reached.values()) >= 0.9
    assert reached["after"] >= reached["before"] - 1 / TEST
