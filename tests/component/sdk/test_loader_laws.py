"""The laws of a loader over a running daemon: orders, mixes, packed rows, and data of which a part is bad."""

from __future__ import annotations

import io
import random
import tarfile
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
from PIL import Image

import meshsdk as mesh
from meshsdk import ops
from meshsdk.errors import InvalidPlanError
from meshsdk.testing.loader_suite import LoaderSuite, rows
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from meshsdk.client.s3_client import Client
    from meshsdk.datasets.dataset import Dataset

COUNT = 90
SEED = 20261121  # of which samples are spoilt, and how


def picture(number: int) -> bytes:
    noise = np.random.default_rng(number).integers(0, 256, (12, 10, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, "PNG")
    return out.getvalue()


def spoilt(body: bytes, draw: random.Random) -> bytes:
    """Cut, overwritten or emptied, at random."""
    at = draw.randrange(8, len(body) - 4)
    return draw.choice([body[:at], body[:at] + bytes(len(body) - at), b"", draw.randbytes(len(body))])


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    draw = random.Random(SEED)
    bad = set(draw.sample(range(COUNT), COUNT // 6))
    with (
        Daemon.start(workers=1) as daemon,
        mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client,
    ):
        client.create_bucket("photos")
        for shard in range(6):
            out = io.BytesIO()
            with tarfile.open(fileobj=out, mode="w") as tar:
                for number in range(shard * 15, shard * 15 + 15):
                    info, body = tarfile.TarInfo(f"{number:03}.png"), picture(number)
                    info.size = len(body)
                    tar.addfile(info, io.BytesIO(body))
            client.put("photos", f"whole/{shard}.tar", out.getvalue())
        for number in range(COUNT):
            body = spoilt(picture(number), draw) if number in bad else picture(number)
            client.put("photos", f"torn/{number:03}.png", body)
        yield client


class DaemonLaws(LoaderSuite):
    """Bound to a daemon; a subclass chooses dataset and arguments."""

    more: ClassVar[Mapping[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def with_client(self, client: Client) -> None:
        self.client = client

    def dataset(self) -> Dataset:
        return self.pictures("whole")

    def pictures(self, folder: str) -> Dataset:
        ds = mesh.open(f"s3://photos/{folder}", fields={"image": "png"}, client=self.client)
        return ds.map(ops.decode("image"), ops.random_resized_crop("image", 8), ops.hflip("image"))

    def loader(self, batch: int, rank: int = 0, world: int = 1, share: str | None = None) -> mesh.Loader:
        return mesh.Loader(
            self.dataset(), batch, seed=3, rank=rank, world=world, share=share, output="numpy",
            prefetch_bytes=1 << 20, **self.more,
        )  # fmt: skip


class TestGlobal(DaemonLaws):
    def test_random_ops_differ_by_epoch_and_seed_and_nothing_else_does(self) -> None:
        raw = mesh.open("s3://photos/whole", fields={"image": "png"}, client=self.client)
        decoded = raw.map(ops.decode("image"))
        for op, random_op in ((ops.center_crop, False), (ops.random_resized_crop, True)):
            ds = decoded.map(op("image", 8))
            seen = {place: self.stored(ds, *place) for place in ((3, 0), (3, 1), (4, 0))}
            assert self.stored(ds, 3, 0) == seen[3, 0]
            for other in ((3, 1), (4, 0)):
                same = sum(one == two for one, two in zip(seen[3, 0], seen[other], strict=True))
                assert same <= COUNT // 10 if random_op else same == COUNT

    @staticmethod
    def stored(ds: Dataset, seed: int, epoch: int) -> list[str]:
        """The rows of all samples in stored order, so that a position is one sample in every epoch."""
        with mesh.Loader(ds, 30, seed=seed, shuffle=False, output="numpy") as one:
            one.set_epoch(epoch)
            return [content for batch in one for _, _, content in rows(batch)]


class TestBlocks(DaemonLaws):
    more: ClassVar = {"shuffle": mesh.Blocks(shards=2)}


class TestMix(DaemonLaws):
    ranks: ClassVar[Sequence[int]] = (3,)

    def dataset(self) -> Dataset:
        parts = self.pictures("whole").split(a=0.3, b=0.7)
        schedule = [mesh.Stage([1, 3], position=40), mesh.Stage([1, 0], epoch=1)]
        return mesh.mix(*parts.values(), weights=[0.6, 0.4], schedule=schedule, positions=92, block=24)


class TestBuckets(DaemonLaws):
    more: ClassVar = {"buckets": mesh.LengthBuckets("image", window=3, rows=16)}
    ranks: ClassVar[Sequence[int]] = (3,)

    def test_batches_are_of_like_lengths(self) -> None:
        raw = mesh.open("s3://photos/torn", fields={"image": "png"}, client=self.client)
        spread = {}
        for buckets in (None, mesh.LengthBuckets("image", window=6)):
            with mesh.Loader(raw, 15, seed=3, output="numpy", buckets=buckets) as one:
                sizes = [np.diff(batch["image"].offsets) for batch in one]
            assert sum(map(sum, sizes)) == raw.snapshot.bytes
            spread[buckets] = sum(int(np.ptp(size)) for size in sizes)
        assert spread[buckets] < spread[None] / 2

    def test_a_field_without_bytes_and_packed_rows_are_refused(self) -> None:
        raw = mesh.open("s3://photos/torn", fields={"image": "png"}, client=self.client)
        with pytest.raises(InvalidPlanError, match="did you mean 'image'"):
            mesh.Loader(raw, 15, buckets=mesh.LengthBuckets("imag"))
        labelled = mesh.open("s3://photos", fields={"image": "png", "folder": "@class"}, client=self.client)
        with pytest.raises(InvalidPlanError, match="'folder' is a class label, whose rows all have"):
            mesh.Loader(labelled, 15, buckets=mesh.LengthBuckets("folder"))
        with pytest.raises(InvalidPlanError, match="packed rows all have the same length"):
            mesh.Loader(raw.pack("image", length=400), 15, buckets=mesh.LengthBuckets("image"))


class TestPacked(DaemonLaws):
    ranks: ClassVar[Sequence[int]] = (3,)

    def dataset(self) -> Dataset:
        ds = mesh.open("s3://photos/whole", fields={"image": "png"}, client=self.client)
        return ds.pack("image", length=400)


class TestBadOnesSubstituted(DaemonLaws):
    more: ClassVar = {"max_bad": 1.0}
    batch: ClassVar[int] = 17
    ranks: ClassVar[Sequence[int]] = (2, 16)

    def dataset(self) -> Dataset:
        return self.pictures("torn")


class TestBadOnesMasked(TestBadOnesSubstituted):
    more: ClassVar = {"max_bad": 1.0, "on_bad": "mask"}
    ranks: ClassVar[Sequence[int]] = (16,)


class TestBadOnesDropped(TestBadOnesSubstituted):
    more: ClassVar = {"max_bad": 1.0, "on_bad": "drop"}
    every_row: ClassVar[bool] = False
    ranks: ClassVar[Sequence[int]] = (16,)


def test_sixty_four_ranks_of_torn_data_have_equally_many_steps(client: Client) -> None:
    class Wide(TestBadOnesDropped):
        batch: ClassVar[int] = 64
        ranks: ClassVar[Sequence[int]] = (64,)

    laws = Wide()
    laws.client = client
    laws.test_ranks_that_run_at_once_have_equally_many_steps()
