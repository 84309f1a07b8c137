"""Tags of objects and buckets: the header, the document, and what makes a tag valid.

Law: keys and values are measured in characters, as S3 does; a document's order is kept. Invariant: whatever
leaves here is valid and names no key twice.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-tagging.html
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from meshwire import percents
from meshwire.s3.elements import read, tag
from meshwire.s3.errors import S3Error
from meshwire.s3.queries import invalid

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

OBJECT_TAGS = 10
BUCKET_TAGS = 50
MAX_KEY = 128
MAX_VALUE = 256
MAX_DOCUMENT_BYTES = 64 << 10

# Letters, digits and white space of any script, and these signs.
_TEXT = re.compile(r"[\w\s+\-=.:/@]*\Z")
_HEADER = (
    "The header 'x-amz-tagging' shall be encoded as UTF-8 then URLEncoded URL query parameters without tag "
    "name duplicates."
)


def read_header(headers: Mapping[str, str]) -> dict[str, str]:
    """The tags of x-amz-tagging (`a=1&b=2`), in order of their keys; none when it is absent.

    Raises S3Error: InvalidArgument, InvalidTag, BadRequest.
    """
    text = headers.get("x-amz-tagging")
    if not text:
        return {}
    try:
        pairs = percents.split_query(text)
    except percents.PercentError:
        raise invalid("x-amz-tagging", text, _HEADER) from None
    if len({key for key, _ in pairs}) < len(pairs):
        raise invalid("x-amz-tagging", text, _HEADER)
    return checked(sorted(pairs), OBJECT_TAGS)


def replaces_tags(headers: Mapping[str, str]) -> bool:
    """x-amz-tagging-directive of a copy. Raises S3Error InvalidArgument."""
    directive = headers.get("x-amz-tagging-directive", "COPY")
    if directive not in {"COPY", "REPLACE"}:
        raise invalid("x-amz-tagging-directive", directive, "Unknown tagging directive.")
    return directive == "REPLACE"


def parse_tagging(body: bytes, limit: int = OBJECT_TAGS) -> dict[str, str]:
    """The tags of a Tagging document. Raises S3Error: MalformedXML, InvalidTag, BadRequest (too many)."""
    root = read(body, root="Tagging", max_bytes=MAX_DOCUMENT_BYTES)
    root.require_known(("TagSet",))
    listed = root.first("TagSet")
    if listed is None:
        raise S3Error("MalformedXML", "A Tagging document has one TagSet.")
    listed.require_known((), several=("Tag",))
    pairs = []
    for element in listed.all("Tag"):
        element.require_known(("Key", "Value"))
        key, value = element.first("Key"), element.first("Value")
        if key is None or value is None:
            raise S3Error("MalformedXML", "Every Tag has a Key and a Value.")
        pairs.append((key.text, value.text))
    return checked(pairs, limit)


def checked(pairs: Iterable[tuple[str, str]], limit: int) -> dict[str, str]:
    """The pairs as tags. Raises S3Error: InvalidTag, BadRequest."""
    tags: dict[str, str] = {}
    for key, value in pairs:
        if key in tags:
            raise S3Error("InvalidTag", "Cannot provide multiple Tags with the same key", extra=_named(key))
        _check(key, value)
        tags[key] = value
    if len(tags) > limit:
        kind = "Object" if limit == OBJECT_TAGS else "Bucket"
        raise S3Error("BadRequest", f"{kind} tags cannot be greater than {limit}")
    return tags


def _check(key: str, value: str) -> None:
    if not 1 <= len(key) <= MAX_KEY or _TEXT.match(key) is None:
        raise S3Error("InvalidTag", "The TagKey you have provided is invalid", extra=_named(key))
    if key.startswith("aws:"):
        raise S3Error("InvalidTag", "System tags cannot be added/updated by requester", extra=_named(key))
    if len(value) > MAX_VALUE or _TEXT.match(value) is None:
        raise S3Error(
            "InvalidTag",
            "The TagValue you have provided is invalid",
            extra={**_named(key), "TagValue": value[:MAX_VALUE]},
        )


def _named(key: str) -> dict[str, str]:
    return {"TagKey": key[:MAX_KEY]}


def pieces(tags: Mapping[str, str]) -> str:
    """The inside of a Tagging document."""
    pairs = "".join(f"<Tag>{tag('Key', key)}{tag('Value', value)}</Tag>" for key, value in tags.items())
    return f"<TagSet>{pairs}</TagSet>"
