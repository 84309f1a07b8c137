"""Prints, as JSON, hashes of what the ops give, and of an epoch that a daemon makes and the SDK reads."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import subprocess
import sys
import tempfile

import numpy as np
from PIL import Image

import meshsdk as mesh
from meshsdk import ops
from tests.golden.ops_results import results

KEYS = "check", "a-secret-of-the-check"
PICTURES = 24


def picture(number: int) -> bytes:
    """A PNG of 200×260 pixels: a JPEG's pixels depend on its decoder's release."""
    y, x = np.mgrid[:200, :260]
    body = io.BytesIO()
    Image.fromarray(np.stack([x, y, (x * y + number * 9) % 256], axis=2).astype(np.uint8)).save(body, "PNG")
    return body.getvalue()


def epoch(endpoint: str) -> str:
    """Write pictures, and return a hash of an epoch of them, augmented."""
    with mesh.connect(endpoint, access_key=KEYS[0], secret_key=KEYS[1]) as client:
        client.create_bucket("photos")
        for number in range(PICTURES):
            client.put("photos", f"{number % 3}/{number:03d}.png", picture(number))
    os.environ.update(MESH_ENDPOINT=endpoint, AWS_ACCESS_KEY_ID=KEYS[0], AWS_SECRET_ACCESS_KEY=KEYS[1])
    dataset = mesh.open("s3://photos/", fields={"image": "png", "label": "@class"})
    dataset = dataset.map(
        ops.decode("image"),
        ops.random_resized_crop("image", 96),
        ops.color_jitter("image", brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1),
        ops.rand_augment("image"),
        ops.normalize("image", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    )
    seen = hashlib.sha256()
    for batch in mesh.Loader(dataset, global_batch=8, seed=7):
        for name in ("image", "label"):
            seen.update(np.ascontiguousarray(np.asarray(batch[name])).tobytes())
    return seen.hexdigest()


def main() -> None:
    given = {"MESHD_ROOT_ACCESS_KEY": KEYS[0], "MESHD_ROOT_SECRET_KEY": KEYS[1]}
    serve = [sys.executable, "-m", "meshd", "serve", "--listen", "127.0.0.1:0", "--workers", "1"]
    with tempfile.TemporaryDirectory() as folder:
        node = subprocess.Popen(
            [*serve, "--transform-workers", "1", "--user-ops", "off", "--data-dir", folder],
            env=os.environ | given,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert node.stdout is not None
            line = next(line for line in node.stdout if "meshd ready" in line)
            found = re.search(r"endpoint=(\S+)", line)
            assert found is not None, line
            made = {"epoch": epoch(found[1])}
        finally:
            node.terminate()
            node.wait(60)
    print(json.dumps({"machine": platform.machine(), **made, **results()}))


if __name__ == "__main__":
    main()
