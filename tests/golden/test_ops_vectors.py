"""Frozen results of the image ops: an op whose output changes needs a new version.

From a PNG, so that no codec's arithmetic is in them; a JPEG's pixels and a lossy file's bytes are the codec
release's. `GOLDEN=rewrite pytest tests/golden/test_ops_vectors.py` writes the file anew, for a new version.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from meshd.transform import registry
from meshd.transform.op_chain import compile_chain
from meshwire.plan.keyed_random import KeyedRandom
from meshwire.plan.plan_spec import OpSpec

DATA = Path(__file__).parent / "ops" / "images.json"
REWRITE = os.environ.get("GOLDEN") == "rewrite"
POSITIONS = 12
CHAINS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "decode": [],
    "gray": [("decode", {"mode": "gray"})],
    "resize": [("resize", {"size": [61, 47]})],
    "resize-shorter": [("resize", {"size": 40})],
    "resize-enlarge": [("resize", {"size": [301, 277]})],
    "center_crop": [("center_crop", {"size": 50})],
    "random_crop": [("random_crop", {"size": [31, 53]})],
    "random_resized_crop": [("random_resized_crop", {"size": 32})],
    "hflip": [("hflip", {})],
    "vflip": [("vflip", {})],
    "pad": [("pad", {"border": [1, 2, 3, 4], "fill": 9})],
    "rotate": [("rotate", {"degrees": 40, "fill": 3})],
    "grayscale": [("grayscale", {"p": 0.5})],
    "color_jitter": [("color_jitter", {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.2})],
    "rand_augment": [("rand_augment", {"count": 3, "strength": 12})],
    "to_chw": [("to_chw", {})],
    "normalize": [("normalize", {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]})],
    "encode-png": [("encode", {"format": "png"})],
}


def picture() -> bytes:
    """Slopes, edges and noise, 128×160."""
    y, x = np.mgrid[:128, :160]
    noise = np.random.RandomState(5).randint(0, 40, (128, 160, 3))  # frozen by numpy's policy
    base = np.stack([x, y * 2, (x // 16 + y // 16) % 2 * 200], axis=2)
    out = io.BytesIO()
    Image.fromarray(np.clip(base + noise, 0, 255).astype(np.uint8)).save(out, "PNG")
    return out.getvalue()


def digest(name: str) -> str:
    """Of the values at a dozen positions, shapes and types included."""
    steps = CHAINS[name]
    if not steps or steps[0][0] != "decode":
        steps = [("decode", {}), *steps]
    chain = compile_chain([(index, OpSpec(op, "image", args)) for index, (op, args) in enumerate(steps)])
    found = hashlib.sha256()
    for position in range(POSITIONS):
        value = chain.render(picture(), partial(KeyedRandom, 7, 1, position))
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


def results() -> dict[str, str]:
    names = ("mixup", "cutmix", "mixup_or_cutmix")
    return {name: digest(name) for name in CHAINS} | {name: mixed(name) for name in names}


def frozen() -> dict[str, str]:
    if REWRITE:
        DATA.parent.mkdir(exist_ok=True)
        DATA.write_text(json.dumps(results(), indent=1) + "\n")
    found: dict[str, str] = json.loads(DATA.read_text())
    return found


FROZEN = frozen()


@pytest.mark.parametrize("name", CHAINS)
def test_ops_give_what_they_always_gave(name: str) -> None:
    assert digest(name) == FROZEN[name], f"{name} gives something else: that is a new version of the op"


@pytest.mark.parametrize("name", ["mixup", "cutmix", "mixup_or_cutmix"])
def test_mixing_gives_what_it_always_gave(name: str) -> None:
    assert mixed(name) == FROZEN[name], f"{name} gives something else: that is a new version of the op"


def test_another_processor_gives_the_same() -> None:
    """OpenCV chooses its code by what the processor has; here it is told that there is next to none."""
    command = "import json; from tests.golden import test_ops_vectors as t; print(json.dumps(t.results()))"
    plain = {**os.environ, "OPENCV_CPU_DISABLE": "AVX512_SKX,AVX2,FMA3,AVX,SSE4_2,SSE4_1,NEON_DOTPROD"}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", command], env=plain, cwd=root, capture_output=True, check=True, timeout=100
    )
    assert json.loads(done.stdout) == FROZEN


def test_nothing_is_frozen_that_is_not_looked_at() -> None:
    assert set(FROZEN) == {*CHAINS, "mixup", "cutmix", "mixup_or_cutmix"}
