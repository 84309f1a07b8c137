"""Listing of multipart uploads: a whole common prefix is skipped with one seek."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from meshd.store.index.index import UPLOAD_ID_LENGTH
from meshd.store.index.listing import common_prefix, successor
from meshd.store.index.ordered_table import SlotCursor, slot_filter
from meshd.store.records import Upload, UploadPage

if TYPE_CHECKING:
    from meshd.store.index.index import Index
    from meshd.store.index.ordered_table import Cursor

_upload = msgspec.msgpack.Decoder(Upload).decode
_TAIL = UPLOAD_ID_LENGTH + 1  # NUL and the id after each key


def list_uploads(
    index: Index,
    bucket: str,
    prefix: str,
    delimiter: str,
    key_marker: str,
    id_marker: str,
    limit: int,
    slots: bytes | None = None,
) -> UploadPage:
    """See ObjectStore.list_uploads."""
    base, want, delim, after = (
        bucket.encode() + b"\0",
        prefix.encode(),
        delimiter.encode(),
        key_marker.encode(),
    )
    uploads: list[Upload] = []
    prefixes: list[str] = []
    last: tuple[str, str] = ("", "")
    start = base + max(want, after)
    with index.read_transaction() as txn, index.uploads.open_cursor(txn, start) as all_uploads:
        cursor: Cursor = all_uploads
        if slots is not None:
            cursor = SlotCursor(all_uploads, slot_filter(slots), base + want, _TAIL)
        while cursor.key is not None and cursor.key.startswith(base + want):
            name, upload_id = cursor.key[len(base) : -_TAIL], cursor.key[1 - _TAIL :]
            rolled = common_prefix(name, want, delim)
            if rolled is not None and rolled <= after:
                cursor.seek(base + successor(rolled))
                continue
            if rolled is None and (name < after or (name == after and _seen(upload_id, id_marker))):
                cursor.next()
                continue
            if len(uploads) + len(prefixes) >= limit:
                return UploadPage(tuple(uploads), tuple(prefixes), limit > 0, *last)
            if rolled is None:
                uploads.append(_upload(cursor.value))
                last = (name.decode(), upload_id.decode())
                cursor.next()
            else:
                prefixes.append(rolled.decode())
                last = (rolled.decode(), "")
                cursor.seek(base + successor(rolled))
    return UploadPage(tuple(uploads), tuple(prefixes))


def _seen(upload_id: bytes, marker: str) -> bool:
    """Returns True if an earlier page listed this upload of the marker's key; without an id, all of them were
    listed."""
    return not marker or upload_id <= marker.encode()
