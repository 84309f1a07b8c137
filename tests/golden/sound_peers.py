"""Sounds as torchaudio, librosa and Whisper transform them: tests/golden/ops/sound_peers.json.

    pip install --no-deps --target PEERS torchaudio==2.11.0 librosa==0.11.0 audioread lazy_loader soxr numba \
        llvmlite pooch joblib decorator msgpack platformdirs
    rm PEERS/torchaudio/lib/*.so          # compiled for a torch with CUDA, and not needed
    PYTHONPATH=PEERS python -m tests.golden.sound_peers > tests/golden/ops/sound_peers.json

They are not in the development environment. Stored are every 31st number of a result, of a chirp with
noise that `chirp` makes alike everywhere.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

RATE = 16_000
EVERY = 31
_LIBROSA = {"mel_scale": "slaney", "norm": "slaney", "padding": "zeros", "n_fft": 2048, "hop": 512}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "resample-44100-16000": ("resample", 44_100, {"rate": 16_000}),
    "resample-16000-44100": ("resample", 16_000, {"rate": 44_100}),
    "resample-48000-16000-best": ("resample", 48_000, {"rate": 16_000, "quality": "best"}),
    "spectrogram": ("spectrogram", RATE, {}),
    "magnitude": (
        "spectrogram",
        RATE,
        {"n_fft": 512, "hop": 128, "window": 400, "shape": "hamming", "power": 1},
    ),
    "stft": ("spectrogram", RATE, {"n_fft": 512, "hop": 128, "power": None, "center": False}),
    "mel": ("mel_spectrogram", RATE, {"hop": 160}),
    "mel-slaney": (
        "mel_spectrogram",
        RATE,
        {"hop": 160, "mel_scale": "slaney", "norm": "slaney", "f_min": 40, "f_max": 7600},
    ),
    "mel-db": ("mel_spectrogram", RATE, {"hop": 160, "log": "db"}),
    "mel-librosa": ("mel_spectrogram", RATE, {"mels": 128, **_LIBROSA}),
    "mel-whisper": (
        "mel_spectrogram",
        RATE,
        {"hop": 160, "mel_scale": "slaney", "norm": "slaney", "log": "whisper"},
    ),
    "mfcc": ("mfcc", RATE, {}),
    "mfcc-librosa": ("mfcc", RATE, {"coefficients": 20, "mels": 128, **_LIBROSA}),
    "trim": ("trim_silence", RATE, {"db": 20.0, "frame": 512, "hop": 100}),
}
"""(op, rate of the sound, arguments)."""


def chirp() -> npt.NDArray[np.float32]:
    """9,000 values: a rising tone between near silence, with noise."""
    time = np.arange(9_000) / RATE
    noise = np.random.RandomState(7).uniform(-0.05, 0.05, 9_000)  # frozen by numpy's policy
    made = 0.3 * np.sin(2 * np.pi * (200 + 5_000 * time) * time) + noise
    made[:1500] *= 1e-5
    made[8000:] *= 1e-5
    return np.round(made * 2**20).astype(np.float32) / np.float32(2**20)


def results() -> dict[str, Any]:
    """Return the shape of each result, and every 31st of its numbers."""
    import librosa
    import torch
    import torchaudio

    sound = chirp()
    value = torch.from_numpy(sound)
    made, f = torchaudio.transforms, torchaudio.functional
    best = {
        "lowpass_filter_width": 64,
        "rolloff": 0.9475937167399596,
        "resampling_method": "sinc_interp_kaiser",
        "beta": 14.769656459379492,
    }
    mel = {"n_fft": 400, "hop_length": 160, "n_mels": 80}
    slaney = {"mel_scale": "slaney", "norm": "slaney"}
    filters = librosa.filters.mel(sr=RATE, n_fft=400, n_mels=80)  # as openai-whisper's own file has them
    spectrum = torch.stft(value, 400, 160, window=torch.hann_window(400), return_complex=True)[..., :-1].abs()
    logs = torch.clamp(torch.from_numpy(filters) @ spectrum**2, min=1e-10).log10()
    whisper = (torch.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0  # whisper/audio.py, log_mel_spectrogram
    found = {
        "resample-44100-16000": f.resample(value, 44_100, 16_000),
        "resample-16000-44100": f.resample(value, 16_000, 44_100),
        "resample-48000-16000-best": f.resample(value, 48_000, 16_000, **best),
        "spectrogram": made.Spectrogram(400)(value).T,
        "magnitude": made.Spectrogram(
            512, win_length=400, hop_length=128, power=1, window_fn=torch.hamming_window
        )(value).T,
        "stft": torch.view_as_real(
            made.Spectrogram(512, hop_length=128, power=None, center=False)(value)
        ).permute(1, 0, 2),
        "mel": made.MelSpectrogram(RATE, **mel)(value).T,
        "mel-slaney": made.MelSpectrogram(RATE, f_min=40, f_max=7600, **mel, **slaney)(value).T,
        "mel-db": made.AmplitudeToDB("power", 80)(made.MelSpectrogram(RATE, **mel)(value)).T,
        "mel-librosa": librosa.feature.melspectrogram(y=sound, sr=RATE).T,
        "mel-whisper": whisper.T,
        "mfcc": made.MFCC(RATE)(value).T,
        "mfcc-librosa": librosa.feature.mfcc(y=sound, sr=RATE).T,
        "trim": librosa.effects.trim(sound, top_db=20, frame_length=512, hop_length=100)[0],
    }
    arrays = {name: np.asarray(each, np.float32) for name, each in found.items()}
    return {
        name: {"shape": each.shape, "values": [float(f"{v:.8g}") for v in each.reshape(-1)[::EVERY].tolist()]}
        for name, each in arrays.items()
    }


if __name__ == "__main__":
    print(json.dumps(results()))
