"""One page of the multipart uploads in progress.

Law: like `listing`, over (key, upload id). Uploads are few; past a common prefix the walk still seeks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.store.choosing import ChosenWalk, chooser
from meshd.store.index import UPLOAD_ID_LENGTH
from meshd.store.listing import common_prefix, successor
from meshd.store.records import UploadPage

if TYPE_CHECKING:
    from meshd.store.choosing import AnyWalk
    from meshd.store.index import Index
    from meshd.store.records import Upload

_TAIL = UPLOAD_ID_LENGTH + 1  # NUL and the id behind each key


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
    with index.reading() as txn, index.uploads.walk(txn, start) as every:
        walk: AnyWalk = every
        if slots is not None:
            walk = ChosenWalk(every, chooser(slots), base + want, _TAIL)
        while walk.key is not None and walk.key.startswith(base + want):
            name, upload_id = walk.key[len(base) : -_TAIL], walk.key[1 - _TAIL :]
            rolled = common_prefix(name, want, delim)
            if rolled is not None and rolled <= after:
                walk.seek(base + successor(rolled))
                continue
            if rolled is None and (name < after or (name == after and _seen(upload_id, id_marker))):
                walk.next()
                continue
            if len(uploads) + len(prefixes) >= limit:
                return UploadPage(tuple(uploads), tuple(prefixes), limit > 0, *last)
            if rolled is None:
                uploads.append(index.decode_upload(walk.value))
                last = (name.decode(), upload_id.decode())
                walk.next()
            else:
                prefixes.append(rolled.decode())
                last = (rolled.decode(), "")
                walk.seek(base + successor(rolled))
    return UploadPage(tuple(uploads), tuple(prefixes))


def _seen(upload_id: bytes, marker: str) -> bool:
    """Whether an upload of the marker's own key was given out before: all were when no id is given."""
    return not marker or upload_id <= marker.encode()
