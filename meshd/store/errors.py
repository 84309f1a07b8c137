"""Errors of the object store.

Law: an error carries a meaning, never an HTTP status, and its text says what to do. No OSError leaves
this package.
"""

from __future__ import annotations

import errno
from typing import Final

from meshd.errors import MeshdError


class StoreError(MeshdError):
    """Base of everything the store raises on purpose."""


class ConditionFailedError(StoreError):
    """If-Match or If-None-Match did not hold when the write was judged; nothing was changed. `condition`: the
    header's name."""

    def __init__(self, message: str, condition: str = "") -> None:
        super().__init__(message)
        self.condition = condition


class ConditionMissingError(StoreError):
    """If-Match on a key that has no object; nothing was changed."""


class DiskFullError(StoreError):
    """No room (or no quota) for these bytes; the store is intact, reads and deletes go on."""


class DiskFailedError(StoreError):
    """The device reported an I/O error; nothing of the failed write is visible."""


class ExhaustedError(StoreError):
    """The process or machine is out of descriptors or memory; nothing was changed, the device is sound."""


class CorruptExtentError(StoreError):
    """Stored bytes do not match their checksum, or are in quarantine; they are not served. `name`: the
    object's, if known."""

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class QuarantinedError(CorruptExtentError):
    """The version is in quarantine here: another owner has it, or it has to be put again."""


class ExtentGoneError(StoreError):
    """The extents of a record were removed meanwhile: `get` the record again and retry once."""


class NoSuchVersionError(StoreError):
    """The object, or this version of it, is not there, or it is a delete marker."""


class NoSuchUploadError(StoreError):
    """The multipart upload does not exist: completed, aborted or never made."""


class ReplicaLacksError(StoreError):
    """A fact is about bytes that this replica has not got: send it the whole version, with its bytes."""


class StaleEpochError(StoreError):
    """A write was decided by a cluster map that is no longer the newest on this node: nothing was changed;
    get the newer map and route it again."""

    def __init__(self, version: int) -> None:
        super().__init__(f"this node goes by version {version} of the cluster map; route the write again")
        self.version = version


class NotReplicatedError(StoreError):
    """A write could not be given to all nodes that must have it, or this node may not decide about its name
    at present. It may or may not have taken place: try again in a moment."""


class NotPrimaryError(NotReplicatedError):
    """Another node decides about the name by now, and nothing was changed: that one is to be asked."""


class InvalidPartError(StoreError):
    """A part named at completion is missing, or is not the one with the given ETag."""

    def __init__(self, number: int) -> None:
        super().__init__(f"part {number} was not uploaded or was replaced; upload it again or name another")
        self.number = number


class SizeMismatchError(StoreError):
    """Fewer or more bytes were written than the writer was opened for."""


class MetadataTooLargeError(StoreError):
    """Key, headers and metadata together exceed the room of a tar header (15 KiB)."""


class StoreInUseError(StoreError):
    """Another process holds the data directory; stop the daemon first."""


class FormatError(StoreError):
    """The data on disk was written by another version, or the disks do not belong to this index."""


class NotCachedError(StoreError):
    """The bucket is backed by an origin, and this is not (all) in the cache: only a reader that waits can
    have it."""


class StoreClosedError(StoreError):
    """The store is closed or closing; retry on another worker."""


_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})


def is_exhausted(error: OSError) -> bool:
    """Whether the machine is short of something, which says nothing about the device."""
    return error.errno in _EXHAUSTED
