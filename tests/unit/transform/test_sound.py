"""Sounds: windows equal the whole, spectra and rates are torchaudio's and librosa's, bad files are bad."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from meshd.transform.builtin.sound_resampler import resampler
from meshd.transform.compiler import complete_spec
from meshd.transform.errors import BadSampleError, MissingLibraryError, UnknownBuildError
from meshd.transform.op_chain import compile_chain
from meshd.transform.op_types import BYTES, FieldType
from meshwire.plan.keyed_random import KeyedRandom
from meshwire.plan.plan_spec import OpSpec, parse_spec
from meshwire.strict_json import PlanError
from tests.golden.sound_peers import CASES, EVERY, chirp

PEERS = json.loads((Path(__file__).parents[2] / "golden/ops/sound_peers.json").read_text())
FORMS = {
    "wav": ("WAV", "PCM_16"),
    "wav-float": ("WAV", "FLOAT"),
    "flac": ("FLAC", "PCM_16"),
    "mp3": ("MP3", "MPEG_LAYER_III"),
    "vorbis": ("OGG", "VORBIS"),
    "opus": ("OGG", "OPUS"),
}
_RNG = np.random.default_rng(3)
SOUND = np.stack(
    [0.4 * np.sin(np.arange(24_000) / 7), _RNG.uniform(-0.2, 0.2, 24_000) * np.arange(24_000) / 24_000],
    axis=1,
).astype(np.float32)


def file_of(form: str = "wav", sound: Any = SOUND, rate: int = 24_000) -> bytes:
    out = io.BytesIO()
    kind, subtype = FORMS[form]
    soundfile.write(out, sound, rate, format=kind, subtype=subtype)
    return out.getvalue()


def rendered(
    data: Any, *steps: tuple[str, dict[str, Any]], start: FieldType = BYTES, fuse: bool = True, seed: int = 1
) -> Any:
    specs = [(number, OpSpec(op, "x", args)) for number, (op, args) in enumerate(steps)]
    chain = compile_chain(specs, fuse=fuse, start=start)
    return chain.render(data, lambda index: KeyedRandom(seed, 0, 0, index))


def decoded(data: bytes, **args: Any) -> Any:
    return rendered(data, ("decode_audio", {"rate": 24_000, "channels": 2} | args))


@pytest.mark.parametrize("name", CASES)
def test_ops_give_what_torchaudio_and_librosa_give(name: str) -> None:
    op, rate, args = CASES[name]
    made = rendered(chirp(), (op, args), start=FieldType("array", "float32", (None,), rate=rate))
    wanted = np.array(PEERS[name]["values"])
    assert list(made.shape) == PEERS[name]["shape"]
    # torchaudio computes filters and transforms in float32: its rounding is what differs (docs/sound.md).
    error = np.abs(made.reshape(-1)[::EVERY] - wanted).max() / np.abs(wanted).max()
    assert error < 2e-5, f"{name} differs by {error:.1e} of the largest value"


@pytest.mark.parametrize(("quality", "bound"), [("standard", 2e-3), ("best", 2e-5)])
def test_resampling_keeps_a_tone(quality: Any, bound: float) -> None:
    tone = np.sin(2 * np.pi * 1000 * np.arange(44_100) / 44_100).astype(np.float32)[:, None]
    made = resampler(44_100, 16_000, quality).resample(
        lambda start, stop: tone[start:stop], 44_100, 0, 16_000
    )
    wanted = np.sin(2 * np.pi * 1000 * np.arange(16_000) / 16_000)
    assert np.abs(made[500:-500, 0] - wanted[500:-500]).max() < bound


@pytest.mark.parametrize("form", FORMS)
def test_files_decode_to_what_they_hold(form: str) -> None:
    made = decoded(file_of(form))
    assert made.shape == SOUND.shape
    assert made.dtype == np.float32
    if form.startswith(("wav", "flac")):
        assert np.abs(made - SOUND).max() <= 1 / 32_768
        whole = decoded(file_of(form), dtype="int16")
        np.testing.assert_array_equal(whole, np.clip(np.rint(made * 32_768), -32_768, 32_767))
    else:  # a codec of speech and music drops noise; the tone is what it keeps
        assert np.corrcoef(made[2000:-2000, 0], SOUND[2000:-2000, 0])[0, 1] > 0.99
    np.testing.assert_array_equal(
        decoded(file_of(form), channels=1), (made[:, 0] + made[:, 1]) / np.float32(2)
    )


@pytest.mark.parametrize(
    ("form", "rate"),
    [*((form, 16_000) for form in FORMS), ("flac", 24_000), ("flac", 44_100), ("mp3", 24_000)],
)
def test_a_window_is_decoded_alone_and_equals_the_whole(form: str, rate: int) -> None:
    data = file_of(form)
    steps: list[tuple[str, dict[str, Any]]] = [
        ("decode_audio", {"rate": rate, "channels": 2}),
        ("mono", {}),
        ("window", {"extents": [5_000], "at": "random"}),
    ]
    for seed in range(6):
        plain = rendered(data, *steps, fuse=False, seed=seed)
        np.testing.assert_array_equal(rendered(data, *steps, seed=seed), plain)
    short: list[tuple[str, dict[str, Any]]] = [steps[0], ("window", {"extents": [60_000, None], "pad": 0.25})]
    padded = rendered(data, *short)
    np.testing.assert_array_equal(padded, rendered(data, *short, fuse=False))
    assert padded.shape == (60_000, 2)
    assert padded[-1].tolist() == [0.25, 0.25]


def test_a_window_does_not_read_beyond_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    reading = soundfile.SoundFile.read

    def counted(self: Any, frames: int, **more: Any) -> Any:
        read.append(frames)
        return reading(self, frames, **more)

    monkeypatch.setattr(soundfile.SoundFile, "read", counted)
    for form in ("wav", "flac"):
        rendered(
            file_of(form), ("decode_audio", {"rate": 16_000, "channels": 1}), ("window", {"extents": [1_000]})
        )
        assert sum(read) < 2_000
        read.clear()


def test_rate_and_channels_come_from_the_first_sample() -> None:
    spec = parse_spec({"ops": [{"op": "decode_audio", "field": "x"}]})
    (op,) = complete_spec(spec, lambda _: file_of("flac")).ops
    assert (op.args["rate"], op.args["channels"]) == (24_000, 2)
    with pytest.raises(PlanError, match="first sample does not tell"):
        complete_spec(spec, lambda _: b"text")


def test_a_node_without_the_library_refuses_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise MissingLibraryError("soundfile", "audio")

    monkeypatch.setattr("meshd.transform.builtin.sound.load_library", missing)
    with pytest.raises(UnknownBuildError, match=r"install shardmesh\[audio\] on every node"):
        compile_chain([(0, OpSpec("decode_audio", "x", {"rate": 16_000, "channels": 1}))])


def wav(rate: int = 24_000, channels: int = 1, size: int | None = None, data: bytes = bytes(4_000)) -> bytes:
    body = (1).to_bytes(2, "little") + channels.to_bytes(2, "little") + rate.to_bytes(4, "little")
    body += (rate * channels * 2 % 2**32).to_bytes(4, "little") + (channels * 2 % 2**16).to_bytes(2, "little")
    body += (16).to_bytes(2, "little")
    told = len(data) if size is None else size
    return (
        b"RIFF" + (36 + len(data)).to_bytes(4, "little") + b"WAVEfmt " + (16).to_bytes(4, "little") + body
        + b"data" + told.to_bytes(4, "little") + data
    )  # fmt: skip


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


HOSTILE = {
    "no sound": (b"\x89PNG\r\n\x1a\n" + bytes(100), "not a WAV, FLAC, MP3 or Ogg file"),
    "nothing": (b"", "not a WAV"),
    "a format that libsndfile knows": (b"FORM\0\0\0\x20AIFFCOMM" + bytes(40), "not a WAV"),
    "only the beginning": (b"RIFF\0\0\0\0WAVE", "without data"),
    "a shortened WAV": (file_of("wav")[:-1_000], "truncated"),
    "a shortened FLAC": (file_of("flac")[:-1_000], "truncated|damaged|not a readable"),
    "a shortened Vorbis": (file_of("vorbis")[:-1_000], "truncated"),
    "a shortened MP3": (file_of("mp3")[:-2_000], "truncated"),
    "a damaged FLAC": (flipped(file_of("flac"), 20_000), "damaged|truncated"),
    "a damaged Opus": (flipped(file_of("opus"), 9_000), "checksum"),
    "two streams": (file_of("opus") * 2, "Ogg page"),
    "a length of 4 GB": (wav(size=0xFFFFFFF0), "truncated"),
    "0 Hz": (wav(rate=0), "not a readable|rate"),
    "1 Hz": (wav(rate=1), "a rate of 1 Hz"),
    "4 GHz": (wav(rate=0xFFFFFFFF), "not a readable|rate"),
    "no channels": (wav(channels=0), "not a readable|channels"),
    "60,000 channels": (wav(channels=60_000), "not a readable|channels"),
    "NaN": (file_of("wav-float", np.full((100, 2), np.nan, np.float32)), "not finite"),
    "infinite": (file_of("wav-float", np.full((100, 2), -np.inf, np.float32)), "not finite"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_bad_samples(name: str) -> None:
    data, reason = HOSTILE[name]
    with pytest.raises(BadSampleError, match=reason):
        decoded(data)


@pytest.mark.parametrize("form", FORMS)
def test_damage_anywhere_is_bad_or_a_sound(form: str) -> None:
    """Of formats without checksums, damage may give another sound; never a crash or a shorter one."""
    data = file_of(form, SOUND[:6_000])
    draws = np.random.default_rng(5)
    for _ in range(60):
        broken = bytearray(data)
        for at in draws.integers(0, len(data), draws.integers(1, 8)):
            broken[at] = draws.integers(0, 256)
        try:
            made = decoded(bytes(broken))
        except BadSampleError:
            continue
        assert made.ndim == 2
        assert np.isfinite(made).all()


def test_a_sound_that_does_not_fit_is_bad_before_it_is_decoded() -> None:
    long = wav(rate=1_000, data=bytes(400_000))
    with pytest.raises(BadSampleError, match="at most 134217728 numbers"):
        decoded(long, rate=768_000, channels=1)
    assert (
        len(rendered(long, ("decode_audio", {"rate": 768_000, "channels": 1}), ("window", {"extents": [9]})))
        == 9
    )


def test_gain_level_and_masks() -> None:
    mono = FieldType("array", "float32", (None,), rate=16_000)
    loud = rendered(chirp(), ("gain", {"db": [6.0, 6.0]}), start=mono)
    assert np.abs(loud / np.where(chirp() == 0, 1, chirp())).max() == pytest.approx(10 ** (6 / 20), rel=1e-6)
    assert (
        len({float(rendered(chirp(), ("gain", {"db": 6}), start=mono, seed=seed)[4000]) for seed in range(9)})
        == 9
    )
    assert np.abs(rendered(chirp(), ("normalize_volume", {"db": -6.0}), start=mono)).max() == pytest.approx(
        0.501187, 1e-5
    )
    level = rendered(chirp(), ("normalize_volume", {"by": "rms", "db": -20.0}), start=mono)
    assert np.sqrt(np.mean(level.astype("f8") ** 2)) == pytest.approx(0.1, rel=1e-5)
    silence = np.zeros(100, np.float32)
    assert not rendered(silence, ("normalize_volume", {}), start=mono).any()
    np.testing.assert_array_equal(rendered(silence, ("trim_silence", {}), start=mono), silence)
    spectrogram = FieldType("array", "float32", (None, 40))
    ones = np.ones((200, 40), np.float32)
    args = {"time_masks": 1, "time_width": 50, "frequency_masks": 1, "frequency_width": 8, "time_share": 0.1}
    for seed in range(30):
        masked = rendered(ones, ("spec_augment", args), start=spectrogram, seed=seed) == 0
        assert masked.all(axis=1).sum() <= 20
        assert masked.all(axis=0).sum() <= 8
        assert (masked == masked.all(axis=1)[:, None] | masked.all(axis=0)).all()


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([("mel_spectrogram", {})], "needs a sound"),
        ([("decode_audio", {"rate": 16_000, "channels": 2}), ("mfcc", {})], "put mono before it"),
        (
            [("decode_audio", {"rate": 8_000, "channels": 1}), ("mel_spectrogram", {"f_max": 8_000})],
            "0…4000 Hz",
        ),
        ([("decode_audio", {"rate": 8_000, "channels": 1, "dtype": "int16"}), ("mono", {})], "float32"),
        (
            [("decode_audio", {"rate": 8_000, "channels": 1}), ("spectrogram", {"window": 401})],
            "longer than n_fft",
        ),
    ],
)
def test_ops_that_do_not_fit_are_refused(steps: list[tuple[str, dict[str, Any]]], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        rendered(b"", *steps)
