"""What a preflight tells about rotational disks, and that nodes which cannot tell are no error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from meshsdk.client.read_costs import DiskCost, OrderCost, fetch_disk_cost
from meshsdk.errors import AccessError, BusyError, DeadlineError, server_error

if TYPE_CHECKING:
    from meshsdk.client.request import Request
    from meshsdk.client.transport import Transport


def order(shuffle: str, seeks: int, seconds: float, runs: float = 1.0, distance: float = 1.0) -> OrderCost:
    return OrderCost(
        shuffle, 6000, 400_000_000, 420_000_000, seeks, seconds, 2.0, 6000, 74.0, 64 << 20, distance, runs,
        None, False,
    )  # fmt: skip


class Node:
    """Answers with what it is given, or raises it."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.asked = answer, b""

    def json(self, request: Request, deadline: float | None = None) -> Any:
        assert (request.method, request.path) == ("POST", "/-/snapshots/abc/read-cost")
        self.asked = bytes(request.body)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def fetched(answer: Any) -> DiskCost | None:
    return fetch_disk_cost(cast("Transport", Node(answer)), "abc", 64)


def test_a_full_shuffle_that_costs_much_is_told_with_what_blocks_cost() -> None:
    cost = DiskCost(
        "n1", (order("True", 6000, 40.0), order("Blocks(shards=8)", 24, 2.2, 1.14), order("False", 9, 2.1))
    )
    assert cost.advice == (
        "a full shuffle takes 6,000 seeks, 40 s of disk for 2 s of bytes; "
        "Blocks(shards=8) takes 24 seeks, 2.2 s"
    )
    lines = str(cost).splitlines()
    assert lines[0] == "rotational disks of n1: 6000 samples, estimated from all of the epoch"
    assert lines[1].split() == ["shuffle", "seeks/sample", "disk", "s/media", "s", "distance", "runs"]
    assert lines[2].split() == ["True", "1", "20", "1", "1"]
    assert lines[3].split() == ["Blocks(shards=8)", "0.004", "1.1", "1", "1.14"]
    assert lines[-1] == f"  {cost.advice}"


def test_a_full_shuffle_that_costs_little_is_fine() -> None:
    cost = DiskCost(
        "n1", (order("True", 60, 2.5), order("Blocks(shards=8)", 24, 2.2), order("False", 9, 2.1))
    )
    assert cost.advice.endswith("2.5 s of disk for 2 s of bytes: shuffle=True is fine here")


def test_what_a_node_answers() -> None:
    told = {
        "samples": 10, "bytes": 100, "read_bytes": 120, "reads": 4, "seeks": 3, "seeks_per_sample": 0.3,
        "disk_seconds": 0.5, "media_seconds": 0.25, "windows": 1, "window_bytes": 100, "estimated": True,
        "without_read_ahead": {"seeks": 10, "disk_seconds": 1.5},
        "randomness": {"distance": 0.9, "shard_runs": 2.0, "label_runs": 3.0},
    }  # fmt: skip
    shuffles: list[dict[str, Any]] = [{"kind": "global"}, {"kind": "blocks", "shards": 4}, {"kind": "none"}]
    answer = {"rotational": True, "node": "n2", "orders": [{"shuffle": each, **told} for each in shuffles]}
    found = fetched(answer)
    assert found is not None
    assert [each.shuffle for each in found.orders] == ["True", "Blocks(shards=4)", "False"]
    first = found.orders[0]
    assert (first.seeks_per_sample, first.disk_per_media, first.label_runs) == (0.3, 2.0, 3.0)
    assert (first.seeks_without, first.disk_seconds_without) == (10, 1.5)
    assert "estimated from a part of the epoch" in str(found)
    assert str(found).splitlines()[2].split()[-1] == "3"  # runs of labels, where there are labels


@pytest.mark.parametrize(
    "answer",
    [
        {"rotational": False, "node": "n1", "orders": []},
        server_error(405, "MethodNotAllowed", "There is nothing at /-/snapshots/abc/read-cost."),
        server_error(404, "NoSuchKey", "there is nothing at /-/snapshots/abc/read-cost"),
        BusyError("busy", status=503, code="Busy"),
        DeadlineError("no answer"),
    ],
)
def test_nodes_that_cannot_tell_are_no_error(answer: Any) -> None:
    assert fetched(answer) is None


def test_other_errors_are_raised() -> None:
    with pytest.raises(AccessError):
        fetched(server_error(403, "AccessDenied", "no"))
