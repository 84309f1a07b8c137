"""`python -m bench.peers.packing PHOTOS OUT`: the photographs as MDS shards, mosaicml-streaming's own
format.
"""

from __future__ import annotations

import random
import sys
from importlib import import_module
from pathlib import Path

from bench.peers.loaders import class_table, stand_in_torchvision


def main() -> None:
    """Write the shards in a fixed random order."""
    stand_in_torchvision()
    streaming = import_module("streaming")
    files = sorted(Path(sys.argv[1]).glob("*/*.jpg"))
    classes = class_table(map(str, files))
    random.Random(1).shuffle(files)
    columns = {"jpg": "bytes", "cls": "int"}
    with streaming.MDSWriter(out=sys.argv[2], columns=columns, size_limit=1 << 24) as shards:
        for file in files:
            shards.write({"jpg": file.read_bytes(), "cls": classes[file.parent.name]})


main()
