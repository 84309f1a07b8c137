"""Replica changes: the facts that one replica sends another, each with its final stamp.

Law: changes are frozen and encoded as msgpack; a new field goes to the end and has a default. They
carry no object bytes: see `ObjectStore.replica_writer`. Invariant: applying changes is commutative and
idempotent; the stamp decides, and every order ends in the same state.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from meshd.store.records import Record, Upload, UploadedPart  # noqa: TC001  msgspec reads the annotations


class Marked(msgspec.Struct, frozen=True, array_like=True, tag="marked"):
    """A delete marker was created."""

    bucket: str
    key: str
    record: Record


class Amended(msgspec.Struct, frozen=True, array_like=True, tag="amended"):
    """Tags, ACL or both of a version became those of `record`; `record.amended` orders such changes."""

    bucket: str
    key: str
    record: Record


class VersionGone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """A version was removed for good; with "" every null version older than `stamp`."""

    bucket: str
    key: str
    version: str
    stamp: int


class UploadBegun(msgspec.Struct, frozen=True, array_like=True, tag="begun"):
    """A multipart upload was created."""

    upload: Upload


class UploadEnded(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """A multipart upload was aborted."""

    bucket: str
    key: str
    upload_id: str
    stamp: int


class CompletedPart(msgspec.Struct, frozen=True, array_like=True):
    """A part that an object was made of, identified exactly."""

    number: int
    stamp: int
    etag: str


class UploadCompleted(msgspec.Struct, frozen=True, array_like=True, tag="completed"):
    """An upload became `record`, made of these parts in this order; the upload and its other parts are
    gone."""

    bucket: str
    key: str
    upload_id: str
    parts: tuple[CompletedPart, ...]
    record: Record


Change = Marked | Amended | VersionGone | UploadBegun | UploadEnded | UploadCompleted


class PartOf(msgspec.Struct, frozen=True, array_like=True):
    """Tells a replica that the bytes are this part of this upload."""

    upload: Upload
    part: UploadedPart


class Applied(NamedTuple):
    """The result of applying a change. `newest`: the highest stamp known here for the name, of a version or
    of a deletion of the null version, or the stamp of the part; `changed`: whether the change was new;
    `amended`: the stamp of the tags and ACL here, for a change of those."""

    newest: int
    changed: bool
    amended: int = 0


def without_local_fields(record: Record) -> Record:
    """Returns the record without its node-specific fields, such as the position of its bytes."""
    return msgspec.structs.replace(record, extents=(), manifest=None, moves=0, broken=False)


def upload_without_local_fields(upload: Upload) -> Upload:
    """Returns the upload without its node-specific fields."""
    return msgspec.structs.replace(upload, place=None, moves=0)


def part_without_local_fields(part: UploadedPart) -> UploadedPart:
    """Returns the part without its node-specific fields."""
    return msgspec.structs.replace(part, extents=(), moves=0)


class ReplicaChange(msgspec.Struct, frozen=True, array_like=True):
    """A change in transit, sent under this version of the cluster map."""

    epoch: int
    change: Change


class ReplicaFacts(msgspec.Struct, frozen=True, array_like=True):
    """Follows the bytes in transit: the version that they are, or the part."""

    epoch: int
    record: Record
    part: PartOf | None = None


ReplicaError = Literal["", "lacks", "ended"]
"""`lacks`: see ReplicaLacksError; `ended`: the upload of a part has ended."""


class ReplicaAck(msgspec.Struct, frozen=True, array_like=True):
    """A replica's reply; see `Applied`."""

    newest: int = 0
    changed: bool = False
    trouble: ReplicaError = ""
    amended: int = 0
