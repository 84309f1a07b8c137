"""Multipart uploads in the index: the uploads in progress, their parts, and listings of both.

Law: every method takes an LMDB transaction. Parts may outlive their upload (orphans), until they are removed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from meshd.store.index.listing import common_prefix, successor
from meshd.store.index.ordered_table import SlotCursor, slot_filter
from meshd.store.records import PartPage, Upload, UploadedPart, UploadPage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.store.index.ordered_table import Cursor, OrderedTable

_encode = msgspec.msgpack.Encoder().encode
_upload = msgspec.msgpack.Decoder(Upload).decode
_part = msgspec.msgpack.Decoder(UploadedPart).decode

UPLOAD_ID_LENGTH: Final = 32
_TAIL: Final = UPLOAD_ID_LENGTH + 1  # NUL and the id after each key
_LAST_PART: Final = 0xFFFF  # above every part number


def upload_key(bucket: str, key: str, upload_id: str) -> bytes:
    """Returns the index key of an upload. Ids have a fixed length, so a NUL in the key is unambiguous."""
    return f"{bucket}\0{key}\0{upload_id}".encode()


class Uploads:
    """The uploads of an index, in `table`, and their parts."""

    def __init__(self, table: OrderedTable, parts: Any) -> None:
        self.table, self._parts = table, parts

    def get_upload(self, txn: Any, bucket: str, key: str, upload_id: str) -> Upload | None:
        raw = self.table.get(txn, upload_key(bucket, key, upload_id))
        return None if raw is None else _upload(raw)

    def put_upload(self, txn: Any, upload: Upload) -> None:
        self.table.put(txn, upload_key(upload.bucket, upload.key, upload.upload_id), _encode(upload))

    def delete_upload(self, txn: Any, upload: Upload) -> None:
        self.table.delete(txn, upload_key(upload.bucket, upload.key, upload.upload_id))

    def all_uploads(self, txn: Any) -> Iterator[Upload]:
        """Yields the uploads in order of (bucket, key, id)."""
        for _, raw in self.table.items(txn, b"", b""):
            yield _upload(raw)

    def get_part(self, txn: Any, upload_id: str, number: int) -> UploadedPart | None:
        raw = txn.get(upload_id.encode() + number.to_bytes(2, "big"), db=self._parts)
        return None if raw is None else _part(raw)

    def put_part(self, txn: Any, upload_id: str, part: UploadedPart) -> None:
        txn.put(upload_id.encode() + part.number.to_bytes(2, "big"), _encode(part), db=self._parts)

    def delete_part(self, txn: Any, upload_id: str, number: int) -> None:
        txn.delete(upload_id.encode() + number.to_bytes(2, "big"), db=self._parts)

    def parts_of(self, txn: Any, upload_id: str, after: int = 0) -> Iterator[UploadedPart]:
        """Yields parts with numbers above `after`, in order."""
        prefix = upload_id.encode()
        with txn.cursor(self._parts) as cursor:
            found = cursor.set_range(prefix + min(after + 1, _LAST_PART).to_bytes(2, "big"))
            while found and bytes(cursor.key()).startswith(prefix):
                yield _part(cursor.value())
                found = cursor.next()

    def list_parts(self, txn: Any, upload_id: str, after: int, limit: int) -> PartPage:
        """Returns a page of the parts with numbers above `after`, in order."""
        parts: list[UploadedPart] = []
        for part in self.parts_of(txn, upload_id, after):
            if len(parts) == limit:
                return PartPage(tuple(parts), limit > 0, parts[-1].number if parts else after)
            parts.append(part)
        return PartPage(tuple(parts))

    def all_parts(self, txn: Any) -> Iterator[tuple[str, UploadedPart]]:
        """Yields (upload id, part) of all parts, orphans included."""
        with txn.cursor(self._parts) as cursor:
            for name, raw in cursor:
                yield bytes(name[:UPLOAD_ID_LENGTH]).decode(), _part(raw)

    def list_uploads(
        self,
        txn: Any,
        bucket: str,
        prefix: str,
        delimiter: str,
        key_marker: str,
        id_marker: str,
        limit: int,
        slots: bytes | None = None,
    ) -> UploadPage:
        """Returns one page; see ObjectStore.list_uploads. A whole common prefix is skipped with one seek."""
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
        with self.table.open_cursor(txn, start) as all_uploads:
            cursor: Cursor = all_uploads
            if slots is not None:
                cursor = SlotCursor(all_uploads, slot_filter(slots), base + want, _TAIL)
            while cursor.key is not None and cursor.key.startswith(base + want):
                name, upload_id = cursor.key[len(base) : -_TAIL], cursor.key[1 - _TAIL :]
                rolled = common_prefix(name, want, delim)
                if rolled is not None and rolled <= after:
                    cursor.seek(base + successor(rolled))
                    continue
                if rolled is None and (name < after or (name == after and _is_listed(upload_id, id_marker))):
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


def _is_listed(upload_id: bytes, marker: str) -> bool:
    """Returns True if an earlier page listed this upload of the marker's key; without an id, all of them were
    listed."""
    return not marker or upload_id <= marker.encode()
