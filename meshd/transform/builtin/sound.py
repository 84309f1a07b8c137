"""Ops on sounds: decoding, channels, rate, level and silence.

Law: a sound is an array with time as its first axis, [n] if mono, else [n, channels], and its type knows the
rate. Fused with the ops that follow, `decode_audio` decodes what a window needs and gives the same
bits. Computed in float32 by additions and multiplications alone, so that they are equal on all processors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
import numpy as np

from meshd.transform.builtin.array_ops import Window
from meshd.transform.builtin.sound_files import (
    FORMATS,
    MAX_CHANNELS,
    MAX_RATE,
    MAX_VALUES,
    MIN_RATE,
    SoundReader,
    check_length,
    load_library,
)
from meshd.transform.builtin.sound_resampler import resampler
from meshd.transform.builtin.text import check_bytes
from meshd.transform.errors import BadSampleError
from meshd.transform.op_types import FieldType
from meshd.transform.parameters import Parameter, choice, number, pair, whole, whole_or_none
from meshd.transform.registry import operation
from meshwire.plan.keyed_random import portable_exp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from meshd.transform.builtin.sound_files import Floats
    from meshd.transform.builtin.sound_resampler import Quality
    from meshd.transform.registry import Operation
    from meshwire.plan.keyed_random import KeyedRandom

_LN10_OVER_20 = 0.11512925464970228
_FULL_SCALE = 32768
_QUALITY = Parameter("quality", choice("standard", "best"), "standard")
_SILENT_POWER = 1e-10  # the square of librosa's smallest amplitude


def sound(dtype: str, channels: int, rate: int) -> FieldType:
    """Return the type of a sound of any length."""
    return FieldType("array", dtype, (None,) if channels == 1 else (None, channels), rate=rate)


def check_sound(field: FieldType, *, mono: bool = False) -> None:
    """Raises ValueError unless the type is a sound of float32; with `mono`, one of shape [n]."""
    if not field.rate:
        raise ValueError(f"needs a sound, not {field}; put decode_audio first")
    if field.dtype != "float32":
        raise ValueError(f"needs float32, not {field.dtype}; leave decode_audio its dtype")
    if mono and len(field.shape) != 1:
        raise ValueError(f"needs one channel, not {field}; put mono before it, or decode with channels=1")


def decibels(level: float) -> float:
    """Return the factor of an amplitude that is `level` dB higher."""
    return portable_exp(level * _LN10_OVER_20)


def _mean_of_channels(value: Floats) -> Floats:
    total = value[:, 0].copy()
    for channel in range(1, value.shape[1]):
        total += value[:, channel]
    return total if value.shape[1] == 1 else total / np.float32(value.shape[1])


@operation(
    "decode_audio",
    Parameter("rate", whole_or_none(MIN_RATE, MAX_RATE), None),
    Parameter("channels", whole_or_none(1, MAX_CHANNELS), None),
    Parameter("dtype", choice("float32", "int16"), "float32"),
    _QUALITY,
    takes=f"bytes of {FORMATS}",
    gives="a sound: `dtype` [n], or [n, channels] if there are several",
    refuses="not such a file, truncated, or damaged where it is decoded; numbers that are not finite; "
    f"another number of channels; a rate not in {MIN_RATE}…{MAX_RATE} Hz; over {MAX_VALUES >> 20} Mi numbers",
)
@dataclass(frozen=True, slots=True)
class DecodeAudio:
    """A sound file decoded to float32 in −1…1, or to int16. A file of another rate is resampled to `rate`
    hertz. With 1 channel, the mean of the file's channels. Without `rate` and `channels`, a plan takes them
    from the dataset's first sample. Of WAV and FLAC, only what the next window keeps is decoded; of MP3
    and Ogg, nothing after it."""

    rate: int | None
    channels: int | None
    dtype: Literal["float32", "int16"]
    quality: Quality

    def __post_init__(self) -> None:
        load_library()

    @staticmethod
    def complete(args: Mapping[str, Any], first: Callable[[], bytes]) -> dict[str, Any]:
        """Return the arguments with rate and channels of the first sample unless given.

        Raises BadSampleError.
        """
        if args.get("rate") and args.get("channels"):
            return dict(args)
        with SoundReader(first()) as reader:
            found = {"rate": reader.rate, "channels": reader.channels}
        return found | {name: value for name, value in args.items() if value is not None}

    def infer(self, field: FieldType) -> FieldType:
        check_bytes(field)
        if self.rate is None or self.channels is None:
            raise ValueError("needs rate and channels here, such as 16000 and 1")
        return sound(self.dtype, self.channels, self.rate)

    def apply(self, value: bytes, random: KeyedRandom) -> npt.NDArray[Any]:
        with SoundReader(value) as reader:
            return self.decode_range(reader, 0, self.length(reader))

    def length(self, reader: SoundReader) -> int:
        """Return the number of frames of the result."""
        assert self.rate is not None
        frames = reader.frames
        if reader.rate == self.rate:
            return frames
        return resampler(reader.rate, self.rate, self.quality).length(frames)

    def decode_range(self, reader: SoundReader, start: int, stop: int) -> npt.NDArray[Any]:
        """Return the frames start…stop of the result. Raises BadSampleError."""
        assert self.rate is not None
        if self.channels not in (1, reader.channels):
            raise BadSampleError(f"it has {reader.channels} channels, not {self.channels}")
        check_length(stop - start, self.channels)

        def read(first: int, end: int) -> Floats:
            frames = reader.read(first, end)
            return _mean_of_channels(frames)[:, None] if self.channels == 1 else frames

        if reader.rate == self.rate:
            made = read(start, stop)
        else:
            filters = resampler(reader.rate, self.rate, self.quality)
            made = filters.resample(read, reader.frames, start, stop)
        if self.channels == 1:
            made = made[:, 0]
        if self.dtype == "int16":
            scaled = np.rint(made * np.float32(_FULL_SCALE))
            return np.asarray(np.clip(scaled, -_FULL_SCALE, _FULL_SCALE - 1), np.int16)
        return made

    def fuse(self, following: Operation) -> Operation | None:
        if isinstance(following, Mono) and self.dtype == "float32":
            return self if self.channels == 1 else _MixedAudio(self)
        return _decode_window(self, following)


class _MixedAudio(msgspec.Struct, frozen=True):
    """decode_audio, fused with the `mono` that follows."""

    decode: DecodeAudio

    channels: ClassVar[int] = 1

    def infer(self, field: FieldType) -> FieldType:
        raise NotImplementedError("types are inferred op by op, before fusing")

    def apply(self, value: bytes, random: KeyedRandom) -> npt.NDArray[Any]:
        return _mean_of_channels(self.decode.apply(value, random))

    def length(self, reader: SoundReader) -> int:
        """See `DecodeAudio.length`."""
        return self.decode.length(reader)

    def decode_range(self, reader: SoundReader, start: int, stop: int) -> npt.NDArray[Any]:
        """See `DecodeAudio.decode_range`."""
        return _mean_of_channels(self.decode.decode_range(reader, start, stop))

    def fuse(self, following: Operation) -> Operation | None:
        return _decode_window(self, following)


def _decode_window(decode: DecodeAudio | _MixedAudio, following: Operation) -> Operation | None:
    if isinstance(following, Window) and all(extent is None for extent in following.extents[1:]):
        return _WindowedAudio(decode, following)
    return None


class _WindowedAudio(msgspec.Struct, frozen=True):
    """decode_audio, fused with the window that follows: only the window is decoded."""

    decode: DecodeAudio | _MixedAudio
    window: Window

    def infer(self, field: FieldType) -> FieldType:
        raise NotImplementedError("types are inferred op by op, before fusing")

    def apply(self, value: bytes, random: KeyedRandom) -> npt.NDArray[Any]:
        with SoundReader(value) as reader:
            shape = (self.decode.length(reader), self.decode.channels or 1)[: len(self.window.extents)]
            start, stop = self.window.places(shape, random)[0]
            return self.window.padded(self.decode.decode_range(reader, start, stop))


@operation("mono", takes="a sound [n, channels], or [n]", gives="a sound [n]")
class Mono(msgspec.Struct, frozen=True):
    """The mean of all channels."""

    def infer(self, field: FieldType) -> FieldType:
        check_sound(field)
        return replace(field, shape=field.shape[:1])

    def apply(self, value: Floats, random: KeyedRandom) -> Floats:
        return value if value.ndim == 1 else _mean_of_channels(value)


@operation(
    "resample",
    Parameter("rate", whole(MIN_RATE, MAX_RATE)),
    _QUALITY,
    takes="a sound",
    gives="a sound of ⌈n · rate / old rate⌉ values",
    refuses=f"over {MAX_VALUES >> 20} Mi numbers",
)
@dataclass(frozen=True, slots=True)
class Resample:
    """The sound at another rate, as torchaudio's `resample` gives it: "standard" with its default filter,
    "best" with the one that it calls kaiser_best."""

    rate: int
    quality: Quality
    old_rate: int = 0

    def infer(self, field: FieldType) -> FieldType:
        check_sound(field)
        return FieldType("array", "float32", (None, *field.shape[1:]), rate=self.rate)

    def bind(self, field: FieldType) -> Operation:
        """See `BoundToType`."""
        return replace(self, old_rate=field.rate)

    def apply(self, value: Floats, random: KeyedRandom) -> Floats:
        if self.old_rate == self.rate:
            return value
        filters = resampler(self.old_rate, self.rate, self.quality)
        length = filters.length(len(value))
        frames = value.reshape(len(value), -1)
        check_length(length, frames.shape[1])
        made = filters.resample(lambda start, stop: frames[start:stop], len(value), 0, length)
        return made.reshape(length, *value.shape[1:])


@operation(
    "gain",
    Parameter("db", pair(-120.0, 120.0)),
    random=True,
    takes="a sound",
    gives="the same type",
)
class Gain(msgspec.Struct, frozen=True):
    """Louder or softer by a number of decibels drawn from [lowest, highest]; values beyond 1 are not
    clipped."""

    db: tuple[float, float]

    def infer(self, field: FieldType) -> FieldType:
        check_sound(field)
        return field

    def apply(self, value: Floats, random: KeyedRandom) -> Floats:
        return value * np.float32(decibels(self.draws(random)["db"]))

    def draws(self, random: KeyedRandom) -> dict[str, float]:
        return {"db": random.uniform(*self.db)}


@operation(
    "normalize_volume",
    Parameter("by", choice("peak", "rms"), "peak"),
    Parameter("db", number(-120.0, 120.0), 0.0),
    takes="a sound",
    gives="the same type",
)
class NormalizeVolume(msgspec.Struct, frozen=True):
    """Scaled so that the peak, or the root of the mean square, is `db` decibels below or above 1. Silence
    stays silence."""

    by: Literal["peak", "rms"]
    db: float

    def infer(self, field: FieldType) -> FieldType:
        check_sound(field)
        return field

    def apply(self, value: Floats, random: KeyedRandom) -> Floats:
        if self.by == "peak":
            level = float(np.abs(value).max(initial=0.0))
        else:
            level = float(np.sqrt(np.mean(np.square(value, dtype=np.float64)))) if value.size else 0.0
        return value * np.float32(decibels(self.db) / level) if level else value


@operation(
    "trim_silence",
    Parameter("db", number(1.0, 200.0), 60.0),
    Parameter("frame", whole(2, 1 << 20), 2048),
    Parameter("hop", whole(1, 1 << 20), 512),
    takes="a sound",
    gives="a sound, not longer",
)
class TrimSilence(msgspec.Struct, frozen=True):
    """Without the silence at both ends, as librosa's `effects.trim` finds it: frames whose power is more
    than `db` decibels below that of the loudest frame. Of several channels, the loudest counts."""

    db: float
    frame: int
    hop: int

    def infer(self, field: FieldType) -> FieldType:
        check_sound(field)
        return replace(field, shape=(None, *field.shape[1:]))

    def apply(self, value: Floats, random: KeyedRandom) -> Floats:
        if not len(value):
            return value
        squares = np.square(value.reshape(len(value), -1), dtype=np.float64)
        half = self.frame // 2
        sums = np.zeros((len(value) + 1, squares.shape[1]))
        np.cumsum(squares, axis=0, out=sums[1:])
        centers = np.arange(0, len(value) + 2 * half - self.frame + 1, self.hop)
        ends = np.clip(centers + self.frame - half, 0, len(value))
        powers = (sums[ends] - sums[np.clip(centers - half, 0, len(value))]) / self.frame
        powers = np.maximum(powers.max(axis=1), _SILENT_POWER)
        heard = np.nonzero(powers > powers.max() * decibels(-2 * self.db))[0]
        start, stop = int(heard[0]) * self.hop, (int(heard[-1]) + 1) * self.hop
        return np.ascontiguousarray(value[start:stop])
