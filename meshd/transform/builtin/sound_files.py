"""Sound files: WAV, FLAC, MP3 and Ogg (Vorbis, Opus), read by libsndfile as float32.

Law: a range of frames is what decoding the whole file gives for it, to the bit; a truncated file is never
half a sound. A file is judged by its own structure first (lengths of WAV, pages of Ogg), because libsndfile
plays what is there. At most MAX_VALUES numbers are decoded at once. RFC 3533 (Ogg), RFC 9639 (FLAC).
"""

from __future__ import annotations

import io
import zlib
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from meshd.transform.errors import BadSampleError, MissingLibraryError

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]

FORMATS = "a WAV, FLAC, MP3 or Ogg file"
MIN_RATE, MAX_RATE = 1_000, 768_000
"""Hertz. Headers with other rates are damaged, or no sound."""
MAX_CHANNELS = 64
MAX_VALUES = 1 << 27
"""Frames times channels, 512 MiB as float32: the limit for one sample."""
_BLOCK = 1 << 16  # frames that are skipped at once
_UNKNOWN_LENGTH = 0xFFFFFFFF  # of a chunk whose writer could not seek back
_SEEKS_EXACTLY = frozenset({"WAV", "WAVEX", "RF64", "FLAC"})
_KNOWN = _SEEKS_EXACTLY | {"OGG", "MP3"}
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


@cache
def load_library() -> Any:
    """Return the class that reads files: soundfile's. Raises MissingLibraryError."""
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: without its libsndfile
        raise MissingLibraryError("soundfile", "audio") from error

    class ForwardFile(soundfile.SoundFile):  # type: ignore[misc]  # soundfile is not typed
        """A file whose reads do not seek to where they ended: a codec that seeks starts over, with other last
        bits."""

        def seekable(self) -> bool:
            return False

    return ForwardFile


class SoundReader:
    """An open sound file: `rate` in hertz, number of `channels`, length in `frames` as its header says."""

    def __init__(self, data: bytes) -> None:
        """Raises BadSampleError."""
        _check_structure(data)
        file = load_library()
        try:
            self._file: Any = file(io.BytesIO(data))
        except (RuntimeError, ValueError, TypeError) as error:
            raise BadSampleError(f"not a readable sound file: {_error_text(error)}") from None
        self.rate, self.channels = int(self._file.samplerate), int(self._file.channels)
        self.frames = int(self._file.frames)
        if self._file.format not in _KNOWN:
            raise BadSampleError(f"not {FORMATS}, but {str(self._file.format)[:20]}")
        if not MIN_RATE <= self.rate <= MAX_RATE:
            raise BadSampleError(f"a rate of {self.rate} Hz; {MIN_RATE}…{MAX_RATE} are allowed")
        if not 1 <= self.channels <= MAX_CHANNELS:
            raise BadSampleError(f"{self.channels} channels; at most {MAX_CHANNELS} are allowed")
        self._at = 0

    def __repr__(self) -> str:
        return f"<SoundReader {self._file.format}, {self.frames} frames of {self.channels} at {self.rate} Hz>"

    def __enter__(self) -> SoundReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, start: int, stop: int) -> Floats:
        """Return the frames start…stop, [stop − start, channels]; 0 ≤ start ≤ stop ≤ `frames`.

        Formats that seek exactly begin there; others are decoded from the beginning up to `stop`. Raises
        BadSampleError if the file does not have them, or has numbers that are not finite.
        """
        check_length(stop - start, self.channels)
        try:
            self._skip_to(start)
            read = self._file.read(stop - start, dtype="float32", always_2d=True)
        except (RuntimeError, ValueError) as error:
            raise BadSampleError(f"damaged after frame {self._at}: {_error_text(error)}") from None
        self._at += len(read)
        if self._at != stop:
            raise BadSampleError(f"truncated: it has {self._at} frames of the {self.frames} in its header")
        if not np.isfinite(read).all():
            raise BadSampleError("it has numbers that are not finite")
        return read  # type: ignore[no-any-return]  # soundfile is not typed

    def _skip_to(self, start: int) -> None:
        if self._file.format in _SEEKS_EXACTLY and start != self._at:
            self._at = int(self._file.seek(start))
        elif start < self._at:
            raise ValueError("a file of this format is read forwards only")
        while self._at < start:
            skipped = len(self._file.read(min(_BLOCK, start - self._at), dtype="float32", always_2d=True))
            if not skipped:
                return
            self._at += skipped


