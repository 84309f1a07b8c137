"""What orders of a snapshot cost the rotational disks of a node, as the node estimates it.

Law: an estimate is optional: a node without rotational disks, or of a release before it, gives none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshsdk.client.native_api import read_answer
from meshsdk.client.request import json_request
from meshsdk.errors import BusyError, DeadlineError, ServerError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshsdk.client.transport import Transport

_PATIENCE = 30.0  # deadline in seconds
UNKNOWN_CALL = ("MethodNotAllowed", "NoSuchKey")
"""Codes with which nodes of an earlier release answer a call that they do not know."""


@dataclass(frozen=True, slots=True)
class OrderCost:
    """What an epoch in one order costs the rotational disks of a node, if nothing is in its memory yet.

    Attributes:
        shuffle: the `shuffle` argument of a Loader: "True", "Blocks(shards=8)" or "False".
        samples: samples whose bytes are on these disks.
        bytes: their size.
        read_bytes: bytes read for them, which include gaps that are read through.
        seeks: reads that do not continue the one before.
        disk_seconds: disk time of the reads and seeks, added up over the disks.
        media_seconds: disk time of `bytes` in sequence, at 200 MB/s.
        seeks_without, disk_seconds_without: the same without read-ahead, at one seek per sample.
        window_bytes: size of the largest window that is read at once.
        distance: mean distance of samples from their stored place, relative to a full shuffle.
        shard_runs, label_runs: mean length of runs of one shard, or one class, relative to a full shuffle.
            `label_runs` is None if no field is a class label.
        estimated: whether the figures are extrapolated from a part of the epoch.
    """

    shuffle: str
    samples: int
    bytes: int
    read_bytes: int
    seeks: int
    disk_seconds: float
    media_seconds: float
    seeks_without: int
    disk_seconds_without: float
    window_bytes: int
    distance: float
    shard_runs: float
    label_runs: float | None
    estimated: bool

    @property
    def seeks_per_sample(self) -> float:
        """Seeks per sample: 1 without read-ahead."""
        return self.seeks / max(self.samples, 1)

    @property
    def disk_per_media(self) -> float:
        """Seconds of disk per second of media: 1 if the disk only reads in sequence."""
        return self.disk_seconds / self.media_seconds if self.media_seconds else 1.0


@dataclass(frozen=True, slots=True)
class DiskCost:
    """What orders cost the rotational disks of one node; `print(cost)` shows a table and a recommendation.

    Attributes:
        node: the id of the node. Other nodes of a cluster have disks of their own.
        orders: a full shuffle, Blocks with as many shards as fit the node's memory, and stored order.
    """

    node: str
    orders: tuple[OrderCost, ...]

    @property
    def advice(self) -> str:
        """One sentence: what a full shuffle costs, and what Blocks would."""
        full, blocks = self.orders[0], self.orders[1]
        message = (
            f"a full shuffle takes {_seeks(full)}, {_seconds(full.disk_seconds)} of disk for "
            f"{_seconds(full.media_seconds)} of bytes"
        )
        if full.disk_seconds <= 1.3 * max(blocks.disk_seconds, blocks.media_seconds):
            return f"{message}: shuffle=True is fine here"
        return f"{message}; {blocks.shuffle} takes {_seeks(blocks)}, {_seconds(blocks.disk_seconds)}"

    def __str__(self) -> str:
        first = self.orders[0]
        about = f", estimated from {'a part' if first.estimated else 'all'} of the epoch"
        rows: list[tuple[str, ...]] = [("shuffle", "seeks/sample", "disk s/media s", "distance", "runs")]
        for order in self.orders:
            runs = order.shard_runs if order.label_runs is None else order.label_runs
            figures = order.seeks_per_sample, order.disk_per_media, order.distance, runs
            rows.append((order.shuffle, *(f"{each:.3g}" for each in figures)))
        width = max(len(row[0]) for row in rows)
        return "\n".join(
            [
                f"rotational disks of {self.node}: {first.samples} samples{about}",
                *(
                    f"  {row[0]:<{width}}  {row[1]:>12}  {row[2]:>14}  {row[3]:>8}  {row[4]:>5}"
                    for row in rows
                ),
                "  (distance moved, and length of runs of one class or shard: of a full shuffle, 1)",
                f"  {self.advice}",
            ]
        )


def _seeks(order: OrderCost) -> str:
    return f"{order.seeks:,} seek{'' if order.seeks == 1 else 's'}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def fetch_disk_cost(transport: Transport, snapshot: str, batch: int | None = None) -> DiskCost | None:
    """Ask a node what a full shuffle, blocks and stored order of a snapshot cost its rotational disks.

    None if the node has none of the samples on rotational disks, is too busy to say, or is of a release
    that cannot.
    """
    shuffles: list[dict[str, Any]] = [{"kind": "global"}, {"kind": "blocks"}, {"kind": "none"}]
    document: dict[str, Any] = {"shuffles": shuffles}
    if batch is not None:
        document["batch"] = batch
    request = json_request("POST", f"/-/snapshots/{snapshot}/read-cost", document)
    try:
        answer = transport.json(request, _PATIENCE)
    except (BusyError, DeadlineError):
        return None
    except ServerError as error:
        if error.code in UNKNOWN_CALL:
            return None
        raise
    return read_answer(lambda: _disk_cost(answer), "read cost")


def _disk_cost(answer: Mapping[str, Any]) -> DiskCost | None:
    if not answer["rotational"]:
        return None
    samples: Sequence[Mapping[str, Any]] = answer["orders"]
    return DiskCost(str(answer["node"]), tuple(map(_order_cost, samples)))


def _order_cost(order: Mapping[str, Any]) -> OrderCost:
    shuffle, plain, random = order["shuffle"], order["without_read_ahead"], order["randomness"]
    names = {"global": "True", "none": "False", "blocks": f"Blocks(shards={shuffle.get('shards')})"}
    runs = random.get("label_runs")
    return OrderCost(
        names[shuffle["kind"]],
        int(order["samples"]),
        int(order["bytes"]),
        int(order["read_bytes"]),
        int(order["seeks"]),
        float(order["disk_seconds"]),
        float(order["media_seconds"]),
        int(plain["seeks"]),
        float(plain["disk_seconds"]),
        int(order["window_bytes"]),
        float(random["distance"]),
        float(random["shard_runs"]),
        None if runs is None else float(runs),
        bool(order["estimated"]),
    )
