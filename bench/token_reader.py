"""`python -m bench.token_reader NAME ENDPOINT FOLDER`: passes over stored tokens, one for each line on stdin.

Law: a row of each batch is looked at: tokens count upwards within a text. `write NAME FOLDER TOKENS` writes
the shards of a peer.
"""

from __future__ import annotations

import os
import sys
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from bench.peers.token_loaders import LOADERS, WRITERS
from bench.peers.token_rows import BATCH, BUCKET, LENGTH, OURS, VALUES
from bench.timing import answer_rounds, time_pass

if TYPE_CHECKING:
    from collections.abc import Iterable

_EPOCHS = count()


def ours(endpoint: str) -> Iterable[Any]:
    """Packed rows of token files; every round is another epoch of one job."""
    import meshsdk as mesh

    with mesh.connect(endpoint) as client:
        ds = mesh.open(f"s3://{BUCKET}/ours", kind="tokens", client=client).pack("tokens", length=LENGTH)
        with mesh.Loader(ds, BATCH, seed=7, tail="drop") as loader:
            loader.set_epoch(next(_EPOCHS))
            for batch in loader:
                yield batch["tokens", "tokens.segments"]


def look(batch: Any) -> int:
    """How many tokens of texts it has."""
    tokens, segments = batch if isinstance(batch, tuple) else (torch.as_tensor(batch), None)
    if tokens.shape != (BATCH, LENGTH):
        raise SystemExit(f"no rows of tokens: {tuple(tokens.shape)}")
    row = tokens[0].long()
    steps = row[1:] - row[:-1]
    right = (steps == 1) | (steps == 1 - VALUES)
    if segments is not None:
        right |= (segments[0, 1:] != segments[0, :-1]) | (segments[0, 1:] == 0)
    if not bool(right.all()):
        raise SystemExit("the tokens do not count upwards")
    return tokens.numel() if segments is None else int((segments > 0).sum())


def main() -> None:
    """Write, or warm up and take a round for each line."""
    if sys.argv[1] == "write":
        WRITERS[sys.argv[2]](sys.argv[3], int(sys.argv[4]))
        return
    name, endpoint, folder = sys.argv[1:4]
    torch.set_num_threads(1)

    def epoch() -> Iterable[Any]:
        return ours(endpoint) if name == OURS else LOADERS[name](endpoint, folder)

    time_pass("warm up", epoch, look)

    def measure() -> dict[str, float]:
        done = time_pass("round", epoch, look)
        return {"rate": done.samples / done.seconds, "client_us": 1e9 * done.cpu_s / done.samples}

    answer_rounds(measure)
    os._exit(0)  # workers that wait for a batch nobody takes


if __name__ == "__main__":
    main()
