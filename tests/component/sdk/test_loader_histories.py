"""A loader's whole life over a running daemon, as a model of a few numbers tells it: whatever was taken,
skipped, sought, saved and gone on with, with however many ranks and whatever batch, of whatever dataset."""

from __future__ import annotations

import io
import itertools
import json
import random
import tarfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import meshsdk as mesh
from meshsdk import ops
from meshsdk.testing.loader_suite import PAD, Row, forever, rows
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from meshsdk.client.s3_client import Client
    from meshsdk.datasets.dataset import Dataset

COUNT = 23
EMPTY, LONG, TORN = (3, 11), 7, (5, 16)  # samples with a text of nothing, of 70 KB, with no picture


def picture(number: int) -> bytes:
    noise, out = np.random.default_rng(number).integers(0, 256, (6, 5, 3), np.uint8), io.BytesIO()
    Image.fromarray(noise).save(out, "PNG")
    return out.getvalue()


def text(number: int) -> bytes:
    size = 0 if number in EMPTY else 70_000 if number == LONG else number % 9 + 1
    return random.Random(number).randbytes(size)


def array(number: int) -> bytes:
    """Of no elements."""
    out = io.BytesIO()
    np.save(out, np.zeros((0, number % 3), np.float32))
    return out.getvalue()


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        Daemon.start(workers=1) as daemon,
        mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client,
    ):
        client.create_bucket("laws")
        for number in range(COUNT):
            stem = f"a/{'xyz'[number % 3]}/{number:02}"
            client.put("laws", f"{stem}.png", b"torn" if number in TORN else picture(number))
            client.put("laws", f"{stem}.txt", text(number))
            client.put("laws", f"{stem}.npy", array(number))
        for shard in range(3):
            out = io.BytesIO()
            with tarfile.open(fileobj=out, mode="w") as tar:
                for number in range(shard * 8, shard * 8 + 8):  # one more than there are pictures
                    info = tarfile.TarInfo(f"{'xyz'[number % 3]}/{number:02}.cls")
                    body = str(100 + number).encode()
                    info.size = len(body)
                    tar.addfile(info, io.BytesIO(body))
            client.put("laws", f"b/{shard}.tar", out.getvalue())
        yield client


def pictures(client: Client, **fields: str) -> Dataset:
    return mesh.open("s3://laws/a", fields=fields, client=client)


def ragged(client: Client) -> Dataset:
    return pictures(client, text="txt", none="npy", label="@class").map(ops.npy("none"))


def mixed_up(client: Client) -> Dataset:
    ds = pictures(client, image="png", label="@class")
    return ds.map(ops.decode("image"), ops.random_resized_crop("image", 4), ops.mixup("image", alpha=0.8))


def joined(client: Client) -> Dataset:
    """Of numbers in tars with texts, of these some, cut in two, and mixed again."""
    numbers = mesh.open("s3://laws/b", fields={"number": "cls"}, client=client)
    ds = numbers.join(pictures(client, text="txt")).filter("text_size < 1000")
    parts = ds.split(one=0.4, two=0.6)
    stages = [mesh.Stage([1, 0], position=13), mesh.Stage([1, 1], epoch=1)]
    made = mesh.mix(*parts.values(), weights=[1, 3], schedule=stages, positions=29, block=6)
    return made.map(ops.int_label("number"))


def packed(client: Client) -> Dataset:
    texts = pictures(client, text="txt").filter("text_size < 100")
    parts = [texts.filter(f"index % 2 == {odd}") for odd in range(2)]
    return mesh.mix(*parts, weights=[2, 1]).pack("text", length=9)


def one(client: Client) -> Dataset:
    return pictures(client, text="txt", label="@class").filter("index == 1")  # of nothing


ALL: dict[str, tuple[Callable[[Client], Dataset], dict[str, Any]]] = {
    "ragged": (ragged, {}),
    "ragged, by length": (ragged, {"buckets": mesh.LengthBuckets("text", window=3, rows=4)}),
    "mixed up": (mixed_up, {}),
    "mixed up, masked": (mixed_up, {"on_bad": "mask", "shuffle": mesh.Blocks(shards=2)}),
    "mixed up, dropped": (mixed_up, {"on_bad": "drop"}),
    "joined": (joined, {"shuffle": mesh.Blocks(shards=2)}),
    "joined, as stored": (joined, {"shuffle": False}),
    "joined, by length": (joined, {"buckets": mesh.LengthBuckets("text", window=2, rows=5)}),
    "packed": (packed, {"shuffle": mesh.Blocks(shards=1)}),
    "one": (one, {}),
}


@dataclass
class Model:
    """Where a job stands. `content`: the rows of an epoch, by position; those that are left out are none."""

    content: Callable[[int], list[Row | None]]
    positions: int
    tail: str
    batch: int
    epoch: int = 0
    position: int = 0
    origins: dict[int, int] = field(default_factory=dict)

    def steps(self, origin: int) -> int:
        left = self.positions - origin
        return left // self.batch if self.tail == "drop" else -(-left // self.batch)

    @property
    def over(self) -> bool:
        """Whether no batch of the epoch is left."""
        end = self.position + (self.batch if self.tail == "drop" else 1)
        return end > self.positions

    def batch_at(self, epoch: int, begin: int) -> list[Row]:
        content, found = self.content(epoch), []
        end = begin + self.batch if self.tail == "pad" else min(begin + self.batch, self.positions)
        for place in range(begin, end):
            row = content[place % self.positions]
            if row is not None:
                found.append(row if place < self.positions else (row[0], PAD, row[2]))
        return found

    def goes_on(self) -> None:
        self.position += self.batch
        if self.over:
            self.epoch, self.position = self.epoch + 1, 0


