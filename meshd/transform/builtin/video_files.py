"""Video files: MP4, QuickTime, Matroska, WebM and AVI, read by FFmpeg's libraries (PyAV).

Law: a frame is what decoding the whole file from its beginning gives, wherever decoding began. FFmpeg sees
the bytes of one file and nothing else: a container of CONTAINERS, a codec of CODECS, no other protocol
or file. Packets are listed without decoding them, so numbers and times of frames are the file's, not a
header's claim. Decoding has one thread.
"""

from __future__ import annotations

import bisect
import io
from functools import cache
from typing import TYPE_CHECKING, Any

from meshd.transform.errors import BadSampleError, MissingLibraryError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

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
            raise BadSampleError(f"not a readable video: {_told(error)}") from None
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
                raise BadSampleError(f"frame {number} cannot be converted: {_told(error)}") from None

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
            raise BadSampleError(f"its index is damaged: {_told(error)}") from None
        self._decoding, self._at = self._file.decode(self._stream), key - 1


def _told(error: Exception) -> str:
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
