"""Conditional requests (RFC 9110 §13), as S3 evaluates them.

Law: pure decisions over (conditions, ETag, modification time); the caller turns them into statuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Condition = Literal["", "If-Match", "If-None-Match", "If-Modified-Since", "If-Unmodified-Since"]
"""The header of a condition that does not hold; empty where all hold."""

OF_CACHES = frozenset({"If-None-Match", "If-Modified-Since"})
"""Those that a GET or HEAD answers with 304 and not with 412."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """ETags without quotes, `*` kept as it is; times in seconds since the epoch."""

    if_match: tuple[str, ...] = ()
    if_none_match: tuple[str, ...] = ()
    if_modified_since: int | None = None
    if_unmodified_since: int | None = None


def _matches(tags: tuple[str, ...], etag: str) -> bool:
    return "*" in tags or etag in tags


def failed_read_condition(conditions: Conditions, etag: str, modified: int) -> Condition:
    """The first that does not hold for GET or HEAD of an existing object (`modified` in seconds), in the
    order of RFC 9110 §13.2.2."""
    if conditions.if_match:
        if not _matches(conditions.if_match, etag):
            return "If-Match"
    elif conditions.if_unmodified_since is not None and modified > conditions.if_unmodified_since:
        return "If-Unmodified-Since"
    if conditions.if_none_match:
        if _matches(conditions.if_none_match, etag):
            return "If-None-Match"
    elif conditions.if_modified_since is not None and modified <= conditions.if_modified_since:
        return "If-Modified-Since"
    return ""


def failed_write_condition(conditions: Conditions, etag: str | None, modified: int = 0) -> Condition:
    """The first that does not hold for a write over an object with `etag`, or over nothing (None: a failed
    If-Match is then a 404)."""
    if etag is None:
        return "If-Match" if conditions.if_match else ""
    if conditions.if_match and not _matches(conditions.if_match, etag):
        return "If-Match"
    if conditions.if_none_match and _matches(conditions.if_none_match, etag):
        return "If-None-Match"
    if conditions.if_unmodified_since is not None and modified > conditions.if_unmodified_since:
        return "If-Unmodified-Since"
    return ""
