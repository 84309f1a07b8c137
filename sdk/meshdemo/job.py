"""`python -m meshdemo.job SHARE BATCH`: one training job over the photographs; prints its figures as JSON.

Endpoint and keys come from the environment. The epoch begins when a line arrives on standard input, so that
the jobs of a sweep begin together.
"""

from __future__ import annotations

import json
import sys

import meshsdk as mesh
from meshdemo.datasets import SEED, digest, photographs
from meshdemo.equality_checks import short


def main() -> None:
    """Load one epoch."""
    share, batch = sys.argv[1] or None, int(sys.argv[2])
    with mesh.Loader(photographs(mesh.connect()), batch, seed=SEED, share=share, report="sweep") as loader:
        print("ready", flush=True)
        sys.stdin.readline()
        hashes = [digest([each]) for each in loader]
        stats = loader.stats()
    figures = {"samples": stats.samples, "seconds": stats.seconds, "waited": stats.waited, "cpu": stats.cpu}
    print(json.dumps({**figures, "epoch_hash": short(hashes)}), flush=True)


if __name__ == "__main__":
    main()
