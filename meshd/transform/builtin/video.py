"""The op `decode_video`: clips of a video file, chosen by frame number or by time.

Law: a clip is a choice of frames; which ones follows from the times of all frames of the file, the arguments
and the draws. Every frame that is chosen is decoded once, however many clips have it.
A frame is what decoding the whole file from its beginning gives, wherever decoding began. FFmpeg's libraries
(PyAV) see the bytes of one file and nothing else: a container of FORMATS, a codec of CODECS, no other
protocol or file. Packets are listed without decoding them, so numbers and times of frames are the file's, not
a header's claim. Decoding has one thread.
"""

from __future__ import annotations

import bisect
import io
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from meshd.transform.builtin.text import check_bytes
from meshd.transform.errors import BadSampleError, MissingLibraryError
from meshd.transform.parameters import Parameter, choice, whole
from meshd.transform.registry import operation
from meshd.transform.video_frames import changed_frames, fuse_frames, stack_frames, video
from meshwire.strict_json import checked_number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    from meshd.transform.op_types import FieldType
    from meshd.transform.registry import Operation
    from meshd.transform.video_frames import FrameOp
    from meshwire.plan.keyed_random import KeyedRandom

    Pixels = npt.NDArray[np.uint8]

FORMATS = "an MP4, MOV, MKV, WebM or AVI file"
CODECS = ("h264", "hevc", "vp8", "vp9", "libdav1d", "av1", "mpeg4", "mpeg1video", "mpeg2video", "mjpeg")
"""FFmpeg's decoders that a file may need; it has hundreds."""
MAX_PIXELS = 1 << 25
"""Of a frame: 33 megapixels, that is 8K."""
MAX_PACKETS = 1 << 20
"""Of a file: 9.7 hours at 30 frames a second."""
_OPTIONS = {"codec_whitelist": ",".join(CODECS), "protocol_whitelist": "", "err_detect": "explode"}
_MATROSKA = b"\x1a\x45\xdf\xa3"
_SEGMENT = b"\x18\x53\x80\x67"


@cache
def load_library() -> Any:
    """Return the module `av`. Raises MissingLibraryError."""
    try:
        import av
        import av.error
        import av.video.reformatter
    except (ImportError, OSError) as error:
        raise MissingLibraryError("av", "video") from error
    av.logging.set_level(None)  # a file could fill the log; the bad sample reports its problem
    return av


