"""Spectra of sounds: STFT, mel spectrograms, MFCC and SpecAugment, with time as the first axis.

Law: computed in float64 and rounded to float32 once. Sums are in a fixed order and logarithms from
additions and multiplications alone, so only the FFT (numpy's) is not defined here to the last bit. Frames
and scales are torchaudio's; `mel_scale`, `norm` and `padding` have librosa's, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from meshd.transform.builtin.mel_scale import dct_matrix, decibels_of, mel_filters, natural_logs
from meshd.transform.builtin.sound import check_sound
from meshd.transform.builtin.sound_files import MAX_VALUES
from meshd.transform.errors import BadSampleError
from meshd.transform.op_types import FieldType
from meshd.transform.parameters import (
    Parameter,
    choice,
    flag,
    number,
    numbers,
    probability,
    whole,
    whole_or_none,
)
from meshd.transform.registry import operation

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshd.transform.builtin.mel_scale import MelFilters
    from meshd.transform.builtin.sound_files import Floats
    from meshd.transform.registry import Operation
    from meshwire.plan.keyed_random import KeyedRandom

    Doubles = npt.NDArray[np.float64]

MAX_FFT = 1 << 16
_BLOCK_VALUES = 1 << 18  # numbers of a block of frames that are transformed at once
_FRAMING = (
    Parameter("n_fft", whole(2, MAX_FFT), 400),
    Parameter("hop", whole_or_none(1, MAX_FFT), None),
    Parameter("window", whole_or_none(1, MAX_FFT), None),
    Parameter("shape", choice("hann", "hamming", "ones"), "hann"),
    Parameter("center", flag, True),
    Parameter("padding", choice("reflect", "zeros"), "reflect"),
)
_TOO_SHORT = "a sound shorter than the frame, or than half a frame if `center`"
Log = Literal["none", "natural", "db", "whisper"]


@dataclass(frozen=True, slots=True)
class _Framing:
    """How a sound is cut into frames of `n_fft` values, `hop` apart, times a window of `window` values."""

    n_fft: int
    hop: int | None
    window: int | None
    shape: Literal["hann", "hamming", "ones"]
    center: bool
    padding: Literal["reflect", "zeros"]

    @property
    def step(self) -> int:
        return self.hop or max(1, (self.window or self.n_fft) // 2)

    @property
    def bins(self) -> int:
        return self.n_fft // 2 + 1

    def check(self) -> None:
        """Raises ValueError for a window that is longer than the frame."""
        if (self.window or 0) > self.n_fft:
            raise ValueError(f"a window of {self.window} values is longer than n_fft, {self.n_fft}")

    def framed(self, sound: Floats) -> npt.NDArray[np.float32]:
        """Return a view [frames, n_fft] of the padded sound. Raises BadSampleError."""
        half = self.n_fft // 2 if self.center else 0
        if len(sound) < (half + 1 if half and self.padding == "reflect" else self.n_fft - 2 * half):
            raise BadSampleError(f"a sound of {len(sound)} values is too short for frames of {self.n_fft}")
        if half:
            sound = np.pad(sound, half, "reflect" if self.padding == "reflect" else "constant")
        frames = np.lib.stride_tricks.sliding_window_view(sound, self.n_fft)[:: self.step]
        if len(frames) * self.bins > MAX_VALUES:
            raise BadSampleError(f"a spectrum of {len(frames)} frames × {self.bins}; make it shorter first")
        return frames

    def taper(self) -> Doubles:
        """Return the window [n_fft], periodic, with zeros around it."""
        length = self.window or self.n_fft
        if self.shape == "ones":
            made = np.ones(length)
        else:
            low = 0.5 if self.shape == "hann" else 0.54
            turns = 2 * math.pi / length
            made = np.array([low - (1 - low) * math.cos(turns * place) for place in range(length)])
        left = (self.n_fft - length) // 2
        return np.pad(made, (left, self.n_fft - length - left))

    def transform(self, frames: npt.NDArray[np.float32], taper: Doubles) -> npt.NDArray[np.complex128]:
        """Return the spectra [frames, bins] of some frames."""
        return np.fft.rfft(frames * taper, axis=1)


@lru_cache(maxsize=16)
def _taper(framing: _Framing) -> Doubles:
    return framing.taper()


def _powers(spectra: npt.NDArray[np.complex128], exponent: float) -> Doubles:
    """Return the magnitudes to a power: 1 or 2."""
    squares: Doubles = spectra.real**2 + spectra.imag**2
    return squares if exponent == 2 else np.sqrt(squares)


@dataclass(frozen=True, slots=True)
class _Framed(_Framing):
    """An op on a mono sound that is cut into frames."""

    @property
    def framing(self) -> _Framing:
        return _Framing(self.n_fft, self.hop, self.window, self.shape, self.center, self.padding)

    def frame_count(self, field: FieldType) -> int | None:
        """Return the number of frames of sounds of this type, None if it differs. Raises ValueError."""
        check_sound(field, mono=True)
        self.framing.check()
        if field.shape[0] is None:
            return None
        room = field.shape[0] + (self.n_fft // 2 * 2 if self.center else 0) - self.n_fft
        if room < 0:
            raise ValueError(f"{field} is shorter than a frame of {self.n_fft}")
        return room // self.framing.step + 1


@operation(
    "spectrogram",
    *_FRAMING,
    Parameter("power", whole_or_none(1, 2), 2),
    takes="a mono sound",
    gives="float32 [frames, n_fft // 2 + 1]; without a power, [frames, n_fft // 2 + 1, 2]",
    refuses=_TOO_SHORT,
)
@dataclass(frozen=True, slots=True)
class Spectrogram(_Framed):
    """The short-time Fourier transform: `power` 2 gives the power, 1 the magnitude, null the complex
    numbers as pairs. Frames of `n_fft` values begin every `hop` (half the window); `center` pads the ends,
    by reflection (torchaudio) or with zeros (librosa)."""

    power: int | None

    def infer(self, field: FieldType) -> FieldType:
        frames = self.frame_count(field)
        shape = (frames, self.framing.bins) if self.power else (frames, self.framing.bins, 2)
        return FieldType("array", "float32", shape)

    def apply(self, value: Floats, random: KeyedRandom) -> Floats:
        framing = self.framing
        frames, taper = framing.framed(value), _taper(framing)
        made = np.empty(
            (len(frames), framing.bins) if self.power else (len(frames), framing.bins, 2), np.float32
        )
        block = max(1, _BLOCK_VALUES // self.n_fft)
        for start in range(0, len(frames), block):
            spectra = framing.transform(frames[start : start + block], taper)
            if self.power:
                made[start : start + block] = _powers(spectra, self.power)
            else:
                made[start : start + block, :, 0], made[start : start + block, :, 1] = (
                    spectra.real,
                    spectra.imag,
                )
        return made


_MEL = (
    Parameter("f_min", number(0.0, 384_000.0), 0.0),
    Parameter("f_max", number(0.0, 384_000.0), 0.0),
    Parameter("mel_scale", choice("htk", "slaney"), "htk"),
    Parameter("norm", choice("none", "slaney"), "none"),
)


@dataclass(frozen=True, slots=True)
class _Mel(_Framed):
    """An op that sums powers over the bands of the mel scale."""

    mels: int
    power: int
    f_min: float
    f_max: float
    mel_scale: Literal["htk", "slaney"]
    norm: Literal["none", "slaney"]

    def filters(self, rate: int) -> MelFilters:
        """Return the filters. Raises ValueError if they do not fit the rate."""
        top = self.f_max or rate / 2
        if not self.f_min < top <= rate / 2:
            raise ValueError(
                f"bands from {self.f_min:g} to {top:g} Hz; a sound of {rate} Hz has 0…{rate / 2:g} Hz"
            )
        return mel_filters(rate, self.n_fft, self.mels, self.f_min, top, self.mel_scale, self.norm)

    def mel_powers(self, sound: Floats, filters: MelFilters) -> Doubles:
        """Return the powers [bands, frames] of a sound. Raises BadSampleError."""
        framing = self.framing
        frames, taper = framing.framed(sound), _taper(framing)
        made = np.empty((self.mels, len(frames)))
        block = max(1, _BLOCK_VALUES // self.n_fft)
        for start in range(0, len(frames), block):
            powers = _powers(framing.transform(frames[start : start + block], taper), self.power)
            filters.sum_bands(np.ascontiguousarray(powers.T), made[:, start : start + block])
        return made


@operation(
    "mel_spectrogram",
    Parameter("mels", whole(1, 1024), 80),
    *_FRAMING,
    Parameter("power", whole(1, 2), 2),
    *_MEL,
    Parameter("log", choice("none", "natural", "db", "whisper"), "none"),
    Parameter("floor", number(1e-30, 1.0), 1e-10),
    Parameter("range_db", number(0.0, 1000.0), 80.0),
    takes="a mono sound",
    gives="float32 [frames, mels]",
    refuses=_TOO_SHORT,
)
@dataclass(frozen=True, slots=True)
class MelSpectrogram(_Mel):
    """The spectrogram summed over `mels` bands between `f_min` and `f_max` hertz (0: half the rate). `log`:
    "natural" is ln(max(x, floor)); "db" is 10 · log10(max(x, floor)), at most `range_db` below the loudest
    (0: no limit); "whisper" is what Whisper and its relatives take."""

    log: Log
    floor: float
    range_db: float
    _filters: MelFilters | None = field(default=None, repr=False, compare=False)

    def infer(self, field: FieldType) -> FieldType:
        frames = self.frame_count(field)
        self.filters(field.rate)
        if frames is not None and self.log == "whisper":
            frames -= 1
        return FieldType("array", "float32", (frames, self.mels))

    def bind(self, field: FieldType) -> Operation:
        """See `BoundToType`."""
        return replace(self, _filters=self.filters(field.rate))

    def apply(self, value: Floats, random: KeyedRandom) -> Floats:
        assert self._filters is not None
        made = self.mel_powers(value, self._filters)
        if self.log == "natural":
            made = natural_logs(np.maximum(made, self.floor))
        elif self.log == "db":
            made = decibels_of(made, self.floor, self.range_db)
        elif (
            self.log == "whisper"
        ):  # log10, 8 below the loudest at most, about −1…1; the last frame is left out
            made = (decibels_of(made[:, :-1], self.floor, 80.0) / 10 + 4) / 4
        return np.ascontiguousarray(made.T, np.float32)


@operation(
    "mfcc",
    Parameter("coefficients", whole(1, 1024), 40),
    Parameter("mels", whole(1, 1024), 128),
    *_FRAMING,
    Parameter("power", whole(1, 2), 2),
    *_MEL,
    Parameter("range_db", number(0.0, 1000.0), 80.0),
    takes="a mono sound",
    gives="float32 [frames, coefficients]",
    refuses=_TOO_SHORT,
)
@dataclass(frozen=True, slots=True)
class Mfcc(_Mel):
    """The first `coefficients` of the orthonormal DCT-II of the mel spectrogram in decibels, as
    torchaudio's MFCC and librosa's `feature.mfcc`."""

    coefficients: int
    range_db: float
    _filters: MelFilters | None = field(default=None, repr=False, compare=False)

    def infer(self, field: FieldType) -> FieldType:
        if self.coefficients > self.mels:
            raise ValueError(
                f"{self.coefficients} coefficients of {self.mels} bands; there are at most as many"
            )
        frames = self.frame_count(field)
        self.filters(field.rate)
        return FieldType("array", "float32", (frames, self.coefficients))

    def bind(self, field: FieldType) -> Operation:
        """See `BoundToType`."""
        return replace(self, _filters=self.filters(field.rate))

    def apply(self, value: Floats, random: KeyedRandom) -> Floats:
        assert self._filters is not None
        levels = decibels_of(self.mel_powers(value, self._filters), 1e-10, self.range_db)
        made = np.zeros((self.coefficients, levels.shape[1]))
        for row, weights in zip(levels, dct_matrix(self.coefficients, self.mels).T, strict=True):
            made += weights[:, None] * row
        return np.ascontiguousarray(made.T, np.float32)


@operation(
    "spec_augment",
    Parameter("time_masks", whole(0, 100), 2),
    Parameter("time_width", whole(0, 1 << 20), 100),
    Parameter("frequency_masks", whole(0, 100), 2),
    Parameter("frequency_width", whole(0, 1 << 16), 27),
    Parameter("time_share", probability, 1.0),
    Parameter("value", numbers, (0.0,)),
    Parameter("mean", flag, False),
    random=True,
    takes="float32 [frames, bins], such as a mel spectrogram",
    gives="the same type",
)
class SpecAugment(msgspec.Struct, frozen=True):
    """Bands of frames and of frequencies masked with `value`, or with the `mean` of the spectrogram. The
    width of each is drawn from 0…`time_width` frames (at most `time_share` of all) or 0…`frequency_width`
    bins, then its place from all that fit."""

    time_masks: int
    time_width: int
    frequency_masks: int
    frequency_width: int
    time_share: float
    value: tuple[float, ...]
    mean: bool

    def infer(self, field: FieldType) -> FieldType:
        if field.kind != "array" or field.dtype != "float32" or len(field.shape) != 2 or field.rate:
            raise ValueError(f"needs a spectrogram, float32 [frames, bins], not {field}")
        if len(self.value) != 1:
            raise ValueError("value must be one number")
        return field

    def apply(self, value: Floats, random: KeyedRandom) -> Floats:
        frames, bins = value.shape
        made = value.copy()
        filling = value.mean(dtype=np.float64) if self.mean and value.size else self.value[0]
        widest = min(self.time_width, math.floor(self.time_share * frames))
        for _ in range(self.time_masks):
            width = random.integer(widest + 1)
            start = random.integer(frames - width + 1)
            made[start : start + width] = filling
        for _ in range(self.frequency_masks):
            width = random.integer(min(self.frequency_width, bins) + 1)
            start = random.integer(bins - width + 1)
            made[:, start : start + width] = filling
        return made
