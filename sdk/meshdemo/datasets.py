"""The two datasets of the demonstration, and the hash of a batch.

Law: all image processing is done by ops in the daemon; this process receives finished uint8 tensors.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

import meshsdk as mesh
from meshsdk import ops

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshdemo.daemon import Daemon

DIGIT_SIDE = 16
PHOTO_SIDE = 224
SEED = 7


def connect(daemon: Daemon) -> mesh.Client:
    """Return a client with the daemon's keys."""
    return mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key)


def training_digits(client: mesh.Client) -> mesh.Dataset:
    """Decoded, cropped at random, enlarged to 16×16, channels first; the class is the folder's name."""
    digits = mesh.open("s3://digits/train/", fields={"image": "png", "label": "@class"}, client=client)
    return digits.map(
        ops.decode("image", mode="gray"),
        ops.random_resized_crop("image", DIGIT_SIDE, scale=(0.7, 1.0), ratio=(0.83, 1.2)),
        ops.to_chw("image"),
    )


def held_out_digits(client: mesh.Client) -> mesh.Dataset:
    """Return the held-out digits, uncropped."""
    digits = mesh.open("s3://digits/test/", fields={"image": "png", "label": "@class"}, client=client)
    return digits.map(
        ops.decode("image", mode="gray"), ops.resize("image", [DIGIT_SIDE, DIGIT_SIDE]), ops.to_chw("image")
    )


def photographs(client: mesh.Client) -> mesh.Dataset:
    """Return the photographs with the usual ImageNet training transform."""
    photos = mesh.open("s3://photos/", fields={"image": "jpg", "label": "@class"}, client=client)
    return photos.map(
        ops.decode("image"),
        ops.random_resized_crop("image", PHOTO_SIDE),
        ops.hflip("image"),
        ops.to_chw("image"),
    )


def digest(parts: Sequence[mesh.Batch]) -> str:
    """SHA-256 of a global batch, given as its rank slices in order: pixels, labels and positions."""
    sha = hashlib.sha256()
    for values in zip(*((part["image"], part["label"], part.positions) for part in parts), strict=True):
        sha.update(np.concatenate([np.asarray(value) for value in values]).tobytes())
    return sha.hexdigest()
