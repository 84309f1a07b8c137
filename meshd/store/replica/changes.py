"""Replica changes: the facts that one replica sends another, each with its final stamp.

Law: changes are frozen and encoded as msgpack; a new field goes to the end and has a default. They
carry no object bytes: see `ObjectStore.replica_writer`. Invariant: applying changes is commutative and
idempotent; the stamp decides, and every order ends in the same state.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import msgspec

from meshd.store.records import Record, Upload, UploadedPart  # noqa: TC001  msgspec reads the annotations


class Marked(msgspec.Struct, frozen=True, array_like=True, tag="marked"):
    """A delete marker was made."""

    bucket: str
    key: str
    record: Record


class Amended(msgspec.Struct, frozen=True, array_like=True, tag="amended"):
    """Tags, ACL or both of a version became those of `record`; `record.amended` orders amendments."""

    bucket: str
    key: str
    record: Record


class VersionGone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """A version was removed for good; with "" every null version that is older than `stamp`."""

    bucket: str
    key: str
    version: str
    stamp: int


class UploadBegun(msgspec.Struct, frozen=True, array_like=True, tag="begun"):
    """A multipart upload is in progress."""

    upload: Upload


class UploadEnded(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """A multipart upload was aborted."""

    bucket: str
    key: str
    upload_id: str
    stamp: int


class CompletedPart(msgspec.Struct, frozen=True, array_like=True):
    """A part that an object was made of: exactly this one."""

    number: int
    stamp: int
    etag: str


class UploadCompleted(msgspec.Struct, frozen=True, array_like=True, tag="completed"):
    """An upload became `record`, made of these parts in this order; it and its other parts are gone."""

    bucket: str
    key: str
    upload_id: str
    parts: tuple[CompletedPart, ...]
    record: Record


Change = Marked | Amended | VersionGone | UploadBegun | UploadEnded | UploadCompleted


class PartOf(msgspec.Struct, frozen=True, array_like=True):
    """Says of a replica's bytes that they are this part of this upload."""

    upload: Upload
    part: UploadedPart


class Applied(NamedTuple):
    """`newest`: the highest stamp known here of the name, be it of a version or of a deletion of the null
    version. `changed`: whether anything was new."""

    newest: int
    changed: bool


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Change)


def encode_change(change: Change) -> bytes:
    """The change as bytes."""
    return _encoder.encode(change)


def decode_change(raw: bytes | memoryview) -> Change:
    """The change in these bytes. Raises msgspec.MsgspecError."""
    change: Change = _decoder.decode(raw)
    return change


def name_of_change(change: Change) -> tuple[str, str]:
    """(bucket, key) of what it is about."""
    about = change.upload if isinstance(change, UploadBegun) else change
    return about.bucket, about.key


def without_local_fields(record: Record) -> Record:
    """The facts of a record that are the same on every node: where its bytes lie is each node's own."""
    return msgspec.structs.replace(record, extents=(), manifest=None, moves=0, broken=False)


def upload_without_local_fields(upload: Upload) -> Upload:
    """The facts of an upload that are the same on every node."""
    return msgspec.structs.replace(upload, place=None, moves=0)


def part_without_local_fields(part: UploadedPart) -> UploadedPart:
    """The facts of a part that are the same on every node."""
    return msgspec.structs.replace(part, extents=(), moves=0)


class ReplicaChange(msgspec.Struct, frozen=True, array_like=True):
    """A change on its way, decided (or passed on) by this version of the cluster map."""

    epoch: int
    change: Change


class ReplicaFacts(msgspec.Struct, frozen=True, array_like=True):
    """What follows bytes on their way: the version they are, or the part."""

    epoch: int
    record: Record
    part: PartOf | None = None


ReplicaError = Literal["", "lacks", "ended"]
"""`lacks`: see ReplicaLacksError; `ended`: the upload of a part is over."""


class ReplicaAck(msgspec.Struct, frozen=True, array_like=True):
    """A replica's answer."""

    newest: int = 0
    changed: bool = False
    trouble: ReplicaError = ""
