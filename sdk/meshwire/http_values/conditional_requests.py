"""Conditional requests: entity tags, preconditions and byte ranges (RFC 9110 §8.8.3, §13, §14), as in S3.

Law: pure decisions; the caller turns them into statuses. A malformed or multi-range header is ignored, as
in S3; an unsatisfiable range is an error (416).
Invariant: an ETag inside Shardmesh never carries quotes.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable


# RFC 9110 §8.8.3, plus the bare tags that several S3 clients send.
_TAG = re.compile(r'\s*(?:W/)?(?:"([^"]*)"|([^",\s]+))\s*(?:,|\Z)')


def quote_etag(etag: str) -> str:
    """Return `etag` as it appears in headers."""
    return f'"{etag}"'


def unquote_etag(text: str) -> str:
    """Strip weakness mark, quotes and surrounding blanks from a received tag."""
    return text.strip().removeprefix("W/").strip('"')


def parse_etag_list(header: str) -> tuple[str, ...]:
    """Parse the tags of an If-Match or If-None-Match header, keeping `*`; an unreadable rest becomes one
    opaque tag that matches nothing."""
    tags, position = [], 0
    while position < len(header):
        match = _TAG.match(header, position)
        if match is None:
            tags.append(header[position:])
            break
        tags.append(match[1] if match[1] is not None else match[2])
        position = match.end()
    return tuple(tags)


def multipart_etag(part_etags: Iterable[str]) -> str:
    """Return S3's ETag of a multipart upload: MD5 over the parts' MD5s, `-`, number of parts.

    Raises ValueError for a part whose ETag is not an MD5 in hexadecimal.
    """
    digest, count = hashlib.md5(usedforsecurity=False), 0
    for etag in part_etags:
        digest.update(bytes.fromhex(etag))
        count += 1
    return f"{digest.hexdigest()}-{count}"


FailedCondition = Literal["", "If-Match", "If-None-Match", "If-Modified-Since", "If-Unmodified-Since"]
"""The header of the condition that failed; empty if all hold."""

NOT_MODIFIED_CONDITIONS = frozenset({"If-None-Match", "If-Modified-Since"})
"""Conditions that fail with 304 instead of 412 for GET and HEAD."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Preconditions of a request: ETags without quotes, `*` kept as is; times in seconds since the epoch."""

    if_match: tuple[str, ...] = ()
    if_none_match: tuple[str, ...] = ()
    if_modified_since: int | None = None
    if_unmodified_since: int | None = None


def _matches(tags: tuple[str, ...], etag: str) -> bool:
    return "*" in tags or etag in tags


def failed_read_condition(conditions: Conditions, etag: str, modified: int) -> FailedCondition:
    """Return the first condition that fails for a GET or HEAD of an existing object (`modified` in
    seconds), in the order of RFC 9110 §13.2.2."""
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


def failed_write_condition(conditions: Conditions, etag: str | None, modified: int = 0) -> FailedCondition:
    """Return the first condition that fails for a write over an object with `etag`, or over nothing (None:
    a failed If-Match is then a 404)."""
    if etag is None:
        return "If-Match" if conditions.if_match else ""
    if conditions.if_match and not _matches(conditions.if_match, etag):
        return "If-Match"
    if conditions.if_none_match and _matches(conditions.if_none_match, etag):
        return "If-None-Match"
    if conditions.if_unmodified_since is not None and modified > conditions.if_unmodified_since:
        return "If-Unmodified-Since"
    return ""


_RANGE = re.compile(r"bytes=(?:(\d+)-(\d*)|-(\d+))\Z", re.A)
_LARGEST = (1 << 63) - 1  # longer than any object; larger numbers are clamped to it


@dataclass(frozen=True, slots=True)
class RangeSpec:
    """A byte range: `first`–`last` inclusive, either end open (None); `first` None means the last `last`
    bytes."""

    first: int | None
    last: int | None

    @property
    def is_suffix(self) -> bool:
        """Whether the range is a non-empty suffix."""
        return self.first is None and bool(self.last)


class UnsatisfiableRangeError(ValueError):
    """The range is beyond the object: S3's InvalidRange, status 416."""


def parse_range(header: str | None) -> RangeSpec | None:
    """Parse a `Range` header; None if it is absent, malformed or has several ranges (then the whole object
    is sent)."""
    if header is None:
        return None
    match = _RANGE.match(header.strip(" \t"))
    if match is None:
        return None
    first, last, suffix = (_number(text) if text else None for text in match.groups())
    if suffix is not None:
        return RangeSpec(None, suffix)
    if first is not None and last is not None and last < first:
        return None
    return RangeSpec(first, last)


def _number(digits: str) -> int:
    """Parse a number, clamped; Python refuses to convert very long ones."""
    significant = digits.lstrip("0")
    return _LARGEST if len(significant) > 19 else min(int(significant or "0"), _LARGEST)


def resolve_range(spec: RangeSpec, size: int) -> tuple[int, int]:
    """Return (offset, length) in bytes within an object of `size` bytes; the end is clipped.

    Raises UnsatisfiableRangeError if the range covers nothing of the object (as with any empty object).
    """
    if spec.first is None:
        length = min(spec.last or 0, size)
        if length == 0:
            raise UnsatisfiableRangeError
        return size - length, length
    if spec.first >= size:
        raise UnsatisfiableRangeError
    last = size - 1 if spec.last is None else min(spec.last, size - 1)
    return spec.first, last - spec.first + 1
