"""Runs in the daemon's image: imports all of it, then starts its command and uses it.

The arguments are the image's command and its health check, both as JSON. Prints one line of JSON.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import meshsdk as mesh
from meshd.transform.builtin.geometry import affine, rotation
from meshd.transform.builtin.mixup import blend
from meshd.transform.builtin.resample_window import ResampleWindow, resample, resample_window
from meshsdk import ops
from tests.e2e.image_contents import (
    PATIENCE,
    identity,
    import_everything,
    load_libraries,
    started,
    until_answered,
)
from tests.golden.ops_results import results

ENDPOINT = "http://127.0.0.1:9000"
DATA = "/var/lib/meshd"
PICTURES = 8
FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}
USER_OP = '''"""Ops of the check."""
from meshsdk.userops import image, op


@op(input=image("h", "w", 3), output=image("h", "w", 3))
def invert(pixels):
    """255 minus each value."""
    return 255 - pixels
'''


def many_shapes() -> str:
    """Return a hash of what OpenCV gives the image ops, for images of 300 shapes."""
    chosen, seen = np.random.RandomState(11), hashlib.sha256()
    for _ in range(300):
        rows, columns, out_rows, out_columns = (int(each) for each in chosen.randint(1, 420, 4))
        shape = rows, columns, int(chosen.choice([1, 3, 4]))
        image = chosen.randint(0, 256, shape).astype(np.uint8)
        angle, share = float(chosen.uniform(-180, 180)), int(chosen.randint(0, 257))
        nearest = ResampleWindow(0, 0, rows, columns, out_rows, out_columns, "nearest")
        for result in (
            resample(image, out_rows, out_columns),
            resample_window(image, nearest),
            affine(image, rotation(image, angle), 7),
            blend(image, image[::-1].copy(), share),
        ):
            seen.update(f"{result.dtype}{result.shape}".encode() + np.ascontiguousarray(result).tobytes())
    return seen.hexdigest()


def picture(number: int, kind: str) -> bytes:
    """Return a file of 96×120 pixels."""
    y, x = np.mgrid[:96, :120]
    body = io.BytesIO()
    Image.fromarray(np.stack([x, y, (x + number * 9) % 256], axis=2).astype(np.uint8)).save(body, kind)
    return body.getvalue()


def use_daemon(endpoint: str) -> dict[str, str]:
    """Write and read objects, push an op, and load a batch of each format; return hashes of the batches.

    The environment has the daemon's address and keys, which `mesh op push` reads, too."""
    hashes = {}
    with mesh.connect(endpoint) as client:
        client.create_bucket("pictures")
        for name, kind in FORMATS.items():
            for number in range(PICTURES):
                client.put("pictures", f"{name}/{number}.{name}", picture(number, kind))
            if client.get("pictures", f"{name}/3.{name}") != picture(3, kind):
                raise RuntimeError("an object came back with other bytes")
        with tempfile.TemporaryDirectory() as place:
            source = Path(place) / "check.py"
            source.write_text(USER_OP)
            push = ["mesh", "op", "push", str(source)]
            subprocess.run(push, check=True, stdout=sys.stderr, timeout=PATIENCE)
        for name in FORMATS:
            ds = mesh.open(f"s3://pictures/{name}/", fields={"image": name}, client=client).map(
                ops.decode("image"),
                ops.user("check/invert", "image"),
                ops.random_resized_crop("image", 48),
                ops.hflip("image"),
                ops.to_chw("image"),
            )
            with mesh.Loader(ds, PICTURES, seed=5, output="numpy") as loader:
                (batch,) = list(loader)
            if batch["image"].shape != (PICTURES, 3, 48, 48):
                raise RuntimeError(f"a batch of shape {batch['image'].shape}")
            hashes[name] = hashlib.sha256(batch["image"].tobytes()).hexdigest()
    return hashes


def main() -> None:
    command, health = (json.loads(each) for each in sys.argv[1:])
    found: dict[str, Any] = {
        "identity": identity(),
        "modules": import_everything(["meshd", "meshsdk", "meshwire", "meshtools"]),
        "libraries": load_libraries(),
        "golden": results(),
        "pixels": many_shapes(),
    }
    key, secret = "mesh-check", "a-secret-of-the-check"
    os.environ |= {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret, "MESH_ENDPOINT": ENDPOINT}
    settings = {"MESHD_ROOT_ACCESS_KEY": key, "MESHD_ROOT_SECRET_KEY": secret}
    with tempfile.TemporaryDirectory() as place:
        # The folder that the image has: it is mounted by all who keep data.
        arguments = [place if each == DATA else each for each in command]
        with started(arguments, settings):
            until_answered(f"{ENDPOINT}/-/ready")
            subprocess.run(health, check=True, timeout=PATIENCE)
            found["batches"] = use_daemon(ENDPOINT)
            found["metrics"] = len(until_answered(f"{ENDPOINT}/metrics").splitlines())
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
