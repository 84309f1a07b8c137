"""Values that may stand alone or in a list.

Law: one text or a list of one or more; numbers and booleans are taken as they are written in JSON.
"""

from __future__ import annotations

from typing import Any

from meshwire.documents import shown
from meshwire.policies.errors import PolicyError


def texts(value: Any, path: str) -> tuple[str, ...]:
    """One or more texts. Raises PolicyError."""
    items = value if isinstance(value, list) else [value]
    if not items or not all(isinstance(item, str) and item for item in items):
        raise PolicyError(path, f"expected text or a list of texts, got {shown(value)}")
    return tuple(items)


def scalars(value: Any, path: str) -> tuple[str, ...]:
    """One or more texts, numbers or booleans, as text. Raises PolicyError."""
    items = value if isinstance(value, list) else [value]
    if not items or not all(isinstance(item, str | bool | int | float) for item in items):
        raise PolicyError(path, f"expected a value or a list of values, got {shown(value)}")
    return tuple(_plain(item) for item in items)


def _plain(item: str | float) -> str:
    if isinstance(item, bool):
        return "true" if item else "false"
    return item if isinstance(item, str) else repr(item)
