"""`python -m bench.peers LOADER ENDPOINT BUCKET`: its import and two passes, one JSON line each."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from bench.peers.loaders import LOADERS, Source, packages
from bench.peers.random_crop import SIDE
from bench.timing import await_others, say, time_import, time_pass


def check(batch: Any) -> int:
    """The batch's size; a batch of another kind is an error, not a figure."""
    images, labels = map(torch.as_tensor, batch)
    if images.dtype != torch.uint8 or images.shape[1:] != (3, SIDE, SIDE):
        raise SystemExit(f"not a uint8 batch of {SIDE}×{SIDE}: {images.dtype} {tuple(images.shape)}")
    return len(labels)


def main() -> None:
    """Parse, run twice, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("loader", choices=sorted(LOADERS))
    parser.add_argument("endpoint")
    parser.add_argument("bucket")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cache", required=True)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--together", action="store_true", help="begin when a line comes on stdin")
    parser.add_argument("--cold", action="store_true", help="the same, with everything imported before")
    given = parser.parse_args()
    source = Source(given.endpoint, given.bucket, given.batch, given.workers, given.cache)
    loader = None

    def epoch() -> Any:
        nonlocal loader
        loader = loader if loader is not None else LOADERS[given.loader](source)
        return loader

    if given.together:
        await_others()
    imported = time_import(packages(given.loader))
    if given.cold:
        await_others()
    if not given.together and not given.cold:
        say(imported)
    for name in ("first", "second")[: given.passes]:
        say(time_pass(name, epoch, check))


main()
