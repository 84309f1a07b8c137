"""Results of the ops on images and annotations, as hashes: `python -m tests.golden.ops_results` prints them.

From a PNG, so that no codec's arithmetic is in them; a JPEG's pixels and a lossy file's bytes are the codec
release's. No pytest here: the check of the daemon's image runs it inside.
"""

from __future__ import annotations

import hashlib
import io
import json
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from meshd.transform import registry
from meshd.transform.image_annotations import BOXES, make_boxes, make_points, points_type
from meshd.transform.op_chain import compile_chain
from meshwire.plan.keyed_random import KeyedRandom
from meshwire.plan.plan_spec import OpSpec

POSITIONS = 12
Step = tuple[str, str, dict[str, Any]]
"""(op, version, arguments)"""
_JITTER = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.2}
CHAINS: dict[str, list[Step]] = {
    "decode": [],
    "gray": [("decode", "2", {"mode": "gray"})],
    "resize": [("resize", "1", {"size": [61, 47]})],
    "resize-shorter": [("resize", "1", {"size": 40})],
    "resize-enlarge": [("resize", "1", {"size": [301, 277]})],
    "center_crop": [("center_crop", "1", {"size": 50})],
    "random_crop": [("random_crop", "1", {"size": [31, 53]})],
    "random_resized_crop": [("random_resized_crop", "1", {"size": 32})],
    "hflip": [("hflip", "1", {})],
    "vflip": [("vflip", "1", {})],
    "pad": [("pad", "1", {"border": [1, 2, 3, 4], "fill": 9})],
    "rotate": [("rotate", "1", {"degrees": 40, "fill": 3})],
    "grayscale": [("grayscale", "1", {"p": 0.5})],
    "color_jitter": [("color_jitter", "1", _JITTER)],
    "rand_augment": [("rand_augment", "1", {"count": 3, "strength": 12})],
    "to_chw": [("to_chw", "1", {})],
    "normalize": [("normalize", "1", {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]})],
    "encode-png": [("encode", "1", {"format": "png"})],
    "resize-1-antialias": [("resize", "1", {"size": [61, 47], "filter": "antialias"})],
    "resize-1-nearest": [("resize", "1", {"size": [61, 47], "filter": "nearest"})],
    "center_crop-1-odd": [("center_crop", "1", {"size": [53, 45]})],
    "random_resized_crop-1-nearest": [("random_resized_crop", "1", {"size": 32, "filter": "nearest"})],
    "decode-3": [("decode", "3", {})],
    "decode-3-gray": [("decode", "3", {"mode": "gray"})],
    "decode-3-index": [("decode", "3", {"mode": "index"})],
    "decode-3-unchanged": [("decode", "3", {"mode": "unchanged", "dtype": "uint16", "channels": 1})],
    "resize-2": [("resize", "2", {"size": [61, 47]})],
    "resize-2-shorter": [("resize", "2", {"size": 40})],
    "resize-2-enlarge": [("resize", "2", {"size": [301, 277]})],
    "resize-2-bicubic": [("resize", "2", {"size": [61, 47], "filter": "bicubic"})],
    "resize-2-box": [("resize", "2", {"size": [61, 47], "filter": "box"})],
    "resize-2-nearest": [("resize", "2", {"size": [61, 47], "filter": "nearest"})],
    "resize-2-fast": [("resize", "2", {"size": [61, 47], "filter": "fast"})],
    "center_crop-2": [("center_crop", "2", {"size": [53, 45]})],
    "random_resized_crop-2": [("random_resized_crop", "2", {"size": 32})],
    "random_resized_crop-2-bilinear": [("random_resized_crop", "2", {"size": 32, "filter": "bilinear"})],
    "pad-2": [("pad", "2", {"border": [1, 2, 3, 4], "fill": 9})],
    "rotate-2": [("rotate", "2", {"degrees": 40, "fill": 3})],
    "rotate90": [("random_crop", "1", {"size": 50}), ("rotate90", "1", {})],
    "rotate-2-nearest": [("rotate", "2", {"degrees": 40, "fill": 3, "filter": "nearest"})],
}
"""The steps after decoding, or all of them. No version that a plan may have changes, and all are kept."""


