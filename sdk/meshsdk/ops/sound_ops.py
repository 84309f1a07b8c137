"""Constructors of the ops on sounds: decoding, rate, level, spectra and their augmentation.

Law: that of `meshsdk.ops`, through which users call them. A sound is [n] if it has one channel, else
[n, channels]; spectra are [frames, …]: time is the first axis of all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from meshsdk.errors import ConfigurationError
from meshsdk.ops import arguments as _values
from meshwire.plan.plan_spec import OpSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

Quality = Literal["standard", "best"]
Shape = Literal["hann", "hamming", "ones"]
Padding = Literal["reflect", "zeros"]
MelScale = Literal["htk", "slaney"]
Norm = Literal["none", "slaney"]


def _without_none(**args: Any) -> dict[str, Any]:
    """Return the arguments that are not None."""
    return {name: value for name, value in args.items() if value is not None}


def decode_audio(
    field: str,
    *,
    rate: int | None = None,
    channels: int | None = None,
    dtype: Literal["float32", "int16"] = "float32",
    quality: Quality = "standard",
) -> OpSpec:
    """Decode a sound file: bytes of WAV, FLAC, MP3 or Ogg (Vorbis, Opus) → float32 [n] or [n, channels].

    The nodes need `shardmesh[audio]`. A `window` right after it decodes only what it keeps.

    Arguments:
        rate: in hertz; files of another rate are resampled. Default: that of the first sample.
        channels: 1 for the mean of the file's channels; otherwise the number that all files must have.
            Default: that of the first sample.
        dtype: "float32" in −1…1, or "int16", half the bytes.
        quality: of the resampling, as in `resample`.
    """
    args = _without_none(rate=rate, channels=channels) | {"dtype": dtype, "quality": quality}
    return OpSpec("decode_audio", _values.field("decode_audio", field), args)


def mono(field: str) -> OpSpec:
    """Average the channels of a sound: [n, channels] → [n]."""
    return OpSpec("mono", _values.field("mono", field))


def resample(field: str, rate: int, *, quality: Quality = "standard") -> OpSpec:
    """Resample a sound to `rate` hertz, as `torchaudio.functional.resample` does.

    `quality` "best" uses the filter that torchaudio calls kaiser_best: eleven times as long.
    """
    return OpSpec("resample", _values.field("resample", field), {"rate": rate, "quality": quality})


def gain(field: str, db: float | Sequence[float]) -> OpSpec:
    """Change the level of a sound by a random number of decibels in [lowest, highest]; x is [−x, x]."""
    levels = _values.numbers("gain", "db", db)
    return OpSpec("gain", _values.field("gain", field), {"db": levels[0] if len(levels) == 1 else levels})


def normalize_volume(field: str, *, by: Literal["peak", "rms"] = "peak", db: float = 0.0) -> OpSpec:
    """Scale a sound so that its peak, or its root mean square, is `db` decibels relative to 1."""
    return OpSpec("normalize_volume", _values.field("normalize_volume", field), {"by": by, "db": db})


def trim_silence(field: str, *, db: float = 60.0, frame: int = 2048, hop: int = 512) -> OpSpec:
    """Cut silence from both ends of a sound, as `librosa.effects.trim` does with `top_db=db`."""
    args = {"db": db, "frame": frame, "hop": hop}
    return OpSpec("trim_silence", _values.field("trim_silence", field), args)


def spectrogram(
    field: str,
    *,
    n_fft: int = 400,
    hop: int | None = None,
    window: int | None = None,
    shape: Shape = "hann",
    center: bool = True,
    padding: Padding = "reflect",
    power: Literal[1, 2] | None = 2,
) -> OpSpec:
    """Compute the STFT of a mono sound: [n] → float32 [frames, n_fft // 2 + 1].

    Arguments:
        n_fft: values of a frame.
        hop: values from one frame to the next. Default: half the window.
        window: length of the window, whose `shape` is "hann", "hamming" or "ones". Default: `n_fft`.
        center: whether frames are centered on their places, with half a frame of `padding` at both ends:
            "reflect" (torchaudio) or "zeros" (librosa).
        power: 2 for power, 1 for magnitude, None for [frames, bins, 2], the real and imaginary parts.
    """
    framing = _framing(n_fft, hop, window, shape, center, padding)
    return OpSpec("spectrogram", _values.field("spectrogram", field), {**framing, "power": power})


def _framing(
    n_fft: int, hop: int | None, window: int | None, shape: str, center: bool, padding: str
) -> dict[str, Any]:
    return {"n_fft": n_fft, "shape": shape, "center": center, "padding": padding} | _without_none(
        hop=hop, window=window
    )


def mel_spectrogram(
    field: str,
    mels: int = 80,
    *,
    n_fft: int = 400,
    hop: int | None = None,
    window: int | None = None,
    shape: Shape = "hann",
    center: bool = True,
    padding: Padding = "reflect",
    power: Literal[1, 2] = 2,
    f_min: float = 0.0,
    f_max: float | None = None,
    mel_scale: MelScale = "htk",
    norm: Norm = "none",
    log: Literal["none", "natural", "db", "whisper"] = "none",
    floor: float = 1e-10,
    range_db: float | None = 80.0,
) -> OpSpec:
    """Compute the mel spectrogram of a mono sound: [n] → float32 [frames, mels].

    The defaults are those of torchaudio. librosa's are `mel_scale="slaney", norm="slaney", padding="zeros"`.

    Arguments:
        n_fft, hop, window, shape, center, padding, power: as in `spectrogram`.
        f_min, f_max: the band in hertz. Default: up to half the rate.
        mel_scale, norm: "htk" or "slaney"; `norm="slaney"` divides by the width of each band.
        log: "natural" for ln(max(x, floor)); "db" for 10 · log10(max(x, floor)), at most `range_db` below the
            highest (None: no limit); "whisper" for the scale of OpenAI's Whisper.
        floor: what smaller powers count as.
    """
    args = _framing(n_fft, hop, window, shape, center, padding) | {
        "mels": mels,
        "power": power,
        "f_min": f_min,
        "f_max": f_max or 0.0,
        "mel_scale": mel_scale,
        "norm": norm,
        "log": log,
        "floor": floor,
        "range_db": range_db or 0.0,
    }
    return OpSpec("mel_spectrogram", _values.field("mel_spectrogram", field), args)


def mfcc(
    field: str,
    coefficients: int = 40,
    *,
    mels: int = 128,
    n_fft: int = 400,
    hop: int | None = None,
    window: int | None = None,
    shape: Shape = "hann",
    center: bool = True,
    padding: Padding = "reflect",
    power: Literal[1, 2] = 2,
    f_min: float = 0.0,
    f_max: float | None = None,
    mel_scale: MelScale = "htk",
    norm: Norm = "none",
    range_db: float | None = 80.0,
) -> OpSpec:
    """Compute MFCC of a mono sound: [n] → float32 [frames, coefficients]; arguments as `mel_spectrogram`."""
    if coefficients > mels:
        raise ConfigurationError(f"mfcc: coefficients={coefficients} must be at most mels={mels}")
    args = _framing(n_fft, hop, window, shape, center, padding) | {
        "coefficients": coefficients,
        "mels": mels,
        "power": power,
        "f_min": f_min,
        "f_max": f_max or 0.0,
        "mel_scale": mel_scale,
        "norm": norm,
        "range_db": range_db or 0.0,
    }
    return OpSpec("mfcc", _values.field("mfcc", field), args)


def spec_augment(
    field: str,
    *,
    time_masks: int = 2,
    time_width: int = 100,
    frequency_masks: int = 2,
    frequency_width: int = 27,
    time_share: float = 1.0,
    value: float | Literal["mean"] = 0.0,
) -> OpSpec:
    """Mask random bands of a spectrogram: [frames, bins] → the same.

    Arguments:
        time_masks, frequency_masks: how many.
        time_width, frequency_width: the most frames, or bins, of each; drawn from 0 to this.
        time_share: the most of the frames that one mask covers, 0 to 1.
        value: what masked places become; "mean" for the mean of the spectrogram.
    """
    mean = value == "mean"
    args = {
        "time_masks": time_masks,
        "time_width": time_width,
        "frequency_masks": frequency_masks,
        "frequency_width": frequency_width,
        "time_share": _values.probability("spec_augment", time_share),
        "value": [0.0 if isinstance(value, str) else _values.number("spec_augment", "value", value)],
        "mean": mean,
    }
    if isinstance(value, str) and not mean:
        raise ConfigurationError(f"spec_augment: value must be a number or 'mean', not {value!r}")
    return OpSpec("spec_augment", _values.field("spec_augment", field), args)
