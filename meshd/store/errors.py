"""Errors of the object store.

Law: an error carries a meaning, never an HTTP status, and its text says what to do. No OSError leaves
this package.
"""

from __future__ import annotations

import errno
from typing import ClassVar, Final

from meshd.errors import MeshdError

INDEX_FULL: Final = (
    "There is no space left on the file system of the index (`--index-dir`) of this node. Free space there, "
    "or enlarge it: deleting objects does not help."
)
"""What clients, and nodes that need this one for a write, are told of an IndexFullError."""
INDEX_MAP_FULL: Final = (
    "The index of this node has reached its limit, the setting `index-map`. Set a higher one and restart the "
    "node, or delete objects."
)
"""The same of an IndexMapFullError."""


class StoreError(MeshdError):
    """Base of all errors that the store raises on purpose."""


class ConditionFailedError(StoreError):
    """If-Match or If-None-Match did not hold when the write was checked; nothing was changed. `condition`:
    the header's name."""

    def __init__(self, message: str, condition: str = "") -> None:
        super().__init__(message)
        self.condition = condition


class ConditionMissingError(StoreError):
    """If-Match was given for a key without an object; nothing was changed."""


class DiskFullError(StoreError):
    """The disk or its quota has no space for these bytes. The store is intact; reads and deletes still
    work."""


class IndexFullError(DiskFullError):
    """The file system of the index has no space. Deleting objects frees none of it. `told`: the text for
    clients and other nodes."""

    told: ClassVar[str] = INDEX_FULL


class IndexMapFullError(IndexFullError):
    """The index has the size of its map (`index-map`), whatever space its file system has. Deletions may use
    its reserve."""

    told: ClassVar[str] = INDEX_MAP_FULL

    def __init__(self) -> None:
        super().__init__(
            "the index has the size of index-map; set a higher one and restart the node, or delete objects"
        )


class NodeFullError(DiskFullError):
    """The disks, or the index, of a node that must have these bytes are full. The text names the node, says
    whether the write may have taken effect, and is for clients."""


class DiskFailedError(StoreError):
    """The device reported an I/O error; nothing of the failed write is visible."""


class ExhaustedError(StoreError):
    """The process or machine has no descriptors or memory left. Nothing was changed; the device is
    healthy."""


class CorruptExtentError(StoreError):
    """Stored bytes do not match their checksum or are in quarantine; they are not served. `name`: the
    object's, if known."""

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class QuarantinedError(CorruptExtentError):
    """The version is in quarantine on this node: read it from another owner, or put it again."""


class ExtentGoneError(StoreError):
    """The extents of a record were removed meanwhile: call `get` again and retry once."""


class NoSuchVersionError(StoreError):
    """The object or this version of it does not exist, or is a delete marker."""


class NoSuchUploadError(StoreError):
    """The multipart upload does not exist: it was completed, aborted or never created."""


class ReplicaLacksError(StoreError):
    """A change refers to bytes that this replica does not have: send it the whole version with its bytes."""


class StaleEpochError(StoreError):
    """A write was routed by a cluster map that is not the newest known to this node. Nothing was changed;
    fetch the newer map and route the write again."""

    def __init__(self, version: int) -> None:
        super().__init__(f"this node uses version {version} of the cluster map; route the write again")
        self.version = version


class NotReplicatedError(StoreError):
    """A write did not reach all nodes that must hold it, or this node currently cannot act as the name's
    primary. The write may or may not have taken effect: try again shortly."""


class ClocksDifferError(NotReplicatedError):
    """A node that must take part in a write refuses requests because its clock differs. The text names it and
    is for clients."""


class NotPrimaryError(NotReplicatedError):
    """Another node is the primary of the name now, and nothing was changed: send the write to that node."""


class InvalidPartError(StoreError):
    """A part listed for completion is missing, or has another ETag than the given one."""

    def __init__(self, number: int) -> None:
        super().__init__(f"part {number} was not uploaded or was replaced; upload it again or name another")
        self.number = number


class SizeMismatchError(StoreError):
    """The number of bytes written differs from the size given to the writer."""


class MetadataTooLargeError(StoreError):
    """Key, headers and metadata together exceed the size of a tar header (15 KiB)."""


class StoreInUseError(StoreError):
    """Another process holds the data directory; stop the daemon first."""


class FormatError(StoreError):
    """Another version wrote the data on disk, or the disks do not belong to this index."""


class NotCachedError(StoreError):
    """The bucket is backed by an origin, and the bytes are not (all) in the cache: only a reader that waits
    can get them."""


class StoreClosedError(StoreError):
    """The store is closed or closing; send the request to another worker."""


_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})


def is_exhausted(error: OSError) -> bool:
    """Returns True for errors that mean the machine is out of resources; they say nothing about the
    device."""
    return error.errno in _EXHAUSTED
