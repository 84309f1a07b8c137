"""`python -m bench.long_text_reader FOLDER ENDPOINT SECONDS SERVER`: packed rows of texts.

Law: a line on stdin is a round: batches for so many seconds, from a loader of another order; then a line of
JSON. Tokens of texts are counted, not padding.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

import meshsdk as mesh
from bench.long_texts import BATCH, BUCKET, LENGTH, TOKENIZER
from bench.steady_rate import serve_rounds
from meshsdk import ops

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

Batch = Mapping[str, Any]


def packed(folder: str, endpoint: str) -> Generator[Iterator[Batch], None, None]:
    """Rounds of a loader, each of a plan of its own."""
    with mesh.connect(endpoint) as client:
        texts = mesh.open(f"s3://{BUCKET}/{folder}", fields={"tokens": "txt"}, client=client)
        rows = texts.map(ops.tokenize("tokens", f"s3://{BUCKET}/{TOKENIZER}")).pack("tokens", length=LENGTH)
        number = 0
        while True:
            number += 1
            with mesh.Loader(rows, BATCH, seed=number, shuffle=True, tail="drop") as loader:
                yield (batch for _ in iter(int, 1) for batch in loader)


def look(batch: Batch) -> int:
    """How many tokens of texts it has."""
    tokens, segments = batch["tokens"], batch["tokens.segments"]
    if tuple(tokens.shape) != (BATCH, LENGTH):
        raise SystemExit(f"no rows of tokens: {tuple(tokens.shape)}")
    count = int((segments > 0).sum())
    if count == 0 or not bool((tokens.int()[segments > 0] > 0).all()):
        raise SystemExit("unknown words in a text")
    return count


def main() -> None:
    """Warm up, then a round a line."""
    folder, endpoint, seconds, server = *sys.argv[1:3], float(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    serve_rounds(packed(folder, endpoint), look, seconds, server)


if __name__ == "__main__":
    main()
