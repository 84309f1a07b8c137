"""Peer messages: the calls by which nodes read each other's objects and documents, and their messages.

A part is (bucket, key, ETag, size, offset, length). A record travels without the locations of its bytes,
which mean nothing on another node.
"""

from __future__ import annotations

from types import NoneType
from typing import Annotated, Any, Final, cast

from msgspec import Meta, Struct

from meshd.core.frame_address import AnyFrameAddress
from meshd.rpc.peer_rpc import PREFIX, PeerCall, ResponseStream
from meshd.store.records import Record
from meshwire.http_values import percent_encoding

MAX_PARTS: Final = 20_000
_MAX_REQUEST_BYTES: Final = 32 << 20
_LOAD_TIMEOUT: Final = 120.0  # seconds for a window of a gigabyte, on a busy disk

_Text = Annotated[str, Meta(max_length=4096)]
_Bytes = Annotated[int, Meta(ge=-1, le=1 << 60)]
PartTuple = tuple[_Text, _Text, _Text, _Bytes, _Bytes, _Bytes]
Name = tuple[_Text, _Text]


class RemoteRecord(Record, frozen=True, array_like=True):
    """The record of an object whose bytes other nodes hold. It has no extents, and no store reads it."""


class ReadRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Requests the bytes of these parts, as a frame of samples. Its metadata lists failed parts in `errors`:
    {number: [code, message]}, and in `quarantined` the numbers of those that are in quarantine on this node.
    `proven`: verify whole extents before sending a part of one."""

    parts: Annotated[list[PartTuple], Meta(max_length=MAX_PARTS)]
    proven: bool = False


class ResumeRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests `length` raw bytes from `offset` of exactly this version."""

    bucket: _Text
    key: _Text
    version: _Text
    etag: _Text
    size: Annotated[int, Meta(ge=0)]
    offset: Annotated[int, Meta(ge=0)]
    length: Annotated[int, Meta(ge=0)]


class FindRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests the current objects of these names."""

    names: Annotated[list[Name], Meta(max_length=MAX_PARTS)]


class FindResponse(Struct, frozen=True):
    """One record per name, None where there is no object; `unknown`: numbers of names that this node cannot
    answer for."""

    records: list[RemoteRecord | None]
    unknown: list[int] = []


class ListRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests a page of the objects under a prefix that this node is primary of under map `version`."""

    bucket: _Text
    prefix: _Text
    after: _Text
    version: int
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 2000


class ListResponse(Struct, frozen=True):
    """`entries` in UTF-8 byte order; `after` of the next page, "" at the end."""

    entries: list[tuple[str, RemoteRecord]]
    after: str = ""


class ChangesRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests what changed below a prefix of a bucket in this node's store since its revision `since`, -1 if
    only its revision is wanted, under map `version` and with `copies` of each object."""

    bucket: _Text
    prefix: _Text
    since: int
    version: int
    copies: int


class ChangesResponse(Struct, frozen=True):
    """The `revision` of the node's store; if it is `known`, the keys whose objects may have changed until
    then, and ranges of them."""

    revision: int
    known: bool = False
    keys: list[str] = []
    ranges: list[tuple[str, str]] = []


class IndexRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Requests the index of an archive, of a line file (`lines`) or of a TFRecord file (`features`), or the
    row lengths of a Parquet file (`rows`), or the index of a table (`table`), of some `slices` of it."""

    bucket: _Text
    key: _Text
    etag: _Text
    lines: bool = False
    rows: bool = False
    features: Annotated[list[_Text], Meta(max_length=64)] = []
    table: bool = False
    slices: Annotated[int, Meta(ge=0, lt=1 << 17)] = 0


class PageRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Requests the page of a shard in snapshots of a kind; `parts`, `in_shards`, `beside`: see
    `PageParts`. `finished`: only if the node has it already."""

    bucket: _Text
    key: _Text
    etag: _Text
    kind: _Text
    parts: Annotated[list[Annotated[list[_Text], Meta(max_length=64)]], Meta(max_length=256)]
    in_shards: bool = False
    beside: Annotated[str, Meta(max_length=32)] = ""
    finished: bool = False


class PagedKindsRequest(Struct, frozen=True):
    """Requests the kinds of snapshots of which this node reads pages."""


class PagedKindsResponse(Struct, frozen=True):
    """`kinds`: kinds of snapshots of which the node reads pages."""

    kinds: list[str]


class InventoryRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests a page of this node's documents under a prefix."""

    prefix: _Text
    after: _Text = ""
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 5000


class InventoryResponse(Struct, frozen=True):
    """`rows`: name, bytes, and the minutes since 1970 in which it arrived and was last used; `after` of the
    next page, "" at the end."""

    rows: list[tuple[str, int, int, int]]
    after: str = ""


class ViewResultRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests the result of a view (its document) for a source object of this content, as bytes."""

    view: Annotated[str, Meta(max_length=1 << 20)]
    bucket: _Text
    key: _Text
    etag: _Text
    size: int


def to_remote_record(record: Record | None) -> RemoteRecord | None:
    """Returns the record in the form that other nodes may see."""
    if record is None:
        return None
    values = {name: getattr(record, name) for name in record.__struct_fields__}
    return RemoteRecord(**{**values, "extents": (), "manifest": None, "broken": False})


class DocumentName(Struct, frozen=True):
    """A shared document. `again`: it was deleted, so write it even where a copy remains."""

    key: str
    again: bool = False


class _DocumentTarget:
    """Encodes the key as a path below the call's own, and `again` as a query."""

    def encode_request(self, request: DocumentName) -> str:
        return percent_encoding.encode(request.key, safe="/") + ("?again" if request.again else "")

    def decode_request(self, suffix: str, kind: object) -> Any:
        path, _, query = suffix.partition("?")
        return DocumentName(percent_encoding.decode(path), query == "again")


_DOCUMENTS_PATH: Final = f"{PREFIX}documents/"
READ_PARTS: Final = PeerCall(
    f"{PREFIX}objects/read",
    request=ReadRequest,
    response=ResponseStream,
    max_bytes=_MAX_REQUEST_BYTES,
    errors="batch",
)
LOAD_PARTS: Final = PeerCall(
    f"{PREFIX}objects/load",
    request=ReadRequest,
    response=NoneType,
    max_bytes=_MAX_REQUEST_BYTES,
    timeout=_LOAD_TIMEOUT,
    errors="batch",
)
"""Reads these parts from rotational disks into memory, in the order of the disks, before they are fetched."""
RESUME_READ: Final = PeerCall(
    f"{PREFIX}objects/rest",
    request=ResumeRequest,
    response=ResponseStream,
    malformed_code="InvalidRequest",
)
FIND_RECORDS: Final = PeerCall(
    f"{PREFIX}objects/find",
    request=FindRequest,
    response=FindResponse,
    max_bytes=_MAX_REQUEST_BYTES,
    errors="batch",
)
LIST_RECORDS: Final = PeerCall(
    f"{PREFIX}objects/list",
    request=ListRequest,
    response=ListResponse,
    max_bytes=_MAX_REQUEST_BYTES,
    errors="batch",
)
READ_CHANGES: Final = PeerCall(
    f"{PREFIX}objects/changes",
    request=ChangesRequest,
    response=ChangesResponse,
    timeout=5.0,
    errors="batch",
)
READ_INDEX: Final = PeerCall(
    f"{PREFIX}archives/index",
    request=IndexRequest,
    response=bytes,
    max_bytes=_MAX_REQUEST_BYTES,
    errors="batch",
)
"""Returns the document of an index."""
READ_PAGE: Final = PeerCall(
    f"{PREFIX}pages", request=PageRequest, response=bytes, max_bytes=_MAX_REQUEST_BYTES, errors="batch"
)
"""Returns the document of a page; no bytes while it is still being made: ask again."""
READ_PAGED_KINDS: Final = PeerCall(
    f"{PREFIX}paged-kinds",
    request=PagedKindsRequest,
    response=PagedKindsResponse,
    timeout=2.0,
    errors="batch",
)
READ_FRAME: Final = PeerCall(
    f"{PREFIX}frames",
    request=cast("type[AnyFrameAddress]", AnyFrameAddress),
    response=ResponseStream,
    max_bytes=_MAX_REQUEST_BYTES,
    errors="batch",
)
READ_DOCUMENT: Final = PeerCall(
    _DOCUMENTS_PATH,
    request=DocumentName,
    response=bytes,
    method="GET",
    target=_DocumentTarget(),
    max_bytes=0,
    errors="batch",
)
STORE_DOCUMENT: Final = PeerCall(
    _DOCUMENTS_PATH,
    request=DocumentName,
    response=NoneType,
    method="PUT",
    target=_DocumentTarget(),
    max_bytes=1 << 30,
    errors="batch",
)
LIST_DOCUMENTS: Final = PeerCall(
    f"{PREFIX}kept",
    request=InventoryRequest,
    response=InventoryResponse,
    max_bytes=_MAX_REQUEST_BYTES,
    errors="batch",
)
MAKE_VIEW_RESULT: Final = PeerCall(
    f"{PREFIX}views/made",
    request=ViewResultRequest,
    response=bytes,
    max_bytes=_MAX_REQUEST_BYTES,
    map_wait=1.0,
    errors="batch",
    malformed_code="InvalidArgument",
)
