"""`python -m bench.peers.shard_writer FORMAT PHOTOS OUT`: the photographs as shards of a peer's own format.

Law: `mds` is mosaicml-streaming's, `lit` is litdata's; one fixed random order, about 16 MiB a shard.
"""

from __future__ import annotations

import random
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.peers.loaders import class_table, stand_in_torchvision

SHARD = 1 << 24


def read(photograph: tuple[str, int]) -> dict[str, Any]:
    """One sample, as litdata's workers make them."""
    return {"jpg": Path(photograph[0]).read_bytes(), "cls": photograph[1]}


def mds(photographs: list[tuple[str, int]], out: str) -> None:
    """mosaicml-streaming's writer."""
    stand_in_torchvision()
    streaming = import_module("streaming")
    columns = {"jpg": "bytes", "cls": "int"}
    with streaming.MDSWriter(out=out, columns=columns, size_limit=SHARD) as shards:
        for each in photographs:
            shards.write(read(each))


def lit(photographs: list[tuple[str, int]], out: str) -> None:
    """litdata's writer, one worker."""
    litdata = import_module("litdata")
    litdata.optimize(
        read, photographs, out, chunk_bytes=SHARD, num_workers=1, reorder_files=False, verbose=False
    )


def main() -> None:
    """Write the shards."""
    files = sorted(Path(sys.argv[2]).glob("*/*.jpg"))
    classes = class_table(map(str, files))
    random.Random(1).shuffle(files)
    photographs = [(str(file), classes[file.parent.name]) for file in files]
    {"mds": mds, "lit": lit}[sys.argv[1]](photographs, sys.argv[3])


if __name__ == "__main__":
    main()
