"""Read-ahead of objects: tells a node which small objects are read next, and in which order.

Law: optional. A node without rotational disks, of an earlier release, or of another store loads none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from meshsdk.client.request import json_request
from meshsdk.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshsdk.client.transport import Transport

MAX_KEYS: Final = 4096
SMALL_BYTES: Final = 1 << 20
"""Larger objects are not loaded: nodes read them sequentially anyway."""
_PATIENCE: Final = 30.0  # deadline in seconds; a node answers after ten


def load_objects(transport: Transport, bucket: str, keys: Sequence[str]) -> int:
    """Have objects loaded; returns how many of the first keys were, 0 if it is of no use to ask again."""
    try:
        answer = transport.json(
            json_request("POST", "/-/read-ahead", {"bucket": bucket, "keys": list(keys)}), _PATIENCE
        )
        count = answer["loaded"]
    except (MeshError, KeyError, TypeError):
        return 0
    return count if isinstance(count, int) and 0 <= count <= len(keys) else 0
