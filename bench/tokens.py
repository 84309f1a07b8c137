"""The row of stored tokens: packed rows of token files, beside the formats in which peers store tokens.

Law: one daemon is the S3 server of all; the same tokens, rows of one length, batches of one size, two workers
each; the local caches of peers begin empty. The memory map reads a file on the local disk, and no server.
Contenders take turns.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from bench import photo_dataset
from bench.peers.token_rows import (
    BATCH,
    BUCKET,
    LENGTH,
    MAPPED,
    MAPPED_NUMBERED,
    NUMBERED,
    OURS,
    PEERS,
    SHARD_ROWS,
    VALUES,
    WORKERS,
)
from bench.ready_process import StandingContender, measure_in_turn
from meshsdk.client.s3_client import connect
from meshwire.formats.token_index import encode_token_index

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.results import Figure
    from bench.rows import Scale
    from bench.servers import Server

NAME: Final = "tokens"
CONTENDERS: Final = (OURS, NUMBERED, *PEERS)
LEAST, MOST_CPU = 2.0, 0.1
MEAN: Final = 500  # tokens of a text
FORMATS: Final = {"streaming": "mds", "litdata": "lit"}
TEXT: Final = f"""\
Rows of {LENGTH:,} tokens in random order, batches of {BATCH}. Ours are texts of {MEAN} tokens on average in
token files. *{OURS}* is sent the tokens alone, as the peers are, *{NUMBERED}* also the segment and the
position of each token: 2 and 10 bytes a token. Their tokens are uint16, as they are stored; the peers' are
int64. *streaming* and *litdata* read their own shards of rows, cut from one stream, with {WORKERS} workers
and an empty local cache. *memmap* reads windows of one local file in a `DataLoader` with {WORKERS} workers,
as Megatron does: no server, no network. *memmap+segments* also numbers the texts of a window, and the tokens
of each, from a file of the ends of texts (Megatron's `--reset-position-ids`). A round is a pass over all."""


def title(scale: Scale) -> str:
    return f"Stored tokens, {scale.tokens / 1e6:.0f} million"


def measure(
    server: Server, peers: Sequence[str], scale: Scale, scratch: Path, say: Callable[[str], None]
) -> Iterator[Figure]:
    """Fill, start a process for each contender, then rounds in turn."""
    say(f"{NAME}: filling")
    folder = scratch / f"tokens-{scale.tokens}"
    _fill(server, peers, scale.tokens, folder)
    yield from measure_in_turn(
        NAME,
        (OURS, NUMBERED, MAPPED, MAPPED_NUMBERED, *peers),
        lambda name: _contender(name, server, folder),
        scale.rounds,
        say,
    )


def _contender(name: str, server: Server, folder: Path) -> StandingContender:
    python = photo_dataset.peers_python(folder.parent) if name in FORMATS else Path(sys.executable)
    words = ["bench.token_reader", name, server.endpoint, str(folder)]
    return StandingContender(name, words, server, python=str(python))


def _fill(server: Server, peers: Sequence[str], tokens: int, folder: Path) -> None:
    assert server.account is not None
    account = server.account
    stream = (np.arange(tokens) % VALUES).astype(np.uint16)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stream.bin").write_bytes(stream.tobytes())
    (folder / "ends.bin").write_bytes(_lengths(tokens).cumsum().tobytes())
    with connect(
        server.endpoint, access_key=account.access_key, secret_key=account.secret_key, region="us-east-1"
    ) as client:
        client.create_bucket(BUCKET)
        for number, begin in enumerate(range(0, tokens, SHARD_ROWS * LENGTH)):
            some = stream[begin : begin + SHARD_ROWS * LENGTH]
            client.put(BUCKET, f"ours/{number:05}.bin", some.tobytes())
            client.put(BUCKET, f"ours/{number:05}.idx", encode_token_index(_lengths(some.size), "uint16"))
        for name in peers:
            written = folder / FORMATS[name]
            if not (written / "index.json").exists():
                _write(photo_dataset.peers_python(folder.parent), name, written, tokens)
            for file in sorted(path for path in written.rglob("*") if path.is_file()):
                client.put(BUCKET, f"{FORMATS[name]}/{file.relative_to(written)}", file.read_bytes())


def _write(python: Path, name: str, folder: Path, tokens: int) -> None:
    words = [str(python), "-m", "bench.token_reader", "write", name, str(folder), str(tokens)]
    done = subprocess.run(words, cwd=photo_dataset.ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise photo_dataset.PeersError(f"writing tokens for {name} failed: {done.stderr[-600:]}")


def _lengths(tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Lengths of texts that make up so many tokens."""
    drawn = np.random.default_rng(7).geometric(1 / MEAN, 4 * tokens // MEAN + 4).cumsum()
    ends = np.append(drawn[drawn < tokens], tokens)
    return np.diff(ends, prepend=0)
