"""Value types of the store: object, upload, part and data file records, and the pages of listings.

Law: records are frozen and encoded as msgpack arrays. A new field goes to the end and has a default, so
that records written by earlier versions still decode.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from meshwire.s3.bucket_settings import Acl  # noqa: TC001  msgspec reads the annotations
from meshwire.s3.result_types import ObjectEntry  # noqa: TC001  msgspec reads the annotations

_NOTHING = msgspec.Raw(b"\x80")

RESERVED_BUCKET: Final = "-mesh-"
"""Has the node's own documents; no client's bucket can have this name."""
NULL = "null"
"""The name of the version without an id in requests and pages; `Record.version` is "" for it."""


class Extent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`length` bytes at `offset` of data file `file` on disk number `disk`, and the crc32c of exactly these
    bytes."""

    disk: int
    file: int
    offset: int
    length: int
    crc32c: int = 0


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One part of a completed multipart object."""

    size: int
    etag: str
    checksums: dict[str, str]


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A version of an object.

    `etag` has no quotes; `stamp` orders versions (ns, rising); `modified` is in ms since the epoch.
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
    manifest: Extent | None = None  # the member that lists the extents, if the data files need one
    moves: int = 0  # number of rewrites: by compaction, or by a change of tags or ACL
    version: str = ""  # empty for the null version
    marker: bool = False  # a delete marker: no bytes, no ETag
    tags: dict[str, str] = {}
    acl: Acl | None = None  # None is `private`
    amended: int = 0  # the stamp of the last change of tags or ACL; 0: never
    broken: bool = False  # in quarantine: its bytes here are damaged; data files do not record this
    through: bool = (
        False  # on its way to an origin, and acknowledged only when it is there and no longer here
    )

    @property
    def used_extents(self) -> tuple[Extent, ...]:
        """Every extent that the record keeps in use."""
        return self.extents if self.manifest is None else (*self.extents, self.manifest)


class Brief(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The leading fields of a Record that a listing reads; the others are not decoded."""

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
    """A multipart upload in progress. `initiated` is in ms since the epoch; `born`: when its bucket was
    created, 0 if unknown."""

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
    moves: int = 0  # how often compaction has moved that member
    tags: dict[str, str] = {}
    acl: Acl | None = None
    born: int = 0


class UploadedPart(msgspec.Struct, frozen=True, array_like=True):
    """A part of an upload in progress; `modified` is in ms since the epoch."""

    number: int
    size: int
    etag: str
    checksums: dict[str, str]
    modified: int
    extents: tuple[Extent, ...]
    stamp: int = 0
    moves: int = 0  # how often compaction has moved its bytes


class Meta(msgspec.Struct, frozen=True):
    """What the writer of an object specifies at commit, apart from the bytes."""

    etag: str
    headers: dict[str, str] = {}
    metadata: dict[str, str] = {}
    checksums: dict[str, str] = {}
    checksum_type: str = ""
    owner: str = ""
    tags: dict[str, str] = {}
    acl: Acl | None = None
    parts: tuple[Part, ...] = ()  # for a copy: the parts in which the source was uploaded
    through: bool = False  # see Record


class NewObject(msgspec.Struct, frozen=True, array_like=True):
    """A small object to be stored, with its bytes and their crc32c."""

    key: str
    meta: Meta
    data: bytes
    crc32c: int


class DataFile(msgspec.Struct, frozen=True, array_like=True):
    """The index entry of a data file.

    `end`: bytes committed; `live`: payload bytes in use; `dead`: payload bytes not in use; `refs`: uses of
    its members (copies may share a large object file); `tombs`: members that cancel others (deletions, ended
    uploads); `buried`: unused members; `first_stamp` and `last_stamp`: the lowest and highest stamp inside;
    `framing`: bytes that would be saved if its packs were one, -1 if not known.
    """

    disk: int
    kind: str  # "segment" | "own"
    # "open" | "sealed" | "retired" | "lost": unused but kept, because a rebuild could not read all of this
    # file, or of another file that may refer to it
    state: str
    writer: str
    end: int = 0
    live: int = 0
    dead: int = 0
    refs: int = 0
    tombs: int = 0
    first_stamp: int = 0
    last_stamp: int = 0
    buried: int = 0
    framing: int = -1


class Page(msgspec.Struct, frozen=True):
    """One page of a listing in UTF-8 byte order. Prefixes count toward the limit.

    `next_after` is the `after` of the next page (the last key or prefix listed); "" if not truncated.
    """

    entries: tuple[tuple[str, Record], ...] = ()
    prefixes: tuple[str, ...] = ()
    truncated: bool = False
    next_after: str = ""


