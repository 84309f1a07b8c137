"""Value types of the store: object, upload, part and data file records, and the pages of listings.

Law: records are frozen and encoded as msgpack arrays. A new field goes to the end and has a default, so
that records written by earlier versions still decode.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from meshwire.s3.bucket_settings import Acl  # noqa: TC001  here, too
from meshwire.s3.results import ObjectEntry  # noqa: TC001  msgspec reads the annotations

_NOTHING = msgspec.Raw(b"\x80")

NULL = "null"
"""What the version without an id is called in requests and pages; `Record.version` says it as ""."""


class Extent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`length` bytes at `offset` of data file `file` on disk number `disk`; crc32c of exactly these bytes."""

    disk: int
    file: int
    offset: int
    length: int
    crc32c: int = 0


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One part of a multipart object, as it was completed."""

    size: int
    etag: str
    checksums: dict[str, str]


class Record(msgspec.Struct, frozen=True, array_like=True):
    """An object.

    `etag` without quotes; `stamp` orders versions (ns, rising); `modified` in ms since the epoch.
    """

    size: int
    etag: str
    stamp: int
    modified: int
    extents: tuple[Extent, ...]
    headers: dict[str, str] = {}
    metadata: dict[str, str] = {}
    checksums: dict[str, str] = {}
    checksum_type: str = ""
    parts: tuple[Part, ...] = ()
    owner: str = ""
    manifest: Extent | None = None  # the member that says which extents make this object, if need be
    moves: int = 0  # how often it was written again: moved by compaction, or its tags or ACL changed
    version: str = ""  # empty for the null version
    marker: bool = False  # a delete marker: no bytes, no ETag
    tags: dict[str, str] = {}
    acl: Acl | None = None  # None is `private`
    amended: int = 0  # the stamp of the last change of tags or ACL; 0: never
    broken: bool = (
        False  # in quarantine: its bytes here are damaged, see `quarantine`; data files never say so
    )


class Brief(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The beginning of a Record as a listing reads it: fields that it does not show are passed over."""

    size: int
    etag: str
    stamp: int
    modified: int
    extents: msgspec.Raw
    headers: msgspec.Raw = _NOTHING
    metadata: msgspec.Raw = _NOTHING
    checksums: dict[str, str] = {}
    checksum_type: str = ""
    parts: msgspec.Raw = _NOTHING
    owner: str = ""


class Upload(msgspec.Struct, frozen=True, array_like=True):
    """A multipart upload in progress; `initiated` in ms since the epoch. `born`: when its bucket was made, 0
    where nobody said."""

    upload_id: str
    bucket: str
    key: str
    headers: dict[str, str] = {}
    metadata: dict[str, str] = {}
    checksum_algorithm: str = ""
    checksum_type: str = ""
    owner: str = ""
    initiated: int = 0
    place: Extent | None = None  # its member in the data files
    stamp: int = 0
    moves: int = 0  # how often compaction has moved that
    tags: dict[str, str] = {}
    acl: Acl | None = None
    born: int = 0


class UploadedPart(msgspec.Struct, frozen=True, array_like=True):
    """A part of an upload in progress; `modified` in ms since the epoch."""

    number: int
    size: int
    etag: str
    checksums: dict[str, str]
    modified: int
    extents: tuple[Extent, ...]
    stamp: int = 0
    moves: int = 0  # how often compaction has moved its bytes


class Meta(msgspec.Struct, frozen=True):
    """What a writer says of its object at commit: everything the bytes alone do not tell."""

    etag: str
    headers: dict[str, str] = {}
    metadata: dict[str, str] = {}
    checksums: dict[str, str] = {}
    checksum_type: str = ""
    owner: str = ""
    tags: dict[str, str] = {}
    acl: Acl | None = None
    parts: tuple[Part, ...] = ()  # of a copy: what the source's bytes were uploaded in