class Job:
    """The loaders of all ranks, and the model of them; each thing done is done to both."""

    def __init__(self, make: Callable[..., mesh.Loader], model: Model, world: int) -> None:
        self.make, self.model, self.world = make, model, world
        self.held = ExitStack()
        self.open()

    def open(self) -> None:
        ranks = range(self.world)
        self.ranks = [
            self.held.enter_context(self.make(self.model.batch, rank, self.world)) for rank in ranks
        ]
        self.begin()

    def begin(self) -> None:
        self.given = [iter(forever(rank)) for rank in self.ranks]

    def take(self, count: int) -> None:
        model = self.model
        for _ in range(count):
            found = [rows(next(given)) for given in self.given]
            if model.over:  # gone on with in larger batches, of which none is left
                model.epoch, model.position = model.epoch + 1, 0
            assert list(itertools.chain(*found)) == model.batch_at(model.epoch, model.position)
            model.goes_on()
            self.check()

    def check(self) -> None:
        model = self.model
        for rank in self.ranks:
            state = rank.state_dict()
            assert (state["epoch"], state["position"]) == (model.epoch, model.position)
            assert len(rank) == model.steps(0)
            assert rank.step + rank.remaining == model.steps(model.position % model.batch)

    def resume(self, batch: int, world: int) -> None:
        state = json.dumps(self.ranks[-1].state_dict())
        self.held.close()
        self.model.batch, self.world = batch, world
        self.model.origins = {self.model.epoch: self.model.position % batch}
        self.open()
        for rank in self.ranks:
            rank.load_state_dict(state)

    def skip(self, count: int) -> None:
        model = self.model
        for rank in self.ranks:
            rank.skip(count)
        self.begin()
        for _ in range(count):
            if model.over:
                model.epoch, model.position = model.epoch + 1, 0
            model.goes_on()

    def seek(self, epoch: int, part: float) -> None:
        step = int(part * self.model.steps(0))
        for rank in self.ranks:
            rank.seek(epoch, step)
        self.begin()
        self.model.epoch, self.model.position = epoch, step * self.model.batch
        self.model.origins = {}

    def look(self, epoch: int, part: float) -> None:
        model = self.model
        origin = model.position % model.batch if epoch == model.epoch else model.origins.get(epoch, 0)
        step = int(part * model.steps(origin))
        if not model.steps(origin):
            with pytest.raises(IndexError):
                self.ranks[0].at(step, epoch)
            return
        found = [rows(rank.at(step, epoch)) for rank in self.ranks]
        assert list(itertools.chain(*found)) == model.batch_at(epoch, origin + step * model.batch)


parts = st.floats(0, 1, exclude_max=True, width=16)
things = st.one_of(
    st.tuples(st.just("take"), st.integers(1, 4)),
    st.tuples(st.just("resume"), st.integers(1, 40), st.integers(1, 4)),
    st.tuples(st.just("skip"), st.integers(1, 9)),
    st.tuples(st.just("seek"), st.integers(0, 2), parts),
    st.tuples(st.just("look"), st.integers(0, 3), parts),
)


@pytest.mark.parametrize("name", ALL)
def test_a_loader_is_where_its_history_says(client: Client, name: str) -> None:
    opened, more = ALL[name]
    ds, known = opened(client), dict[int, list[Row | None]]()

    def make(tail: Any, batch: int, rank: int = 0, world: int = 1) -> mesh.Loader:
        return mesh.Loader(
            ds, batch, seed=5, rank=rank, world=world, output="numpy", max_bad=1.0, tail=tail, **more
        )

    with make("pad", 1) as whole:
        positions = whole.plan.positions

    def content(epoch: int) -> list[Row | None]:
        if epoch not in known:
            known[epoch] = [None] * positions
            with make("pad", positions) as whole:
                for row in rows(whole.at(0, epoch)):
                    known[epoch][row[0]] = row
        return known[epoch]

    @settings(max_examples=6, deadline=None)
    @given(
        st.lists(things, min_size=2, max_size=6),
        st.integers(1, positions),
        st.integers(1, 4),
        st.sampled_from(["pad", "drop", "ragged"]),
    )
    def lives(history: list[tuple[Any, ...]], batch: int, world: int, tail: str) -> None:
        # a loader is not made where no batch is whole
        most = positions if tail == "drop" else 40
        job = Job(partial(make, tail), Model(content, positions, tail, batch), min(world, batch))
        with job.held:
            for what, *how in history:
                if what == "resume":
                    size = min(how[0], most)
                    how = [size, min(how[1], size)]
                getattr(job, what)(*how)
                job.check()
            job.take(2)

    lives()
