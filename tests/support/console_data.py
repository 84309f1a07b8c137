"""What tests of the console look at: photographs, and texts that would be executed if they were markup."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from PIL import Image

import meshsdk as mesh
from meshsdk import ops

if TYPE_CHECKING:
    import pytest

    from tests.support.daemons import Daemon

BATCH: Final = 8
SIZE: Final = 96
MANY: Final = 1040
ATTACKS: Final = (
    "<img src=x onerror=alert(1)>",
    "<script>alert(2)</script>",
    '"><svg onload=alert(3)>',
    "javascript:alert(4)",
    "'-alert(5)-'",
    "{{constructor.constructor('alert(6)')()}}",
    "</title><script>alert(7)</script>",
    "%3Cscript%3Ealert(8)%3C%2Fscript%3E",
    "&lt;script&gt;alert(9)&lt;/script&gt;",
    "\u202e<b onmouseover=alert(10)>",
)
BROKEN: Final = "<img src=x onerror=alert(16)>"
DOCUMENTS: Final = {
    "page.html": (b"<html><script>parent.alert(11);alert(11)</script></html>", "text/html"),
    "drawing.svg": (
        b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(12)'><script>alert(12)</script></svg>",
        "image/svg+xml",
    ),
    "picture.png": (b"<script>alert(13)</script>", "image/png"),
    "data.json": (b'{"a": "<img src=x onerror=alert(14)>"}', "text/html"),
}


def png(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (24, 32, 3), np.uint8)
    pixels[:, : 8 * (seed % 4)] //= 3
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def loader_of(daemon: Daemon, source: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> mesh.Loader:
    monkeypatch.setenv("MESH_ENDPOINT", daemon.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", daemon.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", daemon.secret_key)
    found = mesh.open(source, fields={"image": ["jpg", "png"], "label": "@class"})
    found = found.map(
        ops.decode("image"), ops.random_resized_crop("image", SIZE), ops.hflip("image"), ops.to_chw("image")
    )
    return mesh.Loader(found, **{"global_batch": BATCH, "seed": 7, "output": "numpy", **options})
