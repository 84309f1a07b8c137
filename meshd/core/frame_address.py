"""Frame addresses, and the handle of a finished frame.

Invariant: equal addresses name equal bytes, on every node and at any time.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from meshwire.http_values.mesh_headers import FrameTiming

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

FrameResult = Literal["hit", "joined", "miss"]
READY = FrameTiming()


class FrameAddress(msgspec.Struct, frozen=True, tag="frame"):
    """The rows of `rank` out of `world` in step `step` of `batch` rows, counted from position `origin`."""

    plan: str
    epoch: int
    step: int
    rank: int = 0
    world: int = 1
    batch: int = 256
    origin: int = 0

    @property
    def first_position(self) -> int:
        """The epoch position at which the batch of all ranks begins."""
        return self.origin + self.step * self.batch


class PartAddress(msgspec.Struct, frozen=True, tag="part"):
    """The rows of a frame whose bytes the receiving node holds under map `version`; the parts of all nodes
    make up the frame. Equal addresses name equal bytes on one node."""

    whole: FrameAddress
    version: int

    @property
    def plan(self) -> str:
        """The plan of the frame."""
        return self.whole.plan


class RowsAddress(msgspec.Struct, frozen=True, tag="rows"):
    """These samples (numbers in stored order), in this order; each sample's number is its position for random
    ops."""

    plan: str
    epoch: int
    samples: tuple[int, ...]


class DerivedAddress(msgspec.Struct, frozen=True, tag="derived"):
    """The result of a program on one object, which must still have this ETag, or on `length` bytes of it at
    `offset`. `program` is the text that a transform process compiles, `digest` its name; `position` keys its
    randomness; `assets` are those its ops are built with."""

    digest: str
    program: str
    bucket: str
    key: str
    etag: str
    position: int = 0
    assets: tuple[str, ...] = ()
    offset: int = 0
    length: int | None = None


class BlockAddress(msgspec.Struct, frozen=True, tag="block"):
    """All samples of a snapshot in stored order, under an unregistered plan: plan and snapshot are included
    as documents. `digest` names the operation, `block` its input; `first` is the position of the first
    sample."""

    digest: str
    block: str
    plan: bytes
    snapshot: bytes
    first: int = 0


Address = FrameAddress | RowsAddress
AnyFrameAddress = Address | PartAddress | DerivedAddress | BlockAddress


class FrameBlock(msgspec.Struct, frozen=True):
    """Memory that several frames are in: a number, unique in the process that made them, and its bytes."""

    number: int
    size: int


@dataclass(slots=True)
class Frame:
    """A finished frame: `size` bytes in the memfd `fd`, which the receiver closes. Never written again.

    `owner` keeps the memory accounted for while it lives; `done` is called once when the receiver has
    finished with it. `took`: how long it took to make, if the receiver waited for that. `block`: the memory
    that it shares with other frames, if it does; it then begins at `offset`, a multiple of a page.
    """

    fd: int
    size: int
    rows: int
    result: FrameResult
    owner: object = None
    done: Callable[[], None] | None = None
    took: FrameTiming = READY
    offset: int = 0
    block: FrameBlock | None = None

    def close(self) -> None:
        """Closes the descriptor. Idempotent."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd, self.owner = -1, None
        if self.done is not None:
            self.done()


def common_block(frames: Sequence[Frame]) -> FrameBlock | None:
    """Returns the memory that all of these frames of one reply are in; None if there is no such block."""
    block = frames[0].block
    return block if all(frame.block == block for frame in frames) else None


class FrameSource(Protocol):
    """Returns frames: the assembler itself, or its client in another process."""

    async def get_frame(self, address: AnyFrameAddress, kept_bytes: int | None = None) -> Frame:
        """Returns a frame, or the bytes of a derived object. Raises BatchError. A cancelled call stops the
        work unless another caller waits for it. `kept_bytes`: how much may be kept of the plan's decoded
        samples, if the caller bounds it; this never changes the frame."""
        ...

    async def get_frames(self, first: FrameAddress, count: int, kept_bytes: int | None = None) -> list[Frame]:
        """Returns the frames of `count` consecutive steps, or those before the first step that fails, but at
        least one. Raises BatchError if the first step fails."""
        ...


def consecutive_steps(first: FrameAddress, count: int) -> list[FrameAddress]:
    """Returns the addresses of the same rows in `count` consecutive steps."""
    replace = msgspec.structs.replace
    return [first, *(replace(first, step=step) for step in range(first.step + 1, first.step + count))]


async def leading_frames(frames: Iterable[Coroutine[Any, Any, Frame]]) -> list[Frame]:
    """Returns the frames before the first one that fails; all are made concurrently. Raises its error if that
    is the first of all."""
    tasks = [asyncio.ensure_future(frame) for frame in frames]
    kept = 0
    try:
        await asyncio.wait(tasks)
        while kept < len(tasks) and tasks[kept].exception() is None:
            kept += 1
        return [task.result() for task in tasks[:kept]] if kept else [tasks[0].result()]
    except asyncio.CancelledError:
        kept = 0
        raise
    finally:
        for task in tasks[kept:]:
            task.add_done_callback(_close_result)
            task.cancel()


def _close_result(task: asyncio.Future[Frame]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()