class DataFile(msgspec.Struct, frozen=True, array_like=True):
    """A data file as the index sees it.

    `end`: bytes committed; `live`: payload bytes in use; `dead`: payload bytes nobody uses; `refs`: uses
    of its members (a file of its own may be shared by copies); `tombs`: members that undo others
    (deletions, ended uploads); `buried`: members nobody uses; the lowest and highest stamp inside.
    """

    disk: int
    kind: str  # "segment" | "own"
    state: str  # "open" | "sealed" | "retired" | "lost": a rebuild could not read all of it,
    # or of another one that may tell what it is for; it is kept
    writer: str
    end: int = 0
    live: int = 0
    dead: int = 0
    refs: int = 0
    tombs: int = 0
    first_stamp: int = 0
    last_stamp: int = 0
    buried: int = 0


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing, in order of UTF-8 bytes; prefixes count to the limit.

    `next_after` is the `after` of the next page (the last key or prefix given out); "" when not truncated.
    """

    entries: tuple[tuple[str, Record], ...] = ()
    prefixes: tuple[str, ...] = ()
    truncated: bool = False
    next_after: str = ""


@dataclass(frozen=True, slots=True)
class EntryPage:
    """A `Page` of what S3's listings show, without the records; `owners` has the owner's id of each entry."""

    entries: tuple[ObjectEntry, ...] = ()
    owners: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    truncated: bool = False
    next_after: str = ""


@dataclass(frozen=True, slots=True)
class VersionPage:
    """One page of versions, by key, newest first; `latest` says which is its key's newest (a marker may be).

    `next_key` and `next_version` (`null` for the null version, "" after a common prefix) begin the next page.
    """

    entries: tuple[tuple[str, Record], ...] = ()
    latest: tuple[bool, ...] = ()
    prefixes: tuple[str, ...] = ()
    truncated: bool = False
    next_key: str = ""
    next_version: str = ""


@dataclass(frozen=True, slots=True)
class Removed:
    """What a deletion did: `record` is the version that went (None: there was none), `marker` the delete
    marker that was made, `stamp` when a version was removed for good (0: none was)."""

    record: Record | None = None
    marker: Record | None = None
    stamp: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class UploadPage:
    """One page of uploads in progress, ordered by (key, upload id)."""

    uploads: tuple[Upload, ...] = ()
    prefixes: tuple[str, ...] = ()
    truncated: bool = False
    next_key: str = ""
    next_id: str = ""


@dataclass(frozen=True, slots=True)
class PartPage:
    """One page of parts, ordered by number; `next_after` is the last number given out."""

    parts: tuple[UploadedPart, ...] = ()
    truncated: bool = False
    next_after: int = 0


class Span(msgspec.Struct, frozen=True):
    """`length` bytes at `offset` of the open file `fd`; valid only inside `Store.reading`. `extent`: what
    they are, or are a part of; `name`: the object's, where a reader of many has said so."""

    fd: int
    offset: int
    length: int
    extent: Extent | None = None
    name: str = ""

    def sub_span(self, offset: int, length: int) -> Span:
        """`length` bytes of it, from `offset` on."""
        return Span(self.fd, self.offset + offset, length, self.extent, self.name)

    def with_name(self, name: str) -> Span:
        """The same, of the object of this name."""
        return Span(self.fd, self.offset, self.length, self.extent, name)


@dataclass(frozen=True, slots=True)
class Location:
    """`length` bytes at `offset` of the file at `path`, for another process to read; crc32c of exactly these
    bytes.
    """

    path: str
    offset: int
    length: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class DiskStats:
    """Room of one disk's file system in bytes."""

    path: str
    free: int
    total: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counts and bytes over all data files and disks."""

    objects: int = 0
    uploads: int = 0
    segments: int = 0
    own_files: int = 0
    live_bytes: int = 0
    dead_bytes: int = 0
    index_bytes: int = 0
    disks: tuple[DiskStats, ...] = field(default=())
    versions: int = 0  # older versions and delete markers: what is not a current object
    quarantined: int = 0  # versions whose bytes here are damaged