def picture() -> bytes:
    """Slopes, edges and noise, 128×160."""
    y, x = np.mgrid[:128, :160]
    noise = np.random.RandomState(5).randint(0, 40, (128, 160, 3))  # frozen by numpy's policy
    base = np.stack([x, y * 2, (x // 16 + y // 16) % 2 * 200], axis=2)
    out = io.BytesIO()
    Image.fromarray(np.clip(base + noise, 0, 255).astype(np.uint8)).save(out, "PNG")
    return out.getvalue()


def mask() -> bytes:
    """Class numbers 0…20 and 255 as a palette image."""
    y, x = np.mgrid[:60, :70]
    numbers = np.where((x + y) % 11 == 0, 255, (x // 9 + y // 8) % 21).astype(np.uint8)
    made = Image.frombytes("P", (70, 60), numbers.tobytes())
    made.putpalette([value * 7 % 256 for value in range(768)])
    out = io.BytesIO()
    made.save(out, "PNG")
    return out.getvalue()


def depth() -> bytes:
    """16-bit gray."""
    y, x = np.mgrid[:60, :70]
    out = io.BytesIO()
    Image.fromarray((x * 900 + y * 37).astype(np.uint16)).save(out, "PNG")
    return out.getvalue()


FILES = {"decode-3-index": mask, "decode-3-unchanged": depth}


def digest(name: str) -> str:
    """Of the values at a dozen positions, shapes and types included."""
    steps = CHAINS[name]
    if not steps or steps[0][0] != "decode":
        steps = [("decode", "2", {}), *steps]
    chain = compile_chain(
        [(index, OpSpec(op, "image", args, version)) for index, (op, version, args) in enumerate(steps)]
    )
    found = hashlib.sha256()
    data = FILES.get(name, picture)()
    for position in range(POSITIONS):
        value = chain.render(data, partial(KeyedRandom, 7, 1, position))
        if isinstance(value, bytes):  # zlib's releases pack differently; the pixels are what is promised
            value = np.asarray(Image.open(io.BytesIO(value)))
        found.update(f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    return found.hexdigest()


def mixed(name: str) -> str:
    """Of both rows of a few pairs."""
    operation: Any = registry.build(OpSpec(name, "image", {}), "ops[0]")[1]
    rows = np.random.RandomState(3).randint(0, 256, (2, 40, 56, 3)).astype(np.uint8)
    found = hashlib.sha256()
    for position in range(0, 2 * POSITIONS, 2):
        for own in (0, 1):
            value, weight = operation.mix(rows[own], rows[1 - own], KeyedRandom(7, 1, position, 2))
            found.update(np.float32(weight).tobytes() + value.tobytes())
    return found.hexdigest()


MOVES: list[Step] = [
    ("pad", "2", {"border": [9, 8, 7, 6]}),
    ("rotate", "2", {"degrees": 40}),
    ("random_crop", "1", {"size": [110, 120]}),
    ("vflip", "1", {}),
    ("random_resized_crop", "2", {"size": 64, "scale": [0.5, 1.0]}),
    ("hflip", "1", {}),
    ("rotate90", "1", {}),
    ("resize", "2", {"size": [50, 41]}),
    ("center_crop", "2", {"size": [43, 40]}),
]


def annotated(name: str) -> str:
    """Of boxes or keypoints under all that moves them, and of what is left of the boxes."""
    drawn = np.random.RandomState(11).randint(0, 4 * 120, (2, 9, 2)) / 4.0
    corners = np.concatenate([drawn.min(0), drawn.max(0)], axis=1)
    of_image = make_boxes(corners, (128, 160))
    start = BOXES
    if name == "keypoints":
        visible = np.full((3, 6, 1), 2.0)
        of_image = make_points(
            np.concatenate([drawn.reshape(3, 6, 2), visible], 2), (128, 160), (1, 0, 2, 4, 3, 5)
        )
        start = points_type(6)
    chain = compile_chain(
        [(index, OpSpec(op, name, args, version)) for index, (op, version, args) in enumerate(MOVES)],
        start=start,
    )
    keeping: Any = registry.build(OpSpec("keep_boxes", name, {"min_visibility": 0.25}, "1"), "ops[0]")[1]
    found = hashlib.sha256()
    for position in range(POSITIONS):
        moved = chain.render(of_image, partial(KeyedRandom, 7, 1, position))
        if name == "boxes":
            moved = keeping.apply_all([moved], KeyedRandom(0, 0, 0))[0]
        found.update(f"{moved.dtype}{moved.shape}{moved.canvas}".encode() + moved.tobytes())
    return found.hexdigest()


def results() -> dict[str, str]:
    names = ("mixup", "cutmix", "mixup_or_cutmix")
    found = {name: digest(name) for name in CHAINS} | {name: mixed(name) for name in names}
    return found | {name: annotated(name) for name in ("boxes", "keypoints")}


if __name__ == "__main__":
    print(json.dumps(results()))
