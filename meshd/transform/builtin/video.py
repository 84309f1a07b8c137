"""The op `decode_video`: clips of a video file, chosen by frame number or by time.

Law: a clip is a choice of frames; which ones follows from the times of all frames of the file, the arguments
and the draws. Every frame that is chosen is decoded once, however many clips have it.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from meshd.transform.builtin.text import check_bytes
from meshd.transform.builtin.video_files import (
    CODECS,
    FORMATS,
    MAX_PACKETS,
    MAX_PIXELS,
    VideoReader,
    load_library,
)
from meshd.transform.errors import BadSampleError
from meshd.transform.parameters import Parameter, choice, whole
from meshd.transform.registry import operation
from meshd.transform.video_frames import changed_frames, fuse_frames, stack_frames, video
from meshwire.strict_json import checked_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from meshd.transform.op_types import FieldType
    from meshd.transform.registry import Operation
    from meshd.transform.video_frames import FrameOp
    from meshwire.plan.keyed_random import KeyedRandom

Place = Literal["random", "center", "first", "even"]
Short = Literal["bad", "last", "loop"]


def _rate(value: Any, path: str) -> float | None:
    """Frames a second, 0.001…1000, or null."""
    return None if value is None else checked_number(value, path, 0.001, 1000.0)


def _seconds(value: Any, path: str) -> float | None:
    """Seconds from the first frame, or null."""
    return None if value is None else checked_number(value, path, 0.0, 1e6)


@operation(
    "decode_video",
    Parameter("frames", whole(1, 4096)),
    Parameter("step", whole(1, 100_000), 1),
    Parameter("fps", _rate, None),
    Parameter("clips", whole(1, 64), 1),
    Parameter("at", choice("random", "center", "first", "even"), "random"),
    Parameter("start", _seconds, None),
    Parameter("short", choice("bad", "last", "loop"), "bad"),
    random=True,
    takes=f"bytes of {FORMATS}: {', '.join(CODECS)}",
    gives="a video: uint8 [frames, h, w, 3]; [clips, frames, h, w, 3] with several clips",
    refuses="not such a file, truncated, or damaged where it is decoded; frames of different sizes; shorter "
    f'than a clip, with `short` "bad"; over {MAX_PACKETS >> 20} Mi frames, or {MAX_PIXELS >> 20} Mi pixels '
    "in one",
)
@dataclass(frozen=True, slots=True)
class DecodeVideo:
    """Clips of `frames` frames of a video file, decoded to RGB: every `step`-th frame or, with `fps`, those
    shown at so many moments a second. A clip begins at a random place, in the middle, at the beginning, or
    `start` seconds after it; several clips at random places, or evenly spaced ("even"). In a file that is
    too short, the `last` frame is repeated, or it begins again ("loop"). Ops on images apply to all
    frames alike."""

    frames: int
    step: int
    fps: float | None
    clips: int
    at: Place
    start: float | None
    short: Short

    def __post_init__(self) -> None:
        load_library()

    def infer(self, field: FieldType) -> FieldType:
        check_bytes(field)
        if self.fps is not None and self.step != 1:
            raise ValueError("takes step or fps, not both")
        if self.start is not None and self.clips > 1:
            raise ValueError('start is the place of one clip; for several, at is "random" or "even"')
        return video((self.clips, self.frames) if self.clips > 1 else (self.frames,), (None, None, 3))

    def apply(self, value: bytes, random: KeyedRandom) -> npt.NDArray[np.uint8]:
        return self.decode(value, random, ())

    def decode(self, value: bytes, random: KeyedRandom, following: Sequence[FrameOp]) -> npt.NDArray[Any]:
        """Return the clips, with the ops that follow applied to every frame. Raises BadSampleError."""
        with VideoReader(value) as reader:
            chosen = self.choose(reader.times, reader.ticks, random)
            wanted = sorted(set(chosen))
            place = {number: index for index, number in enumerate(wanted)}
            decoded = (pixels for _, pixels in reader.frames(wanted))
            kept = stack_frames(changed_frames(decoded, following, random), len(wanted))
        if chosen != wanted:
            kept = kept[[place[number] for number in chosen]]
        return kept.reshape(self.clips, self.frames, *kept.shape[1:]) if self.clips > 1 else kept

    def fuse(self, following: Operation) -> Operation | None:
        return fuse_frames(self, following)

    def choose(self, times: Sequence[int], ticks: Fraction, random: KeyedRandom) -> list[int]:
        """Return the numbers of all frames of all clips, clip after clip.

        `times`: of the file's frames, ascending; `ticks`: of a second. Raises BadSampleError.
        """
        if self.fps is None:
            offsets = [number * self.step for number in range(self.frames)]
            length, origin = len(times), 0
        else:
            interval = ticks / Fraction(self.fps).limit_denominator(1001)
            offsets = [int(number * interval) for number in range(self.frames)]
            origin = times[0]
            length = times[-1] - origin + max(1, (times[-1] - origin) // max(1, len(times) - 1))
        chosen = []
        for start in self._starts(length, offsets[-1] + 1, times, ticks, random):
            for offset in offsets:
                at = start + offset
                if at >= length:
                    at = at % length if self.short == "loop" else length - 1
                chosen.append(at if self.fps is None else bisect.bisect_right(times, origin + at) - 1)
        return chosen

    def _starts(
        self, length: int, extent: int, times: Sequence[int], ticks: Fraction, random: KeyedRandom
    ) -> list[int]:
        """Return where each clip of `extent` begins in `length`, in frames or ticks."""
        first = 0
        if self.start is not None:
            first = int(Fraction(self.start).limit_denominator(10**6) * ticks)
            if self.fps is None:
                first = bisect.bisect_left(times, times[0] + first)
        if first >= length or (self.short == "bad" and first + extent > length):
            what = f"{len(times)} frames" if self.fps is None else f"{float(length / ticks):.2f} s"
            raise BadSampleError(f"it has {what}, too few for a clip")
        room = max(0, length - extent)
        if self.start is not None or self.at == "first":
            return [first] * self.clips
        if self.at == "random":
            return [random.integer(room + 1) for _ in range(self.clips)]
        if self.at == "center" or self.clips == 1:
            return [room // 2] * self.clips
        return [room * number // (self.clips - 1) for number in range(self.clips)]
