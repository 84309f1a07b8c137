"""RemoteSource: the protocol through which this node reads bytes and documents of other nodes.

Law: a request names bytes by bucket, key and ETag, so a node never returns other content under an old
name. Callers know neither the cluster map nor the network. A single-node daemon uses `SINGLE_NODE`,
which makes no requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.core.shared_memory import MemoryAccount
    from meshd.store.records import Location


class ObjectRange(NamedTuple):
    """`length` bytes at `offset` of the object that has this ETag. `size`: of the object whose bytes are
    meant; where the object itself has another, its inflated copy is (`PlainArchives`); -1: the object's own,
    and with `length` -1 all of it."""

    bucket: str
    key: str
    etag: str
    size: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ReadFailure:
    """Bytes nobody could give. `code`: NoSuchKey, SnapshotChanged (another ETag), Unreadable (damaged, or
    gone while being read), Busy (whoever has them does not answer), or that of a BatchError."""

    code: str
    message: str = ""


class FetchedRanges(Protocol):
    """Bytes of other nodes in this node's memory, until closed."""

    @property
    def places(self) -> Sequence[Location | ReadFailure]:
        """One a part, in their order."""
        ...

    def close(self) -> None:
        """Gives the memory back. Idempotent."""
        ...


class RemoteSource(Protocol):
    """The other nodes."""

    @property
    def single_node(self) -> bool:
        """Whether there are none: nothing below is called then. As quick as a look at a dictionary."""
        ...

    def record_use(self, bucket: str, key: str) -> None:
        """This node's own copy of an object is about to be read."""
        ...

    def has_peer_copies(self, bucket: str, key: str) -> bool:
        """Whether other nodes have copies of an object of their own."""
        ...

    async def reaches_map_version(self, version: int) -> bool:
        """Whether this node goes by this version of the map; a newer one is waited for, a moment."""
        ...

    def is_first_replica(self, bucket: str, key: str) -> bool:
        """Whether this node is the one that is asked first for an object, by its present map: of all nodes
        that go by it, one is."""
        ...

    async def fetch_parts(self, parts: Sequence[ObjectRange], memory: MemoryAccount) -> FetchedRanges:
        """These bytes, by one call a node; another holder is asked where one cannot give them."""
        ...

    async def fetch_document(self, key: str) -> bytes | None:
        """A document of the reserved bucket, from whichever node has it. Raises BatchError Busy when none
        that answers has it, and some do not answer."""
        ...

    async def replicate_document(self, key: str, document: bytes, *, again: bool = False) -> None:
        """Has the storing nodes keep a document; `again`: written anew also where it is, for it was removed
        and may be about to go. Raises BatchError Busy when too few did."""
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

    async def fetch_parts(self, parts: Sequence[ObjectRange], memory: MemoryAccount) -> FetchedRanges:
        raise AssertionError("there are no other nodes")

    async def fetch_document(self, key: str) -> bytes | None:
        return None

    async def replicate_document(self, key: str, document: bytes, *, again: bool = False) -> None:
        return


SINGLE_NODE: Final[RemoteSource] = _SingleNode()
