"""Conditional requests (RFC 9110 §13), as S3 evaluates them.

Law: pure decisions over (conditions, ETag, modification time); the caller turns them into statuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["proceed", "not_modified", "failed", "missing"]


@dataclass(frozen=True, slots=True)
class Conditions:
    """ETags without quotes, `*` kept as it is; times in seconds since the epoch."""

    if_match: tuple[str, ...] = ()
    if_none_match: tuple[str, ...] = ()
    if_modified_since: int | None = None
    if_unmodified_since: int | None = None


def _matches(tags: tuple[str, ...], etag: str) -> bool:
    return "*" in tags or etag in tags


def judge_read(conditions: Conditions, etag: str, modified: int) -> Verdict:
    """Verdict for GET and HEAD of an existing object (`modified` in seconds). Order of RFC 9110 §13.2.2."""
    if conditions.if_match:
        if not _matches(conditions.if_match, etag):
            return "failed"
    elif conditions.if_unmodified_since is not None and modified > conditions.if_unmodified_since:
        return "failed"
    if conditions.if_none_match:
        if _matches(conditions.if_none_match, etag):
            return "not_modified"
    elif conditions.if_modified_since is not None and modified <= conditions.if_modified_since:
        return "not_modified"
    return "proceed"


def judge_write(conditions: Conditions, etag: str | None, modified: int = 0) -> Verdict:
    """Verdict for a write over an object with `etag`, or over nothing (None: If-Match is then
    `missing`, a 404)."""
    if etag is None:
        return "missing" if conditions.if_match else "proceed"
    if conditions.if_match and not _matches(conditions.if_match, etag):
        return "failed"
    if conditions.if_none_match and _matches(conditions.if_none_match, etag):
        return "failed"
    if conditions.if_unmodified_since is not None and modified > conditions.if_unmodified_since:
        return "failed"
    return "proceed"
