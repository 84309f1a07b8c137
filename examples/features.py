"""Rows of a feature table by number, as graph and recommender models want them: gathered into pinned memory.

    python -m examples.features s3://toys/graph

A node is classified by its own features and the mean of its neighbours'. The table is one object of float32
rows, each a multiple of 128 bytes, which is how a GPU reads; `neighbours.npy` and `labels.npy` lie beside.
Law: a batch is one gather of the rows it needs, each once, in the table's order; the next comes meanwhile.
"""

from __future__ import annotations

import hashlib
import io
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

import meshsdk as mesh
from examples.arguments import command_line, positive, run
from examples.checkpoints import split_url

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

LINE = 128


@dataclass(frozen=True, slots=True)
class Rows:
    """Features of the distinct nodes of a batch; `at` says which of them each (node, neighbour) is."""

    nodes: torch.Tensor
    features: torch.Tensor
    at: torch.Tensor


class Table:
    """Rows of `width` float32 numbers in one object, gathered into one of two buffers by turns."""

    def __init__(self, client: mesh.Client, url: str, width: int, most: int) -> None:
        if width * 4 % LINE:
            raise ValueError(
                f"a row of {width} float32 numbers is not a multiple of {LINE} bytes: pad the table"
            )
        self.client, self.width = client, width
        self.bucket, self.key = split_url(url)
        pinned = torch.cuda.is_available()
        self.buffers = [torch.empty((most, width), pin_memory=pinned) for _ in range(2)]
        self.turn = 0

    def read(self, rows: np.ndarray[Any, Any]) -> torch.Tensor:
        """The features of these rows; overwritten by the next but one call."""
        self.turn = 1 - self.turn
        found = self.buffers[self.turn][: len(rows)]
        size = 4 * self.width
        items = (mesh.Item(self.bucket, self.key, offset=int(row) * size, length=size) for row in rows)
        for into, answer in zip(found.numpy(), self.client.gather(items), strict=True):
            into[:] = np.frombuffer(answer.data, np.float32)
        return found


class Classifier(nn.Module):
    """One layer of GraphSAGE with means, and a linear one; widths in multiples of 8."""

    def __init__(self, width: int, classes: int, hidden: int = 32) -> None:
        super().__init__()
        self.own, self.around = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.classes = nn.Linear(hidden, classes)

    def forward(self, features: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        own, around = features[at[:, 0]], features[at[:, 1:]].mean(1)
        answer: torch.Tensor = self.classes(torch.relu(self.own(own) + self.around(around)))
        return answer


class Batches:
    """An epoch's nodes in an order by (seed, epoch), `size` at once, with their rows; reads one ahead."""

    def __init__(self, table: Table, neighbours: np.ndarray[Any, Any], size: int) -> None:
        self.table, self.neighbours, self.size, self.waited = table, neighbours, size, 0.0

    def epoch(self, number: int) -> Iterator[Rows]:
        order = np.random.default_rng((7, number)).permutation(len(self.neighbours))
        steps = [order[start : start + self.size] for start in range(0, len(order), self.size)]
        with ThreadPoolExecutor(1) as reader:
            coming = reader.submit(self.read, steps[0])
            for nodes in [*steps[1:], None]:
                asked = time.perf_counter()
                rows = coming.result()
                self.waited += time.perf_counter() - asked
                if nodes is not None:
                    coming = reader.submit(self.read, nodes)
                yield rows

    def read(self, nodes: np.ndarray[Any, Any]) -> Rows:
        wanted = np.concatenate([nodes[:, None], self.neighbours[nodes]], 1)
        distinct, at = np.unique(wanted, return_inverse=True)
        features = self.table.read(distinct)
        return Rows(torch.from_numpy(nodes), features, torch.from_numpy(at.reshape(wanted.shape)))


def load(client: mesh.Client, url: str) -> np.ndarray[Any, Any]:
    """A `.npy` object."""
    return np.load(io.BytesIO(client.get(*split_url(url))))  # type: ignore[no-any-return]


def width_of(client: mesh.Client, url: str, nodes: int) -> int:
    """Numbers of a row, as the table is long and has one for each node."""
    size = client.head(*split_url(url)).size
    if size % (4 * nodes):
        raise ValueError(
            f"{url} has {size} bytes: no whole number of float32 numbers for each of {nodes} nodes"
        )
    return size // (4 * nodes)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line("examples.features", __doc__)
    parser.add_argument("source", help="where features.bin, neighbours.npy and labels.npy lie, as s3://graph")
    parser.add_argument("--batch", type=positive, default=64, help="nodes of a step")
    parser.add_argument("--epochs", type=positive, default=3, help="passes over the nodes")
    parser.add_argument("--rate", type=float, default=1e-2, help="learning rate")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """The share of right answers of each epoch, as it went."""
    options = parse(arguments)
    torch.manual_seed(7)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    client = mesh.connect()
    neighbours, labels = (load(client, f"{options.source}/{name}.npy") for name in ("neighbours", "labels"))
    most = options.batch * (1 + neighbours.shape[1])
    width = width_of(client, f"{options.source}/features.bin", len(labels))
    table = Table(client, f"{options.source}/features.bin", width, most)
    batches = Batches(table, neighbours, options.batch)
    model = Classifier(width, int(labels.max()) + 1).to(device)
    optimizer = torch.optim.Adam(model.parameters(), options.rate)
    targets, digest, began, right = (
        torch.from_numpy(labels),
        hashlib.blake2b(digest_size=8),
        time.perf_counter(),
        [],
    )
    for number in range(options.epochs):
        good = 0
        for rows in batches.epoch(number):
            answers = model(rows.features.to(device, non_blocking=True), rows.at.to(device))
            wanted = targets[rows.nodes].to(device)
            optimizer.zero_grad()
            nn.functional.cross_entropy(answers, wanted).backward()
            optimizer.step()
            good += int((answers.argmax(1) == wanted).sum())
            digest.update(rows.features.numpy().tobytes())
        right.append(good / len(labels))
    seconds = time.perf_counter() - began
    rate, stall = options.epochs * len(labels) / seconds, batches.waited / seconds
    print(
        f"samples/s={rate:.0f} stall={stall:.1%} hash={digest.hexdigest()} right={right[-1]:.0%}", flush=True
    )
    client.close()
    return right


if __name__ == "__main__":
    run(main)
