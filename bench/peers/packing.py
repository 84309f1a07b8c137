"""`python -m bench.peers.packing PHOTOS OUT`: the photographs as MDS shards, mosaicml-streaming's own format."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from bench.peers.loaders import class_table, stand_in_torchvision


def main() -> None:
    """Write the shards in a fixed random order."""
    stand_in_torchvision()
    from streaming import MDSWriter

    files = sorted(Path(sys.argv[1]).glob("*/*.jpg"))
    classes = class_table(map(str, files))
    random.Random(1).shuffle(files)
    with MDSWriter(out=sys.argv[2], columns={"jpg": "bytes", "cls": "int"}, size_limit=1 << 24) as shards:
        for file in files:
            shards.write({"jpg": file.read_bytes(), "cls": classes[file.parent.name]})


main()
