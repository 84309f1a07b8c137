"""Members of archives in requests: `?member=NAME` reads one, `?members` lists them. Ours, not S3's.

Law: a member is named as the archive names it, up to 4,096 bytes of it. The listing is JSON, for a program
that can add a query can read it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from meshwire.s3 import operations
from meshwire.s3.errors import S3Error
from meshwire.s3.queries import invalid
from meshwire.s3.results import MemberEntry, MemberListing

if TYPE_CHECKING:
    from meshwire.s3.queries import Query

MAX_NAME_BYTES: Final = 4096
MAX_PAGE: Final = 10_000
_PAGE: Final = 1000


def read_member(query: Query) -> str | None:
    """The member that is asked for; None when the object is. Raises S3Error InvalidArgument."""
    return _name(query, "member") if "member" in query.values else None


def read_operation(bucket: str, key: str, query: Query) -> operations.ListMembers:
    """Raises S3Error InvalidArgument, InvalidRequest."""
    if "member" in query.values or "partNumber" in query.values:
        raise S3Error("InvalidRequest", "members is asked for alone: it lists, and member reads one.")
    return operations.ListMembers(
        bucket,
        key,
        _name(query, "prefix"),
        _name(query, "start-after"),
        query.integer("max-keys", _PAGE, low=1, high=MAX_PAGE),
        query.version(),
    )


def _name(query: Query, parameter: str) -> str:
    value = query.values.get(parameter, "")
    if len(value.encode()) > MAX_NAME_BYTES or "\0" in value or (parameter == "member" and not value):
        raise invalid(parameter, value, f"The name of a member has 1 to {MAX_NAME_BYTES} bytes.")
    return value


def parse_document(body: bytes) -> MemberListing:
    """Reads back what `document` wrote. Raises S3Error InternalError for anything else."""
    try:
        found = json.loads(body)
        entries = tuple(
            MemberEntry(str(each["name"]), int(each["size"]), str(each["etag"]), each.get("offset"))
            for each in found["members"]
        )
        kind, etag, size, count = found["kind"], found["etag"], found["size"], found["count"]
        return MemberListing(str(kind), str(etag), int(size), int(count), entries, found.get("next"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise S3Error("InternalError", "The answer is no listing of an archive's members.") from None


def document(listing: MemberListing) -> bytes:
    """What `?members` answers."""
    found: dict[str, Any] = {
        "kind": listing.kind,
        "etag": listing.etag,
        "size": listing.size,
        "count": listing.count,
        "members": [
            {"name": entry.name, "size": entry.size, "etag": entry.etag}
            | ({} if entry.offset is None else {"offset": entry.offset})
            for entry in listing.entries
        ],
    }
    if listing.next_after is not None:
        found["next"] = listing.next_after
    return json.dumps(found, ensure_ascii=False).encode()
