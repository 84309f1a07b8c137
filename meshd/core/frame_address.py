"""Frame addresses, and the handle of a finished frame.

Invariant: equal addresses name equal bytes, on every node and at any time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from meshwire.http_values.mesh_headers import FrameTiming

if TYPE_CHECKING:
    from collections.abc import Callable

FrameResult = Literal["hit", "joined", "miss"]
READY = FrameTiming()


class FrameAddress(msgspec.Struct, frozen=True, tag="frame"):
    """The rows of `rank` of `world` in step `step` of `batch` rows, counted from position `origin`."""

    plan: str
    epoch: int
    step: int
    rank: int = 0
    world: int = 1
    batch: int = 256
    origin: int = 0


class PartAddress(msgspec.Struct, frozen=True, tag="part"):
    """The rows of a frame whose bytes the node that is asked holds, by this `version` of the map; those of
    all nodes are the frame. Equal addresses name equal bytes on one node."""

    whole: FrameAddress
    version: int

    @property
    def plan(self) -> str:
        """What the frame is of."""
        return self.whole.plan


class RowsAddress(msgspec.Struct, frozen=True, tag="rows"):
    """These samples (stored order), in this order; randomness is keyed by the sample as if it were a
    position.
    """

    plan: str
    epoch: int
    samples: tuple[int, ...]


class DerivedAddress(msgspec.Struct, frozen=True, tag="derived"):
    """What a program makes of one object, which must still have this ETag. `program` is the text a transform
    process compiles, `digest` names it; `position` keys its randomness; `assets` are what its ops are built
    with.
    """

    digest: str
    program: str
    bucket: str
    key: str
    etag: str
    position: int = 0
    assets: tuple[str, ...] = ()


class BlockAddress(msgspec.Struct, frozen=True, tag="block"):
    """All samples of a snapshot in stored order, by a plan that nobody registered: both come along, as the
    documents a node writes. `digest` names what is done, `block` what is made of it; `first` is the position
    of the first sample.
    """

    digest: str
    block: str
    plan: bytes
    snapshot: bytes
    first: int = 0


Address = FrameAddress | RowsAddress
AnyFrameAddress = Address | PartAddress | DerivedAddress | BlockAddress


@dataclass(slots=True)
class Frame:
    """A finished frame: `size` bytes in the memfd `fd`, the receiver's to close. Never written again.

    `owner` counts the memory as long as it lives; `done` is called once, when the receiver is through with
    it. `took`: how long it was made, if that is why it was waited for.
    """

    fd: int
    size: int
    rows: int
    result: FrameResult
    owner: object = None
    done: Callable[[], None] | None = None
    took: FrameTiming = READY

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd, self.owner = -1, None
        if self.done is not None:
            self.done()


class FrameSource(Protocol):
    """Who can be asked for frames: the assembler itself, or its stand-in in another process."""

    async def get_frame(self, address: AnyFrameAddress) -> Frame:
        """The frame, or the bytes of a derived object. Raises BatchError. Cancelling stops the work if nobody
        else waits for it."""
        ...
