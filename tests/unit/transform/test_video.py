"""Clips of videos: frames are PyAV's, each decoded once, and a bad file is a bad sample."""

from __future__ import annotations

import io
from fractions import Fraction
from functools import cache
from typing import Any

import av
import numpy as np
import pytest

from meshd.transform.builtin.video import DecodeVideo, VideoReader
from meshd.transform.errors import BadSampleError
from meshd.transform.op_chain import compile_chain
from meshwire.plan.keyed_random import KeyedRandom
from meshwire.plan.plan_spec import OpSpec
from meshwire.strict_json import PlanError

HEIGHT, WIDTH, FRAMES = 32, 48, 40
FORMS = {
    "mp4": ("mp4", "libx264"),
    "mkv": ("matroska", "libx264"),
    "webm": ("webm", "libvpx-vp9"),
    "avi": ("avi", "mpeg4"),
    "motion-jpeg": ("avi", "mjpeg"),
}


@cache
def file_of(form: str = "mp4", frames: int = FRAMES, options: tuple[tuple[str, str], ...] = ()) -> bytes:
    """A film in which every frame differs; a key frame every ten frames, B frames between."""
    kind, codec = FORMS[form]
    out = io.BytesIO()
    with av.open(out, "w", format=kind) as file:
        stream: Any = file.add_stream(codec, rate=25, options=dict(options))
        stream.width, stream.height = WIDTH, HEIGHT
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.gop_size = 10
        y, x = np.mgrid[:HEIGHT, :WIDTH]
        for number in range(frames):
            pixels = np.stack([x * 3 + number * 5, y * 4 + number * 3, np.full_like(x, number * 6)], axis=2)
            frame = av.VideoFrame.from_ndarray((pixels % 256).astype(np.uint8), format="rgb24")
            file.mux(stream.encode(frame.reformat(format=stream.pix_fmt)))
        file.mux(stream.encode())
    return out.getvalue()


@cache
def frames_of(data: bytes) -> list[Any]:
    with av.open(io.BytesIO(data)) as file:
        return [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]


def rendered(data: bytes, *steps: tuple[str, dict[str, Any]], fuse: bool = True, seed: int = 1) -> Any:
    specs = [(number, OpSpec(op, "x", args)) for number, (op, args) in enumerate(steps)]
    return compile_chain(specs, fuse=fuse).render(data, lambda index: KeyedRandom(seed, 0, 0, index))


def clip(data: bytes, **args: Any) -> Any:
    return rendered(data, ("decode_video", args))


@pytest.mark.parametrize("form", FORMS)
def test_every_frame_is_pyavs_wherever_decoding_begins(form: str) -> None:
    data = file_of(form)
    wanted = frames_of(data)
    assert len(wanted) == FRAMES
    for number in (0, 9, 10, 11, 27, 39):
        with VideoReader(data) as reader:
            ((_, pixels),) = reader.frames([number])
        np.testing.assert_array_equal(pixels, wanted[number])
    np.testing.assert_array_equal(clip(data, frames=5, step=3, at="center"), wanted[13:28:3])


def test_key_frames_with_pictures_before_them() -> None:
    """Open groups: decoding cannot show the pictures that precede a key frame if it begins there."""
    data = file_of(
        "mkv", options=(("x264-params", "open-gop=1:keyint=10:min-keyint=10:bframes=3:scenecut=0"),)
    )
    for number in range(5, FRAMES, 3):
        with VideoReader(data) as reader:
            ((_, pixels),) = reader.frames([number])
        np.testing.assert_array_equal(pixels, frames_of(data)[number])


def test_frames_are_decoded_once_and_from_key_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    sought, yielded = list[int](), list[int]()
    begin, reach = VideoReader._begin_at, VideoReader._reach

    def counted_begin(self: VideoReader, key: int) -> None:
        sought.append(key)
        begin(self, key)

    def counted_reach(self: VideoReader, time: int) -> Any:
        yielded.append(time)
        return reach(self, time)

    monkeypatch.setattr(VideoReader, "_begin_at", counted_begin)
    monkeypatch.setattr(VideoReader, "_reach", counted_reach)
    made = clip(file_of(), frames=8, clips=6, at="even")
    assert made.shape == (6, 8, HEIGHT, WIDTH, 3)
    assert len(yielded) == len(set(yielded)) <= FRAMES  # 48 frames of six clips that overlap
    sought.clear()
    clip(file_of(), frames=2, start=1.4)
    with VideoReader(file_of()) as reader:
        assert len(sought) == 1
        assert reader.times[25] < sought[0] <= reader.times[35]


