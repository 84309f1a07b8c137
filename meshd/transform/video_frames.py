"""Videos as images frame by frame: an op on images applies to each frame of a video, with the same draws.

Law: all frames of a sample are changed alike, as if they were one image. A video is an array of type
"video": its last three axes are height, width and channels of a frame, the axes before them frames or clips
and frames. An op whose result is not an image takes the array as it is.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from meshd.transform.errors import BadSampleError
from meshd.transform.op_types import FieldType, image

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from meshd.transform.op_types import Layout, Operation
    from meshwire.plan.keyed_random import KeyedRandom

    Frame = npt.NDArray[Any]

MAX_VIDEO_BYTES = 1 << 29
"""Of one sample's frames, as they are kept."""


def video(frames: Sequence[int | None], size: Sequence[int | None], dtype: str = "uint8") -> FieldType:
    """Return the type of videos; `frames`: [frames] or [clips, frames], `size`: [height, width, channels]."""
    return FieldType("array", dtype, (*frames, *size), "video")


def frame_type(field: FieldType) -> FieldType:
    """Return the type of a frame of a video."""
    height, width, channels = field.shape[-3:]
    assert channels is not None
    return image(height, width, channels, dtype=field.dtype)


def stack_frames(frames: Iterable[Frame], count: int) -> Frame:
    """Return `count` frames as one array. Raises BadSampleError if they are too large together."""
    made: Frame | None = None
    for number, frame in enumerate(frames):
        if made is None:
            if frame.nbytes * count > MAX_VIDEO_BYTES:
                raise BadSampleError(
                    f"{count} frames of {frame.nbytes} bytes; at most {MAX_VIDEO_BYTES} are allowed: take "
                    "fewer, or put resize right after decode_video"
                )
            made = np.empty((count, *frame.shape), frame.dtype)
        if frame.shape != made.shape[1:]:
            raise BadSampleError("its frames differ in size")
        made[number] = frame
    assert made is not None
    return made


class FrameOp(msgspec.Struct, frozen=True):
    """An op on images, applied to every frame of a video."""

    operation: Operation

    def infer(self, field: FieldType) -> FieldType:
        made = self.operation.infer(frame_type(field))
        layout: Layout = "video" if made.layout == "hwc" else ""
        return FieldType("array", made.dtype, (*field.shape[:-3], *made.shape), layout)

    def map_frame(self, random: KeyedRandom) -> Callable[[Frame], Frame]:
        """Return the op as a function of a frame, which draws the same for each."""
        return lambda frame: self.operation.apply(frame, copy.copy(random))

    def apply(self, value: Frame, random: KeyedRandom) -> Frame:
        frames = value.reshape(-1, *value.shape[-3:])
        made = stack_frames(map(self.map_frame(random), frames), len(frames))
        return made.reshape(*value.shape[:-3], *made.shape[1:])


def by_frame(operation: Operation, field: FieldType) -> Operation:
    """Return an op on videos for an op on images; the op itself if it takes a video as an array."""
    try:
        made = operation.infer(frame_type(field))
    except ValueError:
        return operation
    return FrameOp(operation) if made.kind == "image" else operation


def changed_frames(frames: Iterable[Frame], ops: Sequence[FrameOp], random: KeyedRandom) -> Iterable[Frame]:
    """Return the frames with the ops applied to each."""
    functions = [each.map_frame(random) for each in ops]
    for frame in frames:
        for function in functions:
            frame = function(frame)
        yield frame


class FramesDecoder(Protocol):
    """An op that decodes a video frame by frame."""

    def decode(self, value: bytes, random: KeyedRandom, following: Sequence[FrameOp]) -> Frame:
        """Return the video, with the ops that follow applied to every frame. Raises BadSampleError."""
        ...


@dataclass(frozen=True, slots=True)
class _ChangedVideo:
    """A decoder of videos, fused with ops on its frames that follow: each frame is changed as it is decoded,
    so that only small ones are kept."""

    decoder: FramesDecoder
    following: tuple[FrameOp, ...]

    def infer(self, field: FieldType) -> FieldType:
        raise NotImplementedError("types are inferred op by op, before fusing")

    def apply(self, value: bytes, random: KeyedRandom) -> Frame:
        return self.decoder.decode(value, random, self.following)

    def fuse(self, following: Operation) -> Operation | None:
        return (
            replace(self, following=(*self.following, following)) if isinstance(following, FrameOp) else None
        )


def fuse_frames(decoder: FramesDecoder, following: Operation) -> Operation | None:
    """Return a decoder fused with the op that follows, None if that is not on frames."""
    return _ChangedVideo(decoder, (following,)) if isinstance(following, FrameOp) else None
