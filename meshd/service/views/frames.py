"""Frames as bodies: what an assembler made, sent from its shared memory.

Law: the frame is asked for when the first bytes are, so that what is only looked at is not built; it is given
back when the last byte has gone, or nobody wants it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.assembly.errors import BatchError
from meshd.service.views.failing import pinned_refusal
from meshd.store.records import Span
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from meshd.assembly.addressing import Asked, Frame, FrameSource

_GROUP = 4 << 20  # at most so much of a copy is in this process' memory


async def frame_of(frames: FrameSource, address: Asked) -> Frame:
    """Raises S3Error."""
    try:
        return await frames.frame(address)
    except BatchError as error:
        raise pinned_refusal(error) from error


async def frame_groups(
    frames: FrameSource, address: Asked, size: int, offset: int, length: int
) -> AsyncGenerator[Sequence[Span], None]:
    """`length` bytes from `offset` of a frame that has `size`. Raises S3Error."""
    frame = await frame_of(frames, address)
    try:
        if frame.size != size:
            raise S3Error("InternalError", f"a frame has {frame.size} bytes, not the {size} it was said to.")
        for at in range(offset, offset + length, _GROUP):
            yield (Span(frame.fd, at, min(_GROUP, offset + length - at)),)
    finally:
        frame.close()
