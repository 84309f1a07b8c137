"""`python -m bench.emulated ENDPOINT BUCKET …`: accelerators fed by meshsdk, each a rank of one job."""

from __future__ import annotations

import argparse

import meshsdk as mesh
from bench.accelerator_threads import run
from meshsdk import ops

TIMES = 200
"""Each record comes so often in an epoch, so that no trial meets the end of one."""


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint")
    parser.add_argument("bucket")
    parser.add_argument("prefix")
    for name in ("--accelerators", "--batch", "--wanted", "--take"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--step", "--seconds"):
        parser.add_argument(name, type=float, required=True)
    given = parser.parse_args()
    world = given.accelerators
    stored = mesh.open(
        f"s3://{given.bucket}/{given.prefix}/",
        fields={"x": "npy" if given.take else "bin"},
        client=mesh.connect(given.endpoint),
    )
    data = mesh.mix(stored, stored, positions=TIMES * len(stored))  # of one alone there is none
    if given.take:
        data = data.map(ops.npy("x"), ops.window("x", [given.take], at="first"))
    loaders = [
        mesh.Loader(data, given.batch * world, rank=rank, world=world, tail="drop", output="numpy")
        for rank in range(world)
    ]
    run(loaders, size_of, given.wanted, given.step, given.seconds)


def size_of(batch: mesh.Batch) -> int:
    """Bytes of the records."""
    field = batch["x"]
    return int(field.data.nbytes if isinstance(field, mesh.Ragged) else field.nbytes)


if __name__ == "__main__":
    main()