def check_length(frames: int, channels: int) -> None:
    """Raises BadSampleError for more numbers than one sample may have."""
    if frames * channels > MAX_VALUES:
        raise BadSampleError(
            f"{frames} frames of {channels} channels; at most {MAX_VALUES} numbers are allowed: put window "
            "after decode_audio, or cut the file"
        )


def _error_text(error: Exception) -> str:
    return (
        (getattr(error, "error_string", "") or str(error) or type(error).__name__).strip().rstrip(".")[:100]
    )


def _check_structure(data: bytes) -> None:
    head = data[:12]
    if head[:4] in (b"RIFF", b"RF64") and head[8:] == b"WAVE":
        _check_wav(data)
    elif head[:4] == b"OggS":
        _check_ogg(data)
    elif head[:4] != b"fLaC" and head[:3] != b"ID3" and not _is_mpeg_frame(head):
        raise BadSampleError(f"not {FORMATS}")


def _is_mpeg_frame(head: bytes) -> bool:
    """Return whether an MPEG audio frame of layer III begins here."""
    return len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0 and head[1] & 0x06 == 0x02


def _check_wav(data: bytes) -> None:
    """Refuse a WAV file whose data chunk is longer than the file, of which libsndfile reads what is there."""
    at, long_size = 12, 0
    while at + 8 <= len(data):
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if name == b"ds64":
            long_size = int.from_bytes(data[at + 16 : at + 24], "little")
        if name == b"data":
            if size == _UNKNOWN_LENGTH:
                size = long_size
            if at + 8 + size > len(data):
                raise BadSampleError(
                    f"truncated: its data has {size} bytes, of which {len(data) - at - 8} are there"
                )
            return
        at += 8 + size + size % 2
    raise BadSampleError("a WAV file without data")


def _check_ogg(data: bytes) -> None:
    """Verify the pages of an Ogg file: one stream, whole, in sequence, each with its checksum.

    libsndfile leaves out a damaged page and goes on, so what follows would come too early.
    """
    at, sequence, serial, last = 0, 0, data[14:18], False
    while at < len(data):
        segments = data[at + 27 : at + 27 + data[at + 26]] if at + 27 <= len(data) else b""
        end = at + 27 + len(segments) + sum(segments)
        if data[at : at + 4] != b"OggS" or end > len(data) or len(segments) != data[at + 26] or last:
            raise BadSampleError(f"truncated or damaged: no whole Ogg page of its stream at byte {at}")
        if data[at + 14 : at + 18] != serial or data[at + 18 : at + 22] != sequence.to_bytes(4, "little"):
            raise BadSampleError(f"an Ogg page out of sequence, or of a second stream, at byte {at}")
        page = b"".join((data[at : at + 22], bytes(4), data[at + 26 : end]))
        if _ogg_checksum(page) != int.from_bytes(data[at + 22 : at + 26], "little"):
            raise BadSampleError(f"damaged: the Ogg page at byte {at} fails its checksum")
        last = bool(data[at + 5] & 4)
        at, sequence = end, sequence + 1
    if not last:
        raise BadSampleError("truncated: its last Ogg page is missing")


def _ogg_checksum(page: bytes) -> int:
    """Return the CRC-32 of Ogg, which is zlib's with all bits in the other order and no inversions."""
    mirrored = zlib.crc32(page.translate(_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int.from_bytes(mirrored.to_bytes(4, "little").translate(_REVERSED), "big")
