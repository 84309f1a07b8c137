"""Checkpoints as objects of the store: model, optimizer, schedule, and where the data stands.

Law: one object, replaced as a whole; what is there is always a whole checkpoint.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch

from meshsdk.errors import NotFoundError

if TYPE_CHECKING:
    import meshsdk as mesh


def split_url(url: str) -> tuple[str, str]:
    """(bucket, key) of `s3://bucket/key`."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    return bucket, key


def save(client: mesh.Client, url: str, state: dict[str, Any]) -> None:
    """Durable when it returns."""
    body = io.BytesIO()
    torch.save(state, body)
    client.put(*split_url(url), body.getbuffer())


def load(client: mesh.Client, url: str) -> dict[str, Any] | None:
    """What was saved there; None if nothing was."""
    try:
        body = client.get(*split_url(url))
    except NotFoundError:
        return None
    state: dict[str, Any] = torch.load(io.BytesIO(body), weights_only=True, map_location="cpu")
    return state