class VideoReader:
    """An open video file. `times`: of all frames, in ticks, in the order of display; `ticks`: per second."""

    def __init__(self, data: bytes) -> None:
        """Raises BadSampleError."""
        self._av = load_library()
        container = _container(data)
        try:
            self._file: Any = self._av.open(
                io.BytesIO(data), format=container, options=_OPTIONS, metadata_errors="ignore"
            )
            self._stream: Any = next(iter(self._file.streams.video), None)
            if self._stream is None or self._stream.codec_context is None:
                raise BadSampleError(f"{FORMATS} without a video that can be decoded ({', '.join(CODECS)})")
            self._check_stream()
            self._list_packets()
        except (self._av.error.FFmpegError, ValueError, EOFError) as error:
            raise BadSampleError(f"not a readable video: {_error_text(error)}") from None
        self._converter: Any = self._av.video.reformatter.VideoReformatter()  # set up once for all frames
        self._decoding: Iterator[Any] | None = None
        self._at = -1  # the time of the last frame that was decoded

    def __repr__(self) -> str:
        return f"<VideoReader {len(self.times)} frames>"

    def __enter__(self) -> VideoReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _check_stream(self) -> None:
        codec = self._stream.codec_context
        if codec.name not in CODECS:
            raise BadSampleError(f"the codec {codec.name[:20]}; known are {', '.join(CODECS)}")
        if not 0 < codec.width * codec.height <= MAX_PIXELS:
            raise BadSampleError(f"frames of {codec.width}×{codec.height}; at most {MAX_PIXELS} pixels")
        codec.thread_count = 1
        codec.options = {"err_detect": "explode", "max_pixels": str(MAX_PIXELS)}
        base = self._stream.time_base
        self.ticks = 1 / base

    def _list_packets(self) -> None:
        """List times and key frames of all packets. Raises BadSampleError for a truncated file."""
        times, keys = list[int](), list[int]()
        for packet in self._file.demux(self._stream):
            if packet.size == 0:  # the end
                continue
            if packet.is_corrupt:
                raise BadSampleError(f"truncated or damaged in frame {len(times)}")
            if packet.pts is None:
                raise BadSampleError("a frame without a time")
            if len(times) >= MAX_PACKETS:
                raise BadSampleError(f"more than {MAX_PACKETS} frames: cut the file")
            if packet.is_discard:  # before the beginning that an edit list sets
                continue
            times.append(packet.pts)
            if packet.is_keyframe:
                keys.append(packet.pts)
        if not times or not keys:
            raise BadSampleError("a video without frames")
        if self._stream.frames and len(times) < self._stream.frames * 0.99 - 1:
            raise BadSampleError(f"truncated: it has {len(times)} of its {self._stream.frames} frames")
        self.times: Sequence[int] = sorted(set(times))
        self._check_duration()
        self._keys = sorted(keys)

    def _check_duration(self) -> None:
        """Raises BadSampleError if frames are missing from a file that says how long they last (Matroska)."""
        hours, _, rest = str(self._stream.metadata.get("DURATION", "")).partition(":")
        minutes, _, seconds = rest.partition(":")
        try:
            told = 3600 * float(hours) + 60 * float(minutes) + float(seconds)
        except ValueError:
            return
        found = float((self.times[-1] - self.times[0]) / self.ticks)
        if found < 0.9 * told - 1:
            raise BadSampleError(f"truncated or damaged: it has {found:.1f} of {told:.1f} seconds")

    def frames(self, numbers: Sequence[int]) -> Iterator[tuple[int, Pixels]]:
        """Yield (number, uint8 [height, width, 3]) of these frames, which ascend. Raises BadSampleError.

        Every frame is decoded once at most; between frames that are far apart, decoding begins again at a
        key frame.
        """
        size: tuple[int, int] | None = None
        for number in numbers:
            frame = self._decode_until(self.times[number])
            size = size or (frame.height, frame.width)
            if (frame.height, frame.width) != size:
                raise BadSampleError(f"frame {number} is of another size than the first")
            try:
                yield number, self._converter.reformat(frame, format="rgb24").to_ndarray()
            except (self._av.error.FFmpegError, ValueError) as error:
                raise BadSampleError(f"frame {number} cannot be converted: {_error_text(error)}") from None

    def _decode_until(self, time: int) -> Any:
        """Return the frame of this time. Raises BadSampleError if there is none."""
        key = self._keys[max(0, bisect.bisect_right(self._keys, time) - 1)]
        if self._decoding is None or self._at < key:
            self._begin_at(key)
        frame = self._reach(time)
        if frame is None and time != self.times[0]:
            # The container's index led behind the key frame, or decoding cannot begin at this one.
            self._begin_at(self.times[0])
            frame = self._reach(time)
        if frame is None:
            raise BadSampleError(f"damaged: the frame at {float(time / self.ticks):.3f} s cannot be decoded")
        return frame

    def _reach(self, time: int) -> Any:
        """Return the frame of this time, decoding on; None if it does not come."""
        assert self._decoding is not None
        try:
            for frame in self._decoding:
                if frame.pts is None:
                    continue
                self._at = frame.pts
                if frame.pts >= time:
                    return frame if frame.pts == time and not frame.is_corrupt else None
        except (self._av.error.FFmpegError, ValueError, EOFError):
            return None
        return None

    def _begin_at(self, key: int) -> None:
        try:
            self._file.seek(key, stream=self._stream, backward=True, any_frame=False)
        except (self._av.error.FFmpegError, ValueError, EOFError) as error:
            raise BadSampleError(f"its index is damaged: {_error_text(error)}") from None
        self._decoding, self._at = self._file.decode(self._stream), key - 1


def _error_text(error: Exception) -> str:
    return str(getattr(error, "strerror", "") or error or type(error).__name__)[:100]


def _container(data: bytes) -> str:
    """Return FFmpeg's name of the container, by its first bytes. Raises BadSampleError."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mp4"
    if data[:4] == _MATROSKA:
        _check_segment(data)
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        if int.from_bytes(data[4:8], "little") + 8 > len(data):
            raise BadSampleError("truncated: it is shorter than its header says")
        return "avi"
    raise BadSampleError(f"not {FORMATS}")


def _check_segment(data: bytes) -> None:
    """Refuse a Matroska file that is shorter than its segment, which RFC 8794 and 9559 give a length."""
    at = data.find(_SEGMENT, 0, 4096)
    if at < 0 or at + 12 > len(data) or not data[at + 4]:
        raise BadSampleError("a Matroska file without a segment")
    width = 9 - data[at + 4].bit_length()
    size = int.from_bytes(data[at + 4 : at + 4 + width], "big") - (1 << 7 * width)
    unknown = size == (1 << 7 * width) - 1
    if not unknown and at + 4 + width + size > len(data):
        raise BadSampleError("truncated: it is shorter than its header says")


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
