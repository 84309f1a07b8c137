"""Entity tags: quoting on the wire, bare everywhere else, and the ETag of a multipart upload.

Invariant: an ETag inside Shardmesh never carries quotes.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

# RFC 9110 §8.8.3, and, beyond it, the bare tags that several S3 clients send.
_TAG = re.compile(r'\s*(?:W/)?(?:"([^"]*)"|([^",\s]+))\s*(?:,|\Z)')


def quote(etag: str) -> str:
    """`etag` as it goes out."""
    return f'"{etag}"'


def unquote(text: str) -> str:
    """A tag as it came in, without weakness mark, quotes and surrounding blanks."""
    return text.strip().removeprefix("W/").strip('"')


def parse_list(header: str) -> tuple[str, ...]:
    """The tags of an If-Match or If-None-Match header, `*` kept; unreadable remains are one opaque tag that
    matches nothing."""
    tags, position = [], 0
    while position < len(header):
        match = _TAG.match(header, position)
        if match is None:
            tags.append(header[position:])
            break
        tags.append(match[1] if match[1] is not None else match[2])
        position = match.end()
    return tuple(tags)


def multipart(part_etags: Iterable[str]) -> str:
    """S3's ETag of an assembled upload: MD5 over the parts' MD5s, `-`, number of parts.

    Raises ValueError for a part whose ETag is not an MD5 in hexadecimal.
    """
    digest, count = hashlib.md5(usedforsecurity=False), 0
    for etag in part_etags:
        digest.update(bytes.fromhex(etag))
        count += 1
    return f"{digest.hexdigest()}-{count}"
