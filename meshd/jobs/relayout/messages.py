"""Messages of a relayout: what a job asks each node to do, and how far the node is."""

from __future__ import annotations

import operator
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import astuple

from meshd.core.api_errors import Code  # noqa: TC001  msgspec reads the annotations
from meshd.rpc.peer_rpc import PREFIX, PeerCall
from meshd.rpc.process_rpc import Method

Text = Annotated[str, Meta(max_length=4096)]
MAX_FAILURES: Final = 100


class LayoutCost(msgspec.Struct, frozen=True, omit_defaults=True):
    """The cost of reading `objects` once from rotational disks, in the order of their keys: the `bytes` read,
    including gaps; the `seeks`; the disks' seconds; and the seconds that the objects' bytes alone would
    take."""

    objects: int = 0
    bytes: float = 0.0
    seeks: float = 0.0
    disk_seconds: float = 0.0
    media_seconds: float = 0.0

    def __add__(self, other: LayoutCost) -> LayoutCost:
        return LayoutCost(*map(operator.add, astuple(self), astuple(other)))


class RelayoutRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Put the objects below a prefix into the order of their keys.

    `session`: names the job's run; `account`: who asks. `measure`: say what it would cost and gain, and
    change nothing. `rate`: bytes a second, 0 for no limit. `stop`: end the task.
    """

    session: Annotated[str, Meta(max_length=64)]
    account: Annotated[str, Meta(max_length=256)]
    bucket: Text
    prefix: Text = ""
    measure: bool = False
    rate: Annotated[int, Meta(ge=0)] = 0
    stop: bool = False


class RelayoutStatus(msgspec.Struct, omit_defaults=True):
    """The totals of a task. `measured`: the following are known: `objects` of `size` bytes on rotational
    disks, their cost `before`, the cost `expected` afterwards, and `to_move` of them, of `to_move_bytes`.
    `moved`, `moved_bytes`: so far; `after`: their cost, measured at the end. `left_out`: objects that cannot
    be moved, by reason. `refused`: why the node does nothing, or would fail. `code`, `error`: why the task
    failed. `failures`: damaged objects.
    """

    done: bool = False
    refused: str = ""
    code: Code | Literal[""] = ""
    error: str = ""
    measured: bool = False
    objects: int = 0
    size: int = 0
    before: LayoutCost = LayoutCost()
    expected: LayoutCost = LayoutCost()
    after: LayoutCost | None = None
    to_move: int = 0
    to_move_bytes: int = 0
    moved: int = 0
    moved_bytes: int = 0
    left_out: dict[str, int] = {}
    damaged: int = 0
    failures: list[tuple[str, str]] = []


RELAYOUT: Final = PeerCall(
    f"{PREFIX}jobs/relayout", request=RelayoutRequest, response=RelayoutStatus, map_wait=1.0, errors="batch"
)
RELAYOUT_HERE: Method[RelayoutRequest, RelayoutStatus] = Method("relayout", RelayoutRequest, RelayoutStatus)
"""The same call, from a worker to its coordinator."""
