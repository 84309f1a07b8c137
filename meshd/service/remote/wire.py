"""What nodes say to each other about objects and documents: msgpack, one message a body.

Law: a part is (bucket, key, ETag, size, offset, length) as in `assembly.elsewhere`; a record goes without the
places of its bytes, which mean nothing elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta, Struct

from meshd.assembly.addressing import Asked
from meshd.store.records import Record

READ: Final = "/-/peer/objects/read"
REST: Final = "/-/peer/objects/rest"
FIND: Final = "/-/peer/objects/find"
LIST: Final = "/-/peer/objects/list"
INDEX: Final = "/-/peer/archives/index"
MADE: Final = "/-/peer/views/made"
FRAMES: Final = "/-/peer/frames"
DOCUMENTS: Final = "/-/peer/documents/"
AGAIN: Final = "again"
"""As the query of a document that is put: it was removed, and is written also where it still lies."""
KEPT: Final = "/-/peer/kept"
MAX_PARTS: Final = 20_000
MAX_ASK_BYTES: Final = 32 << 20
MAX_DOCUMENT_BYTES: Final = 1 << 30

if TYPE_CHECKING:
    from collections.abc import Callable

_Text = Annotated[str, Meta(max_length=4096)]
_Bytes = Annotated[int, Meta(ge=-1, le=1 << 60)]
PartTuple = tuple[_Text, _Text, _Text, _Bytes, _Bytes, _Bytes]
Name = tuple[_Text, _Text]


class FarRecord(Record, frozen=True, array_like=True):
    """The record of an object whose bytes other nodes hold: it has no extents, and no store reads it."""


class ReadAsk(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Bytes of these parts, as a frame of samples; what cannot be given is in its metadata, `errors`:
    {number: [code, message]}. `proven`: extents of which a part is wanted are compared as a whole before."""

    parts: Annotated[list[PartTuple], Meta(max_length=MAX_PARTS)]
    proven: bool = False


class RestAsk(Struct, frozen=True, forbid_unknown_fields=True):
    """`length` bytes from `offset` on of exactly this version, as they are."""

    bucket: _Text
    key: _Text
    version: _Text
    etag: _Text
    size: Annotated[int, Meta(ge=0)]
    offset: Annotated[int, Meta(ge=0)]
    length: Annotated[int, Meta(ge=0)]


class FindAsk(Struct, frozen=True, forbid_unknown_fields=True):
    """The current objects of these names."""

    names: Annotated[list[Name], Meta(max_length=MAX_PARTS)]


class FindAnswer(Struct, frozen=True):
    """One a name, None where there is no object; `unknown`: numbers of names this node cannot speak for."""

    records: list[FarRecord | None]
    unknown: list[int] = []


class ListAsk(Struct, frozen=True, forbid_unknown_fields=True):
    """A page of the objects under a prefix that this node decides under the map of `version`."""

    bucket: _Text
    prefix: _Text
    after: _Text
    version: int
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 2000


class ListAnswer(Struct, frozen=True):
    """`entries` in order of UTF-8 bytes; `after`: of the next page, "" at the end."""

    entries: list[tuple[str, FarRecord]]
    after: str = ""


class IndexAsk(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The index of an archive, or (`lines`) of a file of lines, or (`features`) of a file of TFRecords, or
    (`rows`) the lengths of the rows of one of Parquet."""

    bucket: _Text
    key: _Text
    etag: _Text
    lines: bool = False
    rows: bool = False
    features: Annotated[list[_Text], Meta(max_length=64)] = []


class KeptAsk(Struct, frozen=True, forbid_unknown_fields=True):
    """A page of the documents under a prefix that this node has."""

    prefix: _Text
    after: _Text = ""
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 5000


class KeptAnswer(Struct, frozen=True):
    """`rows`: name, bytes, the minutes since 1970 in which it came and was used last; `after`: of the next
    page, "" at the end."""

    rows: list[tuple[str, int, int, int]]
    after: str = ""


class MadeAsk(Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a view (its document) for a source object of this content, as bytes."""

    view: Annotated[str, Meta(max_length=1 << 20)]
    bucket: _Text
    key: _Text
    etag: _Text
    size: int


def far(record: Record | None) -> FarRecord | None:
    """The record as other nodes may see it."""
    if record is None:
        return None
    values = {name: getattr(record, name) for name in record.__struct_fields__}
    return FarRecord(**{**values, "extents": (), "manifest": None, "broken": False})


encode = msgspec.msgpack.Encoder().encode
decode_read = msgspec.msgpack.Decoder(ReadAsk).decode
decode_rest = msgspec.msgpack.Decoder(RestAsk).decode
decode_find = msgspec.msgpack.Decoder(FindAsk).decode
decode_found = msgspec.msgpack.Decoder(FindAnswer).decode
decode_list = msgspec.msgpack.Decoder(ListAsk).decode
decode_listed = msgspec.msgpack.Decoder(ListAnswer).decode
decode_made = msgspec.msgpack.Decoder(MadeAsk).decode
decode_kept_ask = msgspec.msgpack.Decoder(KeptAsk).decode
decode_kept = msgspec.msgpack.Decoder(KeptAnswer).decode
decode_index = msgspec.msgpack.Decoder(IndexAsk).decode
decode_address: Callable[[bytes], Asked] = msgspec.msgpack.Decoder(Asked).decode
