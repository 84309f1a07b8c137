"""The rows of sounds and films: windows as log-mel spectrograms, clips as frames, beside torch's DataLoader.

Law: one daemon is the S3 server of all; the same files, batches of one size, the same features. Invariant:
contenders take turns (`bench.interleave`), loaders begin empty; the CPU time of clients and of the server
stands beside the rate.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from bench.ready_process import StandingContender, measure_in_turn
from bench.tables import number, table
from meshsdk.client.s3_client import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from bench.results import Figure, RowResult
    from bench.rows import Scale
    from bench.servers import Server

OURS, NAIVE = "meshsdk", "DataLoader"
CONTENDERS: Final = (OURS, NAIVE)
WORKERS: Final = 2
_DIFFERENT: Final = 8  # files that are made; all are copies of them


@dataclass(frozen=True, slots=True)
class Media:
    """A row. `batch`: samples of a batch; `shape`: of one of them; `seconds`: of a file."""

    name: str
    title: str
    batch: int
    shape: tuple[int, ...]
    seconds: int
    text: str


SOUNDS: Final = Media(
    "sounds",
    "Windows of recordings, as log-mel spectrograms",
    32,
    (101, 80),
    10,
    "FLAC files of 10 seconds, 44.1 kHz, stereo; a sample is a random second at 16 kHz, mono, as 80 mel "
    f"bands in decibels. *{NAIVE}* has {WORKERS} workers that get the file from the same daemon, read the "
    "window with soundfile, resample it and compute the spectrum with torch, as torchaudio does.",
)
FILMS: Final = Media(
    "films",
    "Clips of films",
    4,
    (8, 3, 112, 112),
    4,
    "H.264 in MP4, 320×240, 4 seconds of 25 frames, a key frame a second; a sample is 8 frames, every "
    f"second one, from a random place, resized and cropped to 112. *{NAIVE}* has {WORKERS} workers that get "
    "the file from the same daemon and decode with PyAV from the key frame on.",
)
ROWS: Final = (SOUNDS, FILMS)
BUCKET: Final = {SOUNDS.name: "sounds", FILMS.name: "films"}


def title(media: Media, scale: Scale) -> str:
    return f"{media.title}, {scale.media_files} files"


def measure(media: Media, server: Server, scale: Scale, say: Callable[[str], None]) -> Iterator[Figure]:
    """Fill, start a process for each contender, then rounds in turn."""
    say(f"{media.name}: filling")
    _fill(media, server, scale.media_files)
    yield from measure_in_turn(
        media.name, CONTENDERS, lambda name: _contender(name, media, server, scale), scale.rounds, say
    )


def _contender(name: str, media: Media, server: Server, scale: Scale) -> StandingContender:
    seconds, pid = str(scale.reading), str(server.child.process.pid)
    words = ["bench.media_reader", name, media.name, server.endpoint, seconds, pid]
    return StandingContender(name, words, server)


def _fill(media: Media, server: Server, files: int) -> None:
    assert server.account is not None
    make, account = (_recording if media == SOUNDS else _film), server.account
    with connect(
        server.endpoint, access_key=account.access_key, secret_key=account.secret_key, region="us-east-1"
    ) as client:
        client.create_bucket(BUCKET[media.name])
        bodies = [make(at) for at in range(min(_DIFFERENT, files))]
        for at in range(files):
            ending = "flac" if media == SOUNDS else "mp4"
            client.put(BUCKET[media.name], f"{at:05d}.{ending}", bodies[at % len(bodies)])


def _recording(number: int) -> bytes:
    import soundfile

    time = np.arange(SOUNDS.seconds * 44_100) / 44_100
    noise = np.random.default_rng(number).normal(0, 0.02, (len(time), 2))
    tone = np.sin(2 * np.pi * (200 + 20 * number % 2_000 + 100 * time) * time)
    out = io.BytesIO()
    soundfile.write(out, 0.3 * tone[:, None] + noise, 44_100, format="FLAC", subtype="PCM_16")
    return out.getvalue()


def _film(number: int) -> bytes:
    import av

    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream: Any = file.add_stream("libx264", rate=25, options={"preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = 320, 240, "yuv420p"
        stream.codec_context.gop_size = 25
        y, x = np.mgrid[:240, :320]
        for at in range(FILMS.seconds * 25):
            pixels = np.stack([x + 3 * at + number, y + 2 * at, (x + y) // 2 - at], axis=2) % 256
            frame = av.VideoFrame.from_ndarray(pixels.astype(np.uint8), format="rgb24")
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return out.getvalue()


def section(rows: Mapping[str, RowResult]) -> list[str]:
    """The part of the report."""
    told: list[str] = []
    for media in ROWS:
        result = rows.get(media.name)
        if result is None or not result.contenders():
            continue
        lines = [
            [
                name,
                number(result.value(name, "rate"), 0),
                number((result.value(name, "client_us") or 0) / 1e3, 2),
                number((result.value(name, "server_us") or 0) / 1e3, 2),
            ]
            for name in result.contenders()
        ]
        lines.append([f"{OURS} ÷ {NAIVE}", number(result.ratio(OURS, NAIVE, "rate"), 2, "×"), "", ""])
        head = ["", "samples a second", "client CPU ms a sample", "server CPU ms a sample"]
        told += [f"## {result.title}", media.text, table(head, lines)]
    return told
