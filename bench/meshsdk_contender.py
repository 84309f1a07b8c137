"""`python -m bench.meshsdk_contender ENDPOINT BUCKET`: the passes of a meshsdk loader, one JSON line each.

import: of meshsdk · first: epoch 0 of a plan the node has not seen · again: a second job asks for that same
epoch · second: epoch 1, new crops for every sample; nothing decoded is kept in these passes. kept: epoch 1 of
a plan in whose epoch 0 the node could keep decoded images. With `--share NAME` the first alone, together
with others of that name. With `--cold` the first alone, of an epoch that begins when a line comes, all
imported. With `--tcp` as from another host. With `--open` there is no pass: the data set is opened.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch  # before the clock starts, as in the peers' process

from bench.timing import await_others, say, time_import, time_pass

if TYPE_CHECKING:
    from collections.abc import Iterable

    import meshsdk as mesh

SIDE = 224
PACKAGES = ("meshsdk", "meshsdk.ops")
OTHER_PLAN = 1 << 20
"""Added to the seed: a plan of its own."""


torch.set_num_threads(1)


def check(batch: Any) -> int:
    """The batch's size; a batch of another kind is an error, not a figure."""
    images = batch["image"]
    if str(images.dtype).removeprefix("torch.") != "uint8" or tuple(images.shape[1:]) != (3, SIDE, SIDE):
        raise SystemExit(f"not a uint8 batch of {SIDE}×{SIDE}: {images.dtype} {tuple(images.shape)}")
    return int(batch.rows - np.count_nonzero(batch.status))


LABELS = {"raw": "@class", "tar": "cls", "long": "cls"}
"""Layout of the photographs in the bucket, and the field that is their label."""


def dataset(endpoint: str, bucket: str, layout: str = "raw") -> mesh.Dataset:
    """Pin the photographs; the same ops as the peers' transform."""
    import meshsdk as mesh  # not above: importing it is timed
    from meshsdk import ops

    client = mesh.connect(endpoint)
    fields = {"image": "jpg", "label": LABELS[layout]}
    pinned = mesh.open(f"s3://{bucket}/{layout}/", fields=fields, client=client)
    crop = (ops.decode("image"), ops.random_resized_crop("image", SIDE), ops.hflip("image"))
    number = () if layout == "raw" else (ops.int_label("label"),)
    return pinned.map(*crop, ops.to_chw("image"), *number)


def main() -> None:
    """Parse, run the passes, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint")
    parser.add_argument("bucket")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", default=None)
    parser.add_argument("--tcp", action="store_true", help="no shared memory")
    parser.add_argument("--ahead", type=int, default=4, help="batches that are requested ahead")
    parser.add_argument("--open", action="store_true", help="no pass: open the data set alone")
    parser.add_argument("--layout", choices=LABELS, default="raw")
    parser.add_argument("--blocks", type=int, help="a shuffle in windows of so many shards; else a full one")
    parser.add_argument("--cold", action="store_true", help="the first pass alone, begun by a line on stdin")
    parser.add_argument(
        "--keep", action="store_true", help="the node may keep decoded images in the first pass"
    )
    given = parser.parse_args()
    if given.tcp:
        os.environ["MESH_LOCAL"] = "off"
    if given.open:
        dataset(given.endpoint, given.bucket, given.layout)
        return
    if given.share and not given.cold:
        await_others()
    imported = time_import(PACKAGES)
    if given.cold:
        await_others()
    import meshsdk as mesh

    loaders: list[mesh.Loader] = []

    kept: Literal["auto", "off"] = "auto" if given.keep else "off"

    def fresh(seed: int = given.seed, cache: Literal["auto", "off"] = kept) -> Iterable[Any]:
        """A loader of its own: connecting, pinning and planning count."""
        data = dataset(given.endpoint, given.bucket, given.layout)
        loaders.append(
            mesh.Loader(
                data,
                global_batch=given.batch,
                seed=seed,
                shuffle=shuffle,
                share=share,
                cache=cache,
                connections=given.ahead,
                prefetch_bytes=arena,
            )
        )
        return loaders[-1]

    share = f"{given.share}-{given.seed}" if given.share else None
    arena = None if given.ahead == 4 else (given.ahead + 1) * given.batch * 3 * SIDE**2
    shuffle = mesh.Blocks(given.blocks) if given.blocks else True
    alone = given.share or given.cold
    passes = (("first", fresh), ("again", fresh), ("second", lambda: loaders[-1]))
    if not alone:
        say(imported)
    for name, make in passes[:1] if alone else passes:
        say(time_pass(name, make, check))
    if not alone:
        for batch in fresh(given.seed + OTHER_PLAN, "auto"):  # whose frames nobody has made
            check(batch)
        del batch
        say(time_pass("kept", lambda: loaders[-1], check))
    for loader in loaders:
        loader.close()


if __name__ == "__main__":
    main()
