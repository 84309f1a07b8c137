"""What preparing a photograph costs one core: the node's ops beside a bare decode of the same file.

Law: one process on one core, CPU seconds; contenders take turns (`bench.interleave`), a hundred
photographs each, so that they meet the same machine. No server, no store.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING

from bench.interleave import order
from bench.limits import SIDE
from bench.results import Figure
from bench.subprocess_row import apart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    Prepare = Callable[[int, bytes], object]

BARE, NODE, PILLOW = "libjpeg-turbo, bare", "meshd", "Pillow"
NOTES = {
    BARE: "libjpeg-turbo decodes the whole photograph to RGB, nothing else",
    NODE: "`decode`, `random_resized_crop` 224, `hflip`, written into a row of the batch",
    PILLOW: "the same with Pillow, as torchvision does on PIL images, into an array",
}
PHOTOGRAPHS = 1000
_TURN = 100


def _contenders() -> dict[str, Prepare]:
    import cv2
    import numpy as np
    import simplejpeg

    from meshd.transform.op_chain import compile_chain
    from meshsdk import ops
    from meshwire.plan.keyed_random import KeyedRandom

    cv2.setNumThreads(1)
    wanted = (ops.decode("image"), ops.random_resized_crop("image", SIDE), ops.hflip("image"))
    chain = compile_chain(list(enumerate(wanted)))
    row = np.empty((SIDE, SIDE, 3), np.uint8)

    def by_node(number: int, data: bytes) -> object:
        chain.render_into(data, partial(KeyedRandom, 7, 0, number), row)
        return row

    def bare(number: int, data: bytes) -> object:
        return simplejpeg.decode_jpeg(data)

    return {BARE: bare, NODE: by_node, PILLOW: _by_pillow}


def _by_pillow(number: int, data: bytes) -> object:
    import io

    import numpy as np
    from PIL import Image, ImageOps

    from meshd.transform.builtin.resize import RandomResizedCrop
    from meshwire.plan.keyed_random import KeyedRandom

    op = RandomResizedCrop((SIDE, SIDE), (0.08, 1.0), (0.75, 4 / 3))
    with Image.open(io.BytesIO(data)) as opened:
        window = op.window(opened.height, opened.width, KeyedRandom(7, 0, number, 1))
        box = (window.left, window.top, window.left + window.width, window.top + window.height)
        cut = opened.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box)
    flip = KeyedRandom(7, 0, number, 2).chance(0.5)
    return np.asarray(ImageOps.mirror(cut) if flip else cut)


def _measure(files: Sequence[Path], rounds: int) -> Iterator[Figure]:
    """In a process of its own, on one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    data = [file.read_bytes() for file in files]
    contenders = _contenders()
    _spent(contenders, data[:_TURN])
    for number in range(rounds):
        for name, seconds in _spent(contenders, data).items():
            yield Figure(name, number, {"rate": len(data) / seconds})


def _spent(contenders: dict[str, Prepare], data: Sequence[bytes]) -> dict[str, float]:
    """CPU seconds of each."""
    spent = dict.fromkeys(contenders, 0.0)
    for start in range(0, len(data), _TURN):
        for name, prepare in order(contenders.items(), start // _TURN):
            began = time.process_time()
            for number, body in enumerate(data[start : start + _TURN], start):
                prepare(number, body)
            spent[name] += time.process_time() - began
    return spent


def measure(files: Sequence[Path], rounds: int) -> Iterator[Figure]:
    """Photographs a CPU second, by contender and round."""
    return apart(_measure, list(files[:PHOTOGRAPHS]), rounds)
