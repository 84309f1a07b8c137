"""`python -m bench.media_reader LOADER ROW ENDPOINT SECONDS SERVER`: spectra or clips as torch batches.

Law: a line on stdin is a round: batches for so many seconds, from a loader that begins empty; then a line of
JSON. Clocks run from the first batch to the last, so that what is prepared and not taken counts for nobody.
"""

from __future__ import annotations

import io
import random
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

import meshsdk as mesh
from bench.media_row import BUCKET, NAIVE, ROWS, SOUNDS, WORKERS
from bench.naive_loader import shuffled_rounds
from bench.steady_rate import serve_rounds
from meshd.transform.builtin.mel_scale import mel_filters
from meshd.transform.builtin.sound_resampler import resampler
from meshsdk import ops

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from bench.media_row import Media

RATE, FILE_RATE, BANDS, FFT, HOP, SIDE = 16_000, 44_100, 80, 400, 160, 112


class Files(torch.utils.data.Dataset[Any]):  # type: ignore[misc]  # torch is not read by mypy
    """What one writes who has files in a bucket: one request, and the usual library, a sample."""

    def __init__(self, endpoint: str, media: Media) -> None:
        self._endpoint, self._media = endpoint, media
        self._client: Any = None
        with mesh.connect(endpoint) as client:
            self._keys = [entry.key for entry in client.list(BUCKET[media.name])]
        filters = mel_filters(RATE, FFT, BANDS, 0.0, RATE / 2, "htk", "none")
        self._bands = torch.zeros(BANDS, FFT // 2 + 1)
        for row, (first, weights) in enumerate(filters.bands):
            self._bands[row, first : first + len(weights)] = torch.from_numpy(weights)
        self._taper = torch.hann_window(FFT)
        self._kernel, self._width = _torchaudio_kernel()

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> torch.Tensor:
        self._client = self._client or mesh.connect(self._endpoint)
        data = self._client.get(BUCKET[self._media.name], self._keys[index])
        return self._spectrum(data) if self._media == SOUNDS else _clip(data)

    def _spectrum(self, data: bytes) -> torch.Tensor:
        import soundfile

        with soundfile.SoundFile(io.BytesIO(data)) as file:
            file.seek(random.randint(0, file.frames - FILE_RATE))
            sound = torch.from_numpy(file.read(FILE_RATE, dtype="float32").mean(axis=1))
        padded = functional.pad(sound, (self._width, self._width + 441))
        sound = functional.conv1d(padded[None, None], self._kernel, stride=441)[0].T.reshape(-1)[:RATE]
        spectrum = torch.stft(sound, FFT, HOP, window=self._taper, return_complex=True).abs() ** 2
        levels = 10 * torch.log10(torch.clamp(self._bands @ spectrum, min=1e-10))
        return torch.maximum(levels, levels.max() - 80).T


def _torchaudio_kernel() -> tuple[torch.Tensor, int]:
    """The filters of torchaudio's `resample` from 44.1 to 16 kHz, in its layout: one of 475 taps a phase."""
    made = resampler(FILE_RATE, RATE, "standard")
    width = -int(made.first[0])
    kernel = torch.zeros(made.new, 1, 2 * width + made.old)
    for phase, (first, taps) in enumerate(zip(made.first.tolist(), made.taps, strict=True)):
        kernel[phase, 0, first + width : first + width + len(taps)] = torch.from_numpy(taps)[
            : kernel.shape[2] - first - width
        ]
    return kernel, width


def _clip(data: bytes) -> torch.Tensor:
    import av

    with av.open(io.BytesIO(data)) as file:
        stream: Any = file.streams.video[0]
        stream.codec_context.thread_count = 1
        start = random.randint(0, stream.frames - 15)
        tick = int(1 / (stream.average_rate * stream.time_base))
        wanted = {(start + 2 * number) * tick for number in range(8)}
        file.seek(start * tick, stream=stream)
        frames = []
        for frame in file.decode(stream):
            if frame.pts in wanted:
                frames.append(frame.to_ndarray(format="rgb24"))
            if frame.pts is not None and frame.pts >= max(wanted):
                break
    clip = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
    clip = functional.interpolate(clip, (128, 171), mode="bilinear", antialias=True)
    top, left = random.randint(0, 128 - SIDE), random.randint(0, 171 - SIDE)
    return clip[:, :, top : top + SIDE, left : left + SIDE]


def ours(endpoint: str, media: Media) -> Generator[Iterator[torch.Tensor], None, None]:
    """Rounds of a loader, each of a plan of its own."""
    sounds = (
        ops.decode_audio("x", rate=RATE, channels=1),
        ops.window("x", [RATE]),
        ops.mel_spectrogram("x", BANDS, n_fft=FFT, hop=HOP, log="db"),
    )
    films = (
        ops.decode_video("x", 8, step=2),
        ops.resize("x", [128, 171]),
        ops.random_crop("x", SIDE),
        ops.to_chw("x"),
    )
    with mesh.connect(endpoint) as client:
        ending = "flac" if media == SOUNDS else "mp4"
        ds = mesh.open(f"s3://{BUCKET[media.name]}", fields={"x": ending}, client=client)
        ds = ds.map(*(sounds if media == SOUNDS else films))
        number = 0
        while True:
            number += 1
            with mesh.Loader(ds, media.batch, seed=number, tail="drop") as loader:
                yield (batch["x"] for _ in iter(int, 1) for batch in loader)


def main() -> None:
    """Warm up, then a round a line."""
    loader, row, endpoint, seconds, server = *sys.argv[1:4], float(sys.argv[4]), int(sys.argv[5])
    torch.set_num_threads(1)
    media = next(media for media in ROWS if media.name == row)

    def look(batch: torch.Tensor) -> int:
        if tuple(batch.shape) != (media.batch, *media.shape):
            raise SystemExit(f"no batch of {media.name}: {tuple(batch.shape)}")
        return media.batch

    rounds = (
        shuffled_rounds(Files(endpoint, media), media.batch, WORKERS)
        if loader == NAIVE
        else ours(endpoint, media)
    )
    serve_rounds(rounds, look, seconds, server)


if __name__ == "__main__":
    main()
