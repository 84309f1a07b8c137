"""`python -m bench.kept_reader ENDPOINT BUCKET CACHE`: epochs of one meshsdk loader, one JSON line each.

CACHE is what the node may keep of decoded samples: `auto`, `off` or bytes. The first line is the first epoch,
in which the node may keep them; the others are later ones, with new crops for every sample.
"""

from __future__ import annotations

import argparse
from typing import Any, Literal, cast

from bench.meshsdk_contender import LABELS, check, dataset
from bench.timing import say, time_import, time_pass

EPOCHS = 3


def main() -> None:
    """Parse, run the epochs, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint")
    parser.add_argument("bucket")
    parser.add_argument("cache")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--layout", choices=LABELS, default="raw")
    given = parser.parse_args()
    time_import(("meshsdk", "meshsdk.ops"))
    import meshsdk as mesh

    named = given.cache if given.cache in ("auto", "off") else int(given.cache)
    cache = cast('Literal["auto", "off"] | int', named)
    data = dataset(given.endpoint, given.bucket, given.layout)
    # A seed for each way: a batch has one address whatever is kept, and finished ones would be found again.
    seed = sum(map(ord, given.cache))
    loader: Any = mesh.Loader(data, global_batch=given.batch, seed=seed, shuffle=True, cache=cache)
    for epoch in range(EPOCHS):
        say(time_pass(f"epoch {epoch}", lambda: loader, check))
    loader.close()


if __name__ == "__main__":
    main()