def test_clips_by_time_take_the_frame_on_display() -> None:
    wanted = frames_of(file_of())
    np.testing.assert_array_equal(clip(file_of(), frames=4, fps=10, start=0.5)[:, 0, 0], [
        wanted[number][0, 0] for number in (12, 15, 17, 20)
    ])  # fmt: skip
    uneven = [0, 10, 11, 12, 50]
    by_time = DecodeVideo(3, 1, 10.0, 1, "first", None, "last")
    assert by_time.choose(uneven, Fraction(100), KeyedRandom(1, 0, 0)) == [0, 1, 3]


def test_places_of_clips() -> None:
    times = range(0, 1000, 10)
    for seed in range(20):
        chosen = DecodeVideo(4, 5, None, 3, "random", None, "bad").choose(
            times, Fraction(250), KeyedRandom(seed, 0, 0)
        )
        starts = chosen[::4]
        assert chosen == [start + 5 * number for start in starts for number in range(4)]
        assert 0 <= min(starts) <= max(starts) <= 84
    even = DecodeVideo(2, 1, None, 3, "even", None, "bad").choose(times, Fraction(250), KeyedRandom(1, 0, 0))
    assert even == [0, 1, 49, 50, 98, 99]
    short = {"frames": FRAMES + 3, "at": "first"}
    np.testing.assert_array_equal(clip(file_of(), **short, short="last")[-3:], [frames_of(file_of())[-1]] * 3)
    np.testing.assert_array_equal(clip(file_of(), **short, short="loop")[-3:], frames_of(file_of())[:3])
    with pytest.raises(BadSampleError, match="it has 40 frames, too few for a clip"):
        clip(file_of(), **short)


def test_ops_on_images_change_all_frames_alike() -> None:
    steps: list[tuple[str, dict[str, Any]]] = [
        ("decode_video", {"frames": 6, "step": 2}),
        ("resize", {"size": [24, 36]}),
        ("random_resized_crop", {"size": 16}),
        ("color_jitter", {"brightness": 0.4, "hue": 0.1}),
        ("hflip", {}),
        ("to_chw", {}),
    ]
    for seed in range(4):
        made = rendered(file_of(), *steps, seed=seed)
        assert made.shape == (6, 3, 16, 16)
        np.testing.assert_array_equal(made, rendered(file_of(), *steps, seed=seed, fuse=False))
    frame = rendered(file_of(), ("decode_video", {"frames": 1, "at": "first"}), *steps[1:], seed=3)
    chain = compile_chain([(number, OpSpec(op, "x", args)) for number, (op, args) in enumerate(steps)])
    assert chain.output.fixed == (6, 3, 16, 16)
    several = rendered(
        file_of(), ("decode_video", {"frames": 3, "clips": 2, "at": "first"}), *steps[1:], seed=3
    )
    assert several.shape == (2, 3, 3, 16, 16)
    np.testing.assert_array_equal(several[1, 0], frame[0])  # one draw for all frames of all clips


def flipped(data: bytes, start: int, count: int = 30) -> bytes:
    return data[:start] + bytes(byte ^ 0x5A for byte in data[start : start + count]) + data[start + count :]


HOSTILE = {
    "nothing": b"",
    "a playlist": b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
    "a concatenation": b"ffconcat version 1.0\nfile /etc/passwd\n",
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "only a header": b"\0\0\0\x20ftypisom" + bytes(40),
    "a shortened MP4": file_of("mp4")[:-500],
    "a shortened MKV": file_of("mkv")[:-500],
    "a shortened AVI": file_of("avi")[:-500],
    "a damaged MP4": flipped(file_of("mp4"), len(file_of("mp4")) // 3),
    "a damaged WebM": flipped(file_of("webm"), len(file_of("webm")) // 2),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_bad_samples(name: str) -> None:
    with pytest.raises(BadSampleError):
        clip(HOSTILE[name], frames=FRAMES, at="first")


@pytest.mark.parametrize("form", ["mp4", "webm", "avi"])
def test_damage_anywhere_is_bad_or_frames(form: str) -> None:
    data, draws = file_of(form), np.random.default_rng(5)
    for _ in range(40):
        broken = bytearray(data)
        for at in draws.integers(0, len(data), draws.integers(1, 8)):
            broken[at] = draws.integers(0, 256)
        try:
            made = clip(bytes(broken), frames=4, at="center")
        except BadSampleError:
            continue
        assert made.shape[0] == 4


def test_frames_that_do_not_fit_into_memory_are_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshd.transform.video_frames.MAX_VIDEO_BYTES", 10 * HEIGHT * WIDTH * 3)
    with pytest.raises(BadSampleError, match="put resize right after decode_video"):
        clip(file_of(), frames=11)
    assert (
        rendered(file_of(), ("decode_video", {"frames": 11}), ("resize", {"size": [16, 24]})).shape[0] == 11
    )


def test_arguments_that_contradict_each_other_are_refused() -> None:
    for args in ({"frames": 2, "fps": 5, "step": 2}, {"frames": 2, "clips": 2, "start": 1}, {"frames": 0}):
        with pytest.raises(PlanError):
            clip(b"", **args)
