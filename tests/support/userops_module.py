"""A module of users' ops for tests on real daemons, the photographs that it is run on, and what runs it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

import meshsdk
from meshsdk import ops

if TYPE_CHECKING:
    from meshsdk.client.s3_client import Client
    from tests.support.daemons import Daemon

COUNT = 24
SOURCE = b'''
import ctypes, os, time
import numpy as np
from meshsdk.userops import BYTES, BadSample, array, image, op

@op(input=image("h", "w", 3), output=image("h", "w", 3), memory=128 << 20)
def brighten(pixels, *, gain: float = 1.5):
    """Pixels times gain."""
    return np.clip(pixels * gain, 0, 255).astype(np.uint8)

@op(input=image("h", "w", 3), output=array("float32", (3, "size", "size")), memory=128 << 20)
def patch(pixels, *, random, size: int = 16):
    """A random square."""
    height, width, _ = pixels.shape
    top, left = random.integer(height - size + 1), random.integer(width - size + 1)
    return pixels[top : top + size, left : left + size].transpose(2, 0, 1).astype(np.float32)

@op(input=BYTES, output=array("int64", ()), memory=128 << 20)
def listed(data, *, table: bytes, other: bytes = None):
    """Its length, looked up."""
    return np.int64(int(table.split()[len(data) % 2]) + (int(other) if other else 0))

@op(input=BYTES, output=array("int64", ()), seconds=2.5, memory=128 << 20)
def trap(data, *, on: list, how: str):
    """Bad on samples of these sizes."""
    if len(data) in on:
        if how == "crash":
            ctypes.string_at(0)
        if how == "hang":
            time.sleep(3600)
        if how == "leak":
            np.ones(1 << 30)
        if how == "raise":
            raise RuntimeError("no good")
        if how == "refuse":
            raise BadSample("not mine")
        if how == "lie":
            return np.zeros(2, np.float32)
    return np.int64(len(data))
'''


def jpeg(number: int) -> bytes:
    rng = np.random.default_rng(number)
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (40, 48 + number, 3), dtype=np.uint8)).save(file, "JPEG")
    return file.getvalue()


def sizes() -> list[int]:
    return [len(jpeg(number)) for number in range(COUNT)]


def connect(daemon: Daemon, access_key: str = "", secret_key: str = "") -> Client:
    return meshsdk.connect(
        daemon.endpoint,
        access_key=access_key or daemon.access_key,
        secret_key=secret_key or daemon.secret_key,
        deadline=30,
    )


def dataset(client: Client) -> Any:
    return meshsdk.open("s3://photos/train/", fields={"image": "jpg"}, client=client)


def trap(client: Client, how: str, on: list[int]) -> Any:
    return dataset(client).map(ops.user("mine/trap", "image", on=on, how=how))


def children_of(pid: int) -> list[int]:
    """Return the processes that the threads of a process have started."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found
