"""The row of raw samples: lines of 60 bytes in random order, beside the formats in which peers store samples.

Law: the same samples, batches of one size, two workers each; the local caches of peers begin empty. One
daemon is the S3 server of those that read S3; *datasets* and *arrayrecord* read the local disk, without a
server. Contenders take turns.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Final

from bench import photo_dataset
from bench.peers.raw_rows import (
    BATCH,
    BEYOND,
    BUCKET,
    BUFFER,
    FORMATS,
    OURS,
    PEERS,
    SHARDS,
    WIDTH,
    WORKERS,
    samples,
)
from bench.ready_process import StandingContender, measure_in_turn
from bench.tables import BARS_HEAD, number, table, verdict
from meshsdk.client.s3_client import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from bench.results import Figure, RowResult
    from bench.rows import Scale
    from bench.servers import Server

NAME: Final = "raw-samples"
LEAST, RATE, MOST_US = 5.0, 500_000, 4.0
TEXT: Final = f"""\
Samples of {WIDTH} bytes without ops, in random order, batches of {BATCH:,}. *meshsdk* reads lines of text
files in a full shuffle. *webdataset*, *streaming* and *litdata* read shards of their own formats from the
same daemon, *datasets* (streaming) lines of text files and *arrayrecord* records of the local disk, the last
in one process and the others with {WORKERS} workers. *webdataset* and *datasets* shuffle in a buffer of
{BUFFER:,} samples. Ours are arrays of bytes and offsets, theirs lists of samples. A round is a pass over
all, with the start of its workers. The target is 5 × the best of four peers; *{BEYOND[0]}* is shown beside
them."""
_ON_DISK: Final = ("datasets", "arrayrecord")


def title(scale: Scale) -> str:
    return f"Raw samples of {WIDTH + 1} bytes, {scale.raw_samples:,}"


def measure(
    server: Server, peers: Sequence[str], scale: Scale, scratch: Path, say: Callable[[str], None]
) -> Iterator[Figure]:
    """Fill, start a process for each contender, then rounds in turn."""
    say(f"{NAME}: filling")
    folder = scratch / f"raw-{scale.raw_samples}"
    _fill(server, peers, scale.raw_samples, folder)
    yield from measure_in_turn(
        NAME, (OURS, *peers), lambda name: _contender(name, server, folder), scale.rounds, say
    )


def _contender(name: str, server: Server, folder: Path) -> StandingContender:
    python = "" if name == OURS else str(photo_dataset.peers_python(folder.parent))
    words = ["bench.raw_reader", name, server.endpoint, str(folder), str(server.child.process.pid)]
    return StandingContender(name, words, server, python=python)


def _fill(server: Server, peers: Sequence[str], lines: int, folder: Path) -> None:
    assert server.account is not None
    account = server.account
    python = photo_dataset.peers_python(folder.parent)
    with connect(
        server.endpoint, access_key=account.access_key, secret_key=account.secret_key, region="us-east-1"
    ) as client:
        client.create_bucket(BUCKET)
        for shard in range(SHARDS):
            client.put(BUCKET, f"txt/{shard}.txt", b"".join(line + b"\n" for line in samples(shard, lines)))
        for name in peers:
            written = folder / FORMATS[name]
            if not (folder / f"{name}.ready").exists():
                _write(python, name, written, lines)
                (folder / f"{name}.ready").touch()
            for file in sorted(path for path in written.rglob("*") if path.is_file()):
                if name not in _ON_DISK:
                    client.put(BUCKET, f"{FORMATS[name]}/{file.relative_to(written)}", file.read_bytes())


def _write(python: Path, name: str, folder: Path, lines: int) -> None:
    words = [str(python), "-m", "bench.raw_reader", "write", name, str(folder), str(lines)]
    done = subprocess.run(words, cwd=photo_dataset.ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise photo_dataset.PeersError(f"writing samples for {name} failed: {done.stderr[-600:]}")


def section(rows: Mapping[str, RowResult]) -> list[str]:
    """The row in the report."""
    result = rows.get(NAME)
    if result is None or not result.contenders():
        return []
    names = result.contenders()
    lines = [
        ["samples a second", *(number(result.value(name, "rate"), 0) for name in names)],
        ["client CPU µs a sample", *(number(result.value(name, "client_us"), 2) for name in names)],
        ["server CPU µs a sample", *(number(result.value(name, "server_us"), 2) for name in names)],
    ]
    rate, cost = result.value(OURS, "rate"), result.value(OURS, "server_us")
    bars = [
        [f"{OURS}, samples a second", number(rate, 0), verdict(rate, RATE)],
        [f"{OURS}, server CPU µs a sample", number(cost, 2), verdict(cost, MOST_US, at_most=True)],
    ]
    for name in PEERS:
        ratio = result.ratio(OURS, name, "rate")
        if ratio is not None:
            told = "" if name in BEYOND else verdict(ratio, LEAST)
            bars.append([f"{OURS} ÷ {name}", number(ratio, 1, "×"), told])
    return [f"## {result.title}", TEXT, table(["", *names], lines), table(BARS_HEAD, bars)]
