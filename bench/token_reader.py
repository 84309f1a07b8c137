"""`python -m bench.token_reader NAME ENDPOINT FOLDER`: passes over stored tokens, one for each line on stdin.

Law: a row of each batch is looked at: tokens count upwards within a text; without segments, of which the
ends of texts are not known, nearly all of a row. `write NAME FOLDER TOKENS` writes the shards of a peer.
"""

from __future__ import annotations

import os
import sys
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bench.peers.token_loaders import LOADERS, WRITERS
from bench.peers.token_rows import BATCH, BUCKET, FILLING, LENGTH, NUMBERED, OURS, VALUES
from bench.timing import answer_rounds, time_pass

if TYPE_CHECKING:
    from collections.abc import Iterable

_EPOCHS = count()


def ours(endpoint: str, *, numbered: bool) -> Iterable[Any]:
    """Packed rows of token files; every round is another epoch of one job."""
    import meshsdk as mesh

    with mesh.connect(endpoint) as client:
        ds = mesh.open(f"s3://{BUCKET}/ours", kind="tokens", client=client)
        if numbered:
            ds = ds.pack("tokens", length=LENGTH)
        else:
            ds = ds.pack("tokens", length=LENGTH, value=FILLING, segments=False, positions="none")
        with mesh.Loader(ds, BATCH, seed=7, tail="drop") as loader:
            loader.set_epoch(next(_EPOCHS))
            for batch in loader:
                yield batch["tokens", "tokens.segments"] if numbered else (batch["tokens"], None)


def look(batch: Any) -> int:
    """How many tokens of texts it has."""
    packed = isinstance(batch, tuple | list)
    tokens, segments = batch[:2] if packed else (batch, None)
    tokens = np.asarray(tokens)  # small operations of torch would cost more than some loaders do
    segments = None if segments is None else np.asarray(segments)
    if tokens.shape != (BATCH, LENGTH):
        raise SystemExit(f"no rows of tokens: {tokens.shape}")
    steps = np.diff(tokens[0].astype(np.int64))
    right = (steps == 1) | (steps == 1 - VALUES)
    if segments is not None:
        right |= (segments[0, 1:] != segments[0, :-1]) | (segments[0, 1:] == 0)
    elif packed:
        right |= tokens[0, 1:] == FILLING
    if np.count_nonzero(right) < steps.size - (LENGTH // 4 if packed and segments is None else 0):
        raise SystemExit("the tokens do not count upwards")
    if not packed:
        return int(tokens.size)
    return int(np.count_nonzero(tokens != FILLING if segments is None else segments))


def main() -> None:
    """Write, or warm up and take a round for each line."""
    if sys.argv[1] == "write":
        WRITERS[sys.argv[2]](sys.argv[3], int(sys.argv[4]))
        return
    name, endpoint, folder = sys.argv[1:4]
    torch.set_num_threads(1)

    def epoch() -> Iterable[Any]:
        if name in (OURS, NUMBERED):
            return ours(endpoint, numbered=name == NUMBERED)
        return LOADERS[name](endpoint, folder)

    time_pass("warm up", epoch, look)

    def measure() -> dict[str, float]:
        done = time_pass("round", epoch, look)
        return {"rate": done.samples / done.seconds, "client_us": 1e9 * done.cpu_s / done.samples}

    answer_rounds(measure)
    os._exit(0)  # workers that wait for a batch nobody takes


if __name__ == "__main__":
    main()
