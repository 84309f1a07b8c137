"""PeerSource: the protocol through which this node reads bytes of other nodes; PeerDocumentSource: documents.

Law: a request names bytes by bucket, key and ETag, so a node never returns other content under an old
name. Callers know neither the cluster map nor the network. A single-node daemon uses `SINGLE_NODE`,
which makes no requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from meshd.core.memory_frames import MemoryAccount
    from meshd.store.records import Location


class ObjectRange(NamedTuple):
    """`length` bytes at `offset` of the object with this ETag. `size`: the size of the object that holds the
    bytes; if it differs from the object's own, its decompressed copy is meant (`PlainArchives`); -1: the
    object's own size, and `length` -1 then means all of it."""

    bucket: str
    key: str
    etag: str
    size: int
    offset: int
    length: int


class ReadFailure(msgspec.Struct, frozen=True):
    """Bytes that no node could supply. `code`: NoSuchKey, SnapshotChanged (another ETag), Unreadable
    (damaged, or removed while being read), Busy (the nodes that have them do not answer), or the code of a
    BatchError. `final`: in quarantine on the node that was asked, or on all, so asking again cannot help."""

    code: str
    message: str = ""
    final: bool = False


class FetchedRanges(Protocol):
    """Bytes of other nodes in this node's memory, until closed."""

    @property
    def places(self) -> Sequence[Location | ReadFailure]:
        """One location or failure per part, in order."""
        ...

    def close(self) -> None:
        """Releases the memory. Idempotent."""
        ...


class PeerDocumentSource(Protocol):
    """Documents of the reserved bucket that the other nodes hold."""

    @property
    def single_node(self) -> bool:
        """True if there are no other nodes; then nothing else is called. As cheap as a dictionary look-up."""
        ...

    async def fetch_document(self, key: str) -> bytes | None:
        """Fetches a document of the reserved bucket from any node. Raises BatchError Busy if no answering
        node has it and some do not answer."""
        ...

    async def replicate_document(self, key: str, document: bytes, *, again: bool = False) -> None:
        """Stores a document on the storing nodes; `again`: also where a copy exists, because it was deleted
        and that copy may be about to go. Raises BatchError Busy if too few nodes stored it."""
        ...


class PeerSource(Protocol):
    """Reads from the other nodes."""

    @property
    def single_node(self) -> bool:
        """True if there are no other nodes; then nothing else is called. As cheap as a dictionary look-up."""
        ...

    def record_use(self, bucket: str, key: str) -> None:
        """Records that this node's own copy of an object is about to be read."""
        ...

    def has_peer_copies(self, bucket: str, key: str) -> bool:
        """Returns True if other nodes have copies of an object."""
        ...

    async def reaches_map_version(self, version: int) -> bool:
        """Returns True if this node uses map `version`; waits briefly for a newer map."""
        ...

    def is_first_replica(self, bucket: str, key: str) -> bool:
        """Returns True if this node is the first to be asked for an object under its map. Exactly one node
        is, of those that use the same map."""
        ...

    def slots_read_here(self, bucket: str, *, first_only: bool) -> npt.NDArray[np.bool_] | None:
        """Returns bool[slots] under the current map: the slots of a bucket that may be read from this node;
        `first_only`: for which it is the first to be asked. None: all, since there are no other nodes."""
        ...

    async def fetch_parts(self, parts: Sequence[ObjectRange], memory: MemoryAccount) -> FetchedRanges:
        """Fetches these bytes with one call per node; falls back to another replica for bytes that a node
        cannot supply."""
        ...


class _SingleNode:
    single_node = True

    def __repr__(self) -> str:
        return "<no other nodes>"

    def record_use(self, bucket: str, key: str) -> None:
        return

    def has_peer_copies(self, bucket: str, key: str) -> bool:
        return False

    async def reaches_map_version(self, version: int) -> bool:
        return True

    def is_first_replica(self, bucket: str, key: str) -> bool:
        return True

    def slots_read_here(self, bucket: str, *, first_only: bool) -> npt.NDArray[np.bool_] | None:
        return None

    async def fetch_parts(self, parts: Sequence[ObjectRange], memory: MemoryAccount) -> FetchedRanges:
        raise AssertionError("there are no other nodes")

    async def fetch_document(self, key: str) -> bytes | None:
        return None

    async def replicate_document(self, key: str, document: bytes, *, again: bool = False) -> None:
        return


SINGLE_NODE: Final = _SingleNode()


class _LookupOnly(_SingleNode):
    single_node = False

    def __repr__(self) -> str:
        return "<no reads from other nodes>"


LOOKUP_ONLY: Final = _LookupOnly()
"""For lookups of what this node holds that read nothing: uses are not recorded, other nodes are not asked."""
