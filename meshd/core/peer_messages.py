"""Peer messages: paths and msgpack bodies of the requests by which nodes read objects and documents.

A part is (bucket, key, ETag, size, offset, length). A record travels without the locations of its bytes,
which mean nothing on another node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta, Struct

from meshd.core.frame_address import AnyFrameAddress
from meshd.store.records import Record

READ_PATH: Final = "/-/peer/objects/read"
RESUME_PATH: Final = "/-/peer/objects/rest"
FIND_PATH: Final = "/-/peer/objects/find"
LIST_PATH: Final = "/-/peer/objects/list"
INDEX_PATH: Final = "/-/peer/archives/index"
VIEW_RESULT_PATH: Final = "/-/peer/views/made"
FRAMES_PATH: Final = "/-/peer/frames"
DOCUMENTS_PATH: Final = "/-/peer/documents/"
REWRITE_QUERY: Final = "again"
"""As the query of a document that is put: it was removed, and is written also where it still lies."""
INVENTORY_PATH: Final = "/-/peer/kept"
MAX_PARTS: Final = 20_000
MAX_REQUEST_BYTES: Final = 32 << 20
MAX_DOCUMENT_BYTES: Final = 1 << 30

if TYPE_CHECKING:
    from collections.abc import Callable

_Text = Annotated[str, Meta(max_length=4096)]
_Bytes = Annotated[int, Meta(ge=-1, le=1 << 60)]
PartTuple = tuple[_Text, _Text, _Text, _Bytes, _Bytes, _Bytes]
Name = tuple[_Text, _Text]


class RemoteRecord(Record, frozen=True, array_like=True):
    """The record of an object whose bytes other nodes hold: it has no extents, and no store reads it."""


class ReadRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Bytes of these parts, as a frame of samples; what cannot be given is in its metadata, `errors`:
    {number: [code, message]}. `proven`: extents of which a part is wanted are compared as a whole before."""

    parts: Annotated[list[PartTuple], Meta(max_length=MAX_PARTS)]
    proven: bool = False


class ResumeRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """`length` bytes from `offset` on of exactly this version, as they are."""

    bucket: _Text
    key: _Text
    version: _Text
    etag: _Text
    size: Annotated[int, Meta(ge=0)]
    offset: Annotated[int, Meta(ge=0)]
    length: Annotated[int, Meta(ge=0)]


class FindRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The current objects of these names."""

    names: Annotated[list[Name], Meta(max_length=MAX_PARTS)]


class FindResponse(Struct, frozen=True):
    """One a name, None where there is no object; `unknown`: numbers of names this node cannot speak for."""

    records: list[RemoteRecord | None]
    unknown: list[int] = []


class ListRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A page of the objects under a prefix that this node decides under the map of `version`."""

    bucket: _Text
    prefix: _Text
    after: _Text
    version: int
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 2000


class ListResponse(Struct, frozen=True):
    """`entries` in order of UTF-8 bytes; `after`: of the next page, "" at the end."""

    entries: list[tuple[str, RemoteRecord]]
    after: str = ""


class IndexRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The index of an archive, or (`lines`) of a file of lines, or (`features`) of a file of TFRecords, or
    (`rows`) the lengths of the rows of one of Parquet."""

    bucket: _Text
    key: _Text
    etag: _Text
    lines: bool = False
    rows: bool = False
    features: Annotated[list[_Text], Meta(max_length=64)] = []


class InventoryRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A page of the documents under a prefix that this node has."""

    prefix: _Text
    after: _Text = ""
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 5000


class InventoryResponse(Struct, frozen=True):
    """`rows`: name, bytes, the minutes since 1970 in which it came and was used last; `after`: of the next
    page, "" at the end."""

    rows: list[tuple[str, int, int, int]]
    after: str = ""


class ViewResultRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a view (its document) for a source object of this content, as bytes."""

    view: Annotated[str, Meta(max_length=1 << 20)]
    bucket: _Text
    key: _Text
    etag: _Text
    size: int


def to_remote_record(record: Record | None) -> RemoteRecord | None:
    """The record as other nodes may see it."""
    if record is None:
        return None
    values = {name: getattr(record, name) for name in record.__struct_fields__}
    return RemoteRecord(**{**values, "extents": (), "manifest": None, "broken": False})


encode = msgspec.msgpack.Encoder().encode
decode_read_request = msgspec.msgpack.Decoder(ReadRequest).decode
decode_resume_request = msgspec.msgpack.Decoder(ResumeRequest).decode
decode_find_request = msgspec.msgpack.Decoder(FindRequest).decode
decode_find_response = msgspec.msgpack.Decoder(FindResponse).decode
decode_list_request = msgspec.msgpack.Decoder(ListRequest).decode
decode_list_response = msgspec.msgpack.Decoder(ListResponse).decode
decode_view_result_request = msgspec.msgpack.Decoder(ViewResultRequest).decode
decode_inventory_request = msgspec.msgpack.Decoder(InventoryRequest).decode
decode_inventory_response = msgspec.msgpack.Decoder(InventoryResponse).decode
decode_index_request = msgspec.msgpack.Decoder(IndexRequest).decode
decode_frame_address: Callable[[bytes], AnyFrameAddress] = msgspec.msgpack.Decoder(AnyFrameAddress).decode
