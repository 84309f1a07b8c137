"""Batches have the same bytes with and without the decoded cache, whatever is kept, dropped or damaged."""

from __future__ import annotations

import io
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.support.decoded_cache_node import DecodedCacheNode
from tests.support.transform_processes import text_of

SETTINGS = settings(max_examples=15, deadline=None)
SAMPLES = 64
CROP = {"op": "random_resized_crop", "field": "image", "args": {"size": 16}}
BOTH = {
    "op": "random_resized_crop",
    "fields": ["image", "mask"],
    "args": {"size": 16},
    "each": {"mask": {"filter": "nearest"}},
}
MIXED = {"op": "mixup", "field": "image", "args": {"alpha": 0.4}}


def on(field: str, *ops: str | tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    given = [(op, {}) if isinstance(op, str) else op for op in ops]
    return [{"op": op, "field": field, **({"args": args} if args else {})} for op, args in given]


def image(*ops: str | tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return on("image", *ops)


FLIPPED = image("hflip", "to_chw")
RESIZED = ("resize", {"size": [24, 20]})
NORMALIZED = ("normalize", {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.2]})
MASKED = on("mask", ("decode", {"mode": "gray"}))
CUT = [*MASKED, *on("mask", ("resize", {"size": [8, 8], "filter": "nearest"}))]
BOXED = [
    *on("mask", ("frombuffer", {"dtype": "uint8", "shape": [None]}), ("truncate", {"length": 8})),
    {"op": "boxes", "fields": ["mask", "image"], "args": {"format": "xywh"}},
]
"""The first bytes of a PNG as two boxes: all that matters is that they need the image's file."""
FOLLOWED = {"op": "random_resized_crop", "fields": ["image", "mask"], "args": {"size": 16}}
CHAINS: list[list[dict[str, Any]]] = [
    [*image("decode"), CROP, *FLIPPED, *CUT],
    [*on("image", ("decode", {"mode": "gray"})), CROP, *CUT],
    [*image("decode", RESIZED), *FLIPPED, *CUT],
    [*image("decode", RESIZED, "to_chw"), *CUT],
    [*image("decode", ("resize", {"size": 24}), ("center_crop", {"size": 20})), CROP, *FLIPPED, *CUT],
    [*image("decode", RESIZED, ("random_crop", {"size": 12}), "rand_augment"), *CUT],
    [*image("decode", RESIZED, NORMALIZED, "to_chw"), *CUT],
    [*image("decode"), *MASKED, BOTH, *FLIPPED],
    [*image("decode"), CROP, MIXED, *CUT],
    [*image("decode", RESIZED), MIXED, *image("hflip"), *CUT],
    [*BOXED, *image("decode"), FOLLOWED, *FLIPPED, {"op": "keep_boxes", "field": "mask"}],
    [*image("decode"), *BOXED, {"op": "resize", "fields": ["image", "mask"], "args": {"size": 24}}, FOLLOWED],
    [*CUT],
    [*MASKED, *on("mask", ("encode", {"format": "png"}))],
]


def picture(seed: int, height: int, width: int, form: str) -> bytes:
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (height // 7 + 2, width // 7 + 2, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    made = Image.fromarray(small).resize((width, height))
    if form == "CMYK":
        made.convert("CMYK").save(buffer, "JPEG")
    else:
        made.save(buffer, form, **({"progressive": True} if form == "JPEG" and seed % 5 == 0 else {}))
    return buffer.getvalue()


def sample(seed: int) -> tuple[bytes, bytes]:
    """An image and a mask of one size. Some are no JPEG, damaged below the middle, cut short, or no image."""
    rng = random.Random(seed)
    height, width = rng.randint(20, 150), rng.randint(20, 150)
    made = picture(seed, height, width, rng.choice(["JPEG"] * 7 + ["PNG", "CMYK"]))
    kind = rng.random()
    if kind < 0.05:
        made = made[: len(made) // 2]
    elif kind < 0.15:
        at = len(made) * 3 // 4
        made = made[:at] + bytes(value ^ 0x5A for value in made[at : at + 9]) + made[at + 9 :]
    elif kind < 0.2:
        made = b"no image"
    return made, picture(seed + 1, height, width, "PNG")


def damage(node: DecodedCacheNode, rng: random.Random) -> None:
    """Flip, zero or cut bytes of some segments."""
    for path in sorted((node.folder / "decoded").iterdir()):
        size, action = path.stat().st_size, rng.randrange(4)
        if not size or not action:
            continue
        if action == 1:
            os.truncate(path, rng.randrange(size))
            continue
        with path.open("r+b") as file:
            for _ in range(rng.randint(1, 20)):
                file.seek(rng.randrange(size))
                file.write(bytes([rng.randrange(256)]) * rng.choice([1, 8, 700]))


@SETTINGS
@given(
    chain=st.sampled_from(CHAINS),
    seed=st.integers(0, 1 << 30),
    budget=st.sampled_from([1 << 20, 2 << 20, 3 << 20, 1 << 30]),
    epochs=st.integers(2, 4),
    actions=st.lists(
        st.sampled_from(["none", "damage", "fill", "other plan", "limit", "warm", "moved"]),
        min_size=4,
        max_size=4,
    ),
)
def test_every_epoch_has_the_same_bytes_and_the_same_failures(
    chain: list[dict[str, Any]], seed: int, budget: int, epochs: int, actions: list[str]
) -> None:
    rng = random.Random(seed)
    text = text_of(chain, ["image", "mask"])
    samples = [sample(seed + number) for number in range(SAMPLES)]
    with tempfile.TemporaryDirectory() as folder:
        node = DecodedCacheNode(Path(folder), samples, budget)
        if "moved" in actions:  # from the start: entries of a node that builds rows of any sample stay
            node.ask_for(range(SAMPLES))
        try:
            for epoch, action in zip(range(epochs), actions, strict=False):
                order = rng.sample(range(SAMPLES), SAMPLES)
                if action == "warm":
                    node.warm(text, epoch, order)
                plain = node.epoch(text, epoch, order, cached=False)
                assert node.epoch(text, epoch, order, limit=1 << 21 if action == "limit" else None) == plain
                if action == "damage":
                    damage(node, rng)
                elif action == "fill":
                    node.fit(1 << 30, rng.choice([0, 1 << 29]))
                elif action == "moved":
                    node.ask_for(rng.sample(range(SAMPLES), rng.randrange(SAMPLES)))
                    node.epoch(text, epoch, order)
                    node.find_moved()
                elif action == "other plan":
                    node.epoch(text_of(rng.choice(CHAINS), ["image", "mask"]), 0, range(SAMPLES))
                assert node.cache.bytes <= budget + (1 << 20)
        finally:
            node.close()