class EntryPage(msgspec.Struct, frozen=True):
    """A `Page` with the fields that S3 shows instead of records; `owners` has the owner id of each entry."""

    entries: tuple[ObjectEntry, ...] = ()
    owners: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    truncated: bool = False
    next_after: str = ""


class VersionPage(msgspec.Struct, frozen=True):
    """One page of versions by key, newest first; `latest` marks each key's newest version (which may be a
    delete marker).

    `next_key` and `next_version` (`null` for the null version, "" after a common prefix) are the markers of
    the next page.
    """

    entries: tuple[tuple[str, Record], ...] = ()
    latest: tuple[bool, ...] = ()
    prefixes: tuple[str, ...] = ()
    truncated: bool = False
    next_key: str = ""
    next_version: str = ""


@dataclass(frozen=True, slots=True)
class Removed:
    """The result of a deletion. `record`: the removed version (None if there was none); `marker`: the delete
    marker that was created; `stamp`: when a version was removed for good (0 if none was)."""

    record: Record | None = None
    marker: Record | None = None
    stamp: int = field(default=0, compare=False)


class UploadPage(msgspec.Struct, frozen=True):
    """One page of uploads in progress, ordered by (key, upload id)."""

    uploads: tuple[Upload, ...] = ()
    prefixes: tuple[str, ...] = ()
    truncated: bool = False
    next_key: str = ""
    next_id: str = ""


class PartPage(msgspec.Struct, frozen=True):
    """One page of parts, ordered by number; `next_after` is the last number listed."""

    parts: tuple[UploadedPart, ...] = ()
    truncated: bool = False
    next_after: int = 0


class Span(msgspec.Struct, frozen=True):
    """`length` bytes at `offset` of the open file `fd`; valid only inside `Store.open_spans`. `extent`: the
    extent that they belong to; `name`: the object's, if a reader of many objects has set it."""

    fd: int
    offset: int
    length: int
    extent: Extent | None = None
    name: str = ""

    def sub_span(self, offset: int, length: int) -> Span:
        """Returns `length` bytes of the span from `offset`."""
        return Span(self.fd, self.offset + offset, length, self.extent, self.name)

    def with_name(self, name: str) -> Span:
        """Returns the span with the object's name."""
        return Span(self.fd, self.offset, self.length, self.extent, name)


class Location(msgspec.Struct, frozen=True):
    """`length` bytes at `offset` of the file at `path`, for another process to read, and the crc32c of
    exactly these bytes."""

    path: str
    offset: int
    length: int
    crc32c: int


class StoreChanges(msgspec.Struct, frozen=True):
    """What changed in a bucket up to `revision`: the `keys` whose current version may be another one than
    before, in order, and `ranges` of them, by their first and last key."""

    revision: int
    keys: tuple[str, ...] = ()
    ranges: tuple[tuple[str, str], ...] = ()


class DiskStats(msgspec.Struct, frozen=True):
    """Free and total bytes of one disk's file system."""

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
    versions: int = 0  # older versions and delete markers
    quarantined: int = 0  # versions whose bytes on this node are damaged
    index_map_bytes: int = 0
    index_map_free_bytes: int = 0


NO_DEADLINE: Final = 1 << 100
"""A stamp above all others."""


@dataclass(frozen=True, slots=True)
class WriteContext:
    """What must hold for a write until it is committed. Immutable: a step that adds a condition passes a
    changed copy on.

    A write carries one from the endpoint that accepts it to the commit: every method of the store that
    writes takes it as `context`. Invariants: after a commit under one map version, no process of the node
    commits under an earlier version. No write gets a stamp later than its node's lease, even if the process
    was suspended in between; such a write fails with StaleEpochError and leaves no trace. A write without an
    epoch is not fenced, and a write that no client waits for is never abandoned.
    """

    accepted_by: str = ""
    """The node that accepted the request from its client; "" for a write of this node's own."""
    map_version: int = 0
    """The cluster map version that `accepted_by` used then."""
    forwarded: bool = False
    """Another node forwarded the write to this one, which commits it as primary or refuses it."""
    epoch: int = 0
    """The map version that the commit is bound to; 0 without a fence."""
    deadline: int = NO_DEADLINE
    """The commit's stamp must not exceed it: until then no other node acts as primary."""

    def under_fence(self, epoch: int, deadline: int = NO_DEADLINE) -> WriteContext:
        """Returns this context bound to map version `epoch`, for stamps up to `deadline`."""
        return replace(self, epoch=epoch, deadline=deadline)

    def is_past_deadline(self, stamp: int) -> bool:
        """Returns True if the write must not carry this stamp, because the node's lease ends before it."""
        return stamp > self.deadline


INTERNAL_WRITE: Final = WriteContext()
"""The context of a write that no client waits for, and that no fence binds."""
