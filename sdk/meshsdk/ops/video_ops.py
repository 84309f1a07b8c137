"""Constructors of the ops on videos. The ops on images apply to all frames of a video alike.

Law: that of `meshsdk.ops`, through which users call them.
"""

from __future__ import annotations

from typing import Any, Literal

from meshsdk.errors import ConfigurationError
from meshsdk.ops import arguments as _values
from meshwire.plan.plan_spec import OpSpec


def decode_video(
    field: str,
    frames: int,
    *,
    step: int = 1,
    fps: float | None = None,
    clips: int = 1,
    at: Literal["random", "center", "first", "even"] = "random",
    start: float | None = None,
    short: Literal["bad", "last", "loop"] = "bad",
) -> OpSpec:
    """Decode clips of a video file: MP4, MOV, MKV, WebM or AVI → uint8 [frames, height, width, 3].

    The nodes need `shardmesh[video]`. Decoding begins at key frames. With `clips` above 1, the result is
    [clips, frames, height, width, 3], and frames that several clips have are decoded once.

    Arguments:
        frames: of a clip.
        step: every how many frames one is taken.
        fps: instead of `step`, the moments a second at which the frame on display is taken.
        clips: how many.
        at: where clips begin: "random" (each on its own), "center", "first" (the beginning), or "even"
            (spaced over the file).
        start: seconds from the beginning, instead of `at`.
        short: what becomes of a file that is too short: a "bad" sample, its "last" frame repeated, or a
            "loop".
    """
    if fps is not None and step != 1:
        raise ConfigurationError("decode_video: pass step or fps, not both")
    if start is not None and clips > 1:
        raise ConfigurationError("decode_video: start is the place of one clip; for several, use at")
    given = {"frames": frames, "step": step, "fps": fps, "clips": clips, "at": at, "start": start}
    args: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return OpSpec("decode_video", _values.field("decode_video", field), args | {"short": short})
