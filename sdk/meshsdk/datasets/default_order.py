"""The order of a loader that names none, as the nodes have chosen it for a snapshot.

Law: the nodes choose once for a snapshot, by the disks that its samples are on, so that all ranks agree.
Nodes of an earlier release choose none; the order is then a full shuffle, as theirs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshsdk.client.native_api import read_answer
from meshsdk.client.read_costs import UNKNOWN_CALL
from meshsdk.client.request import Request, json_request
from meshsdk.datasets.shuffle import Blocks
from meshsdk.errors import NotFoundError, ServerError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshsdk.client.transport import Transport
    from meshsdk.datasets.sample_sequence import SampleSequence
    from meshsdk.datasets.shuffle import Shuffle

_log = logging.getLogger("meshsdk")
_logged: set[str] = set()


@dataclass(frozen=True, slots=True)
class Order:
    """The order of a loader; `print(order)` shows it in one line.

    Attributes:
        shuffle: as the argument of a Loader.
        reason: why the nodes have chosen it; "" if the caller has.
        distance: mean distance of samples from their stored place, relative to a full shuffle.
        runs: mean length of runs of one class, or of one shard if no field is a class label, relative to a
            full shuffle.
    """

    shuffle: Shuffle
    reason: str = ""
    distance: float = 1.0
    runs: float = 1.0

    def __str__(self) -> str:
        if not self.reason:
            return f"shuffle={self.shuffle!r}"
        near = (
            f" (samples move {self.distance:.2f} times as far as in a full shuffle, runs are {self.runs:.2f} "
            "times as long)"
        )
        suffix = near if isinstance(self.shuffle, Blocks) else ""
        return f"shuffle={self.shuffle!r}{suffix}: {self.reason}"


def find_order(
    dataset: SampleSequence, shuffle: Shuffle | None, batch: int | None = None, deadline: float | None = None
) -> Order:
    """Return the order of a loader. With None the nodes choose it; the first call for a snapshot decides.

    A choice of blocks is logged once for each snapshot. `batch`: rows of a step; `deadline`: seconds for
    which an unavailable server is retried.
    """
    if shuffle is not None:
        return Order(shuffle)
    if dataset.packing is not None or dataset.mixing is not None:
        return Order(True, "packed and mixed rows have no other by default")
    transport, snapshot = dataset.client.transport, dataset.snapshot.hash
    order = _fetch(transport, snapshot, {} if batch is None else {"batch": batch}, deadline)
    if isinstance(order.shuffle, Blocks) and snapshot not in _logged:
        _logged.add(snapshot)
        _log.warning("%s: %s. Pass shuffle= to choose another order", dataset.snapshot.source, order)
    return order


def shuffle_of_plan(transport: Transport, plan: str) -> Shuffle:
    """Return the order of a registered plan; True if no node knows the plan any more."""
    try:
        return read_answer(
            lambda: _shuffle(transport.json(Request("GET", f"/-/plans/{plan}"))["spec"]), "plan"
        )
    except NotFoundError:
        return True


def _fetch(transport: Transport, snapshot: str, document: dict[str, int], deadline: float | None) -> Order:
    try:
        answer = transport.json(json_request("POST", f"/-/snapshots/{snapshot}/order", document), deadline)
    except ServerError as error:
        if error.code not in UNKNOWN_CALL:
            raise
        return Order(True, "the nodes run a release that chooses no order")
    return read_answer(lambda: _order(answer), "order")


def _order(answer: Mapping[str, Any]) -> Order:
    return Order(_shuffle(answer), str(answer["reason"]), float(answer["distance"]), float(answer["runs"]))


def _shuffle(document: Mapping[str, Any]) -> Shuffle:
    """Return the `shuffle` argument for the `shuffle` of a document. Raises KeyError."""
    shuffle = document["shuffle"]
    if shuffle["kind"] == "blocks":
        return Blocks(int(shuffle["shards"]))
    return {"global": True, "none": False}[shuffle["kind"]]
