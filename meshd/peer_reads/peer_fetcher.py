"""Fetches bytes by ETag from peers and origins into shared memory.

Bytes are named by their object's ETag: the caller gets exactly that content, or the reason it is lost.
On a checksum mismatch, re-fetch with server-side verification, then try the next replica. Parts that the
near cache holds are not requested.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import numpy as np
from awscrt.checksums import crc32c

from meshd.core import peer_messages
from meshd.core.api_errors import busy
from meshd.core.memory_frames import MemoryFrame
from meshd.core.peer_source import ReadFailure
from meshd.errors import MeshdError
from meshd.peer_reads.replica_selection import gather_limited
from meshd.rpc.peer_client import PeerUnreachableError
from meshd.store.records import Location
from meshd.telemetry import metrics
from meshwire.frame.sample_frames import BLOBS, CRC, INDEX, STATUS
from meshwire.frame.tensor_frame import DTYPES, FrameError, Status, header_size, parse_frame_header

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshd.core.frame_address import Frame, FrameAddress
    from meshd.core.listing_columns import KeyFilter, ListingColumns
    from meshd.core.memory_frames import MemoryAccount
    from meshd.core.peer_source import ObjectRange
    from meshd.peer_reads.replica_selection import ReplicaSelector
    from meshd.rpc.peer_client import PeerResponse
    from meshd.store.api import StoreReader
    from meshd.store.records import Page, Record
    from meshwire.cluster import Node


_log = logging.getLogger(__name__)
MAX_ORIGIN_READS: Final = 64
"""Objects of buckets with origins that one request reads at a time."""
_RETRYABLE_CODES: Final = frozenset({"NotHere", "NoSuchKey", "SnapshotChanged", "Unreadable", "Busy"})
"""Failures after which another replica is asked."""
_VERIFY_TIMEOUT_S: Final = 120.0
"""Seconds without a byte while another node reads whole extents to verify them: gigabytes, on a slow disk."""
_AT_ONCE: Final = 256 << 10
"""Bytes up to which checksums are verified in the event loop; more are verified by a thread."""
_PIECE: Final = 1 << 20


class OriginReader(Protocol):
    """Reads of buckets with origins; implemented by `meshd.origins.sample_source`."""

    async def entries(
        self, name: str, prefix: str, plain: KeyFilter | None = None
    ) -> tuple[ListingColumns | list[tuple[str, Record]], object | None]: ...

    async def listing_revision(self, name: str, prefix: str) -> object | None: ...

    async def page(self, name: str, prefix: str, after: str, limit: int) -> Page: ...

    async def find_record(self, name: str, key: str) -> Record | None: ...

    def cached_record(self, name: str, key: str, etag: str) -> Record | None: ...

    def record_use(self, name: str, key: str) -> None: ...

    async def read_range(self, part: ObjectRange) -> bytes | ReadFailure: ...

    async def fetch_into_cache(self, name: str, key: str, etag: str, size: int) -> None: ...


class NearCache(Protocol):
    """This node's cached copies of objects and frames of other nodes."""

    async def get_parts(self, parts: Sequence[ObjectRange]) -> list[bytes | None]: ...

    async def get_frame(self, address: FrameAddress) -> tuple[list[bytes], int] | None: ...

    def keep_parts(self, fd: int, kept: Sequence[tuple[ObjectRange, int, int]]) -> None: ...

    def keep_frame(self, address: FrameAddress, frame: Frame) -> None: ...


class PeerFetcher:
    """Fetches parts of objects. One instance per process. `origins`, `near_cache`: see `RemoteObjects`;
    `backs`: whether a bucket has an origin."""

    def __init__(
        self,
        store: StoreReader,
        selector: ReplicaSelector,
        backs: Callable[[str], bool],
        origins: OriginReader | None,
        near_cache: NearCache | None,
    ) -> None:
        self._store, self._selector, self._mesh, self._backs = store, selector, selector.mesh, backs
        self._origins, self._near_cache = origins, near_cache

    def __repr__(self) -> str:
        return f"<PeerFetcher from {self._mesh.node_id}>"

    def require_origins(self) -> OriginReader:
        """Return `origins`. Raises BatchError Busy if this process has none."""
        if self._origins is None:
            raise busy("buckets with origins cannot be read by this process")
        return self._origins

    def reads_from_origin(self, bucket: str, key: str) -> bool:
        """Whether the bucket has an origin and this node is in the read set of the name."""
        return self._backs(bucket) and self._mesh.is_reader(bucket, key)

    async def fetch_parts(
        self, parts: Sequence[ObjectRange], memory: MemoryAccount, *, proven: bool = False
    ) -> FetchedParts:
        """Fetch these bytes; see `PeerSource.fetch_parts`. `proven`: the node verifies every extent of
        which only a part is sent; used when new objects are made of the bytes."""
        room = MemoryFrame(0, memory)
        places: list[Location | ReadFailure | None] = [None] * len(parts)
        silent: set[int] = set()
        quarantined: dict[int, set[str]] = defaultdict(set)

        async def ask(node: Node, numbers: Sequence[int]) -> list[int]:
            wanted = [parts[number] for number in numbers]
            try:
                found = await self._fetch_verified(node, wanted, room, proven=proven)
            except (MeshdError, FrameError):
                silent.update(numbers)
                raise
            again = []
            for number, place in zip(numbers, found, strict=True):
                places[number] = place
                if isinstance(place, ReadFailure) and place.final:
                    quarantined[number].add(node.node_id)
                if isinstance(place, ReadFailure) and place.code in _RETRYABLE_CODES:
                    again.append(number)
            return again

        try:
            named = {number: (part.bucket, part.key) for number, part in enumerate(parts)}
            mine = [number for number, name in named.items() if self.reads_from_origin(*name)]
            single = [
                number for number in named if self._mesh.single_node and not self._backs(parts[number].bucket)
            ]
            for number in (*mine, *single):
                del named[number]
            for number in single:
                places[number] = self._missing_error(parts[number])
            await gather_limited(
                MAX_ORIGIN_READS, [self._read_origin(parts, number, room, places) for number in mine]
            )
            if not proven:  # cached copies were sent without that verification
                await self._read_near_cache(parts, named, room, places)
            asked = list(named)
            left = await self._selector.ask_replicas(named, ask)
            self._fill_near_cache(parts, asked, room, places)
        except BaseException:
            room.close()
            raise
        for number, why in left.items():
            lost = places[number]
            if self._is_lost(parts[number], quarantined[number]):
                places[number] = ReadFailure("Unreadable", "every copy is damaged", final=True)
            elif not isinstance(lost, ReadFailure):
                places[number] = ReadFailure("Busy", why)
            elif lost.code == "NotHere":
                places[number] = ReadFailure("Busy", lost.message or why)
            elif lost.code == "Unreadable" and number in silent:
                places[number] = ReadFailure(
                    "Busy", "one copy is damaged, and who has another does not answer"
                )
        return FetchedParts(room, [place or ReadFailure("Busy") for place in places])

    async def load_parts(self, parts: Sequence[ObjectRange]) -> None:
        """Have the nodes that are asked first for these parts read them into memory, in the order of their
        rotational disks. A node that cannot, or runs an earlier release, reads them when they are fetched."""
        me = self._mesh.node_id
        groups: dict[str, tuple[Node, list[ObjectRange]]] = {}
        for part in parts:
            readers = self._mesh.route_for(part.bucket, part.key).read_set
            node = next((node for node in readers if node.node_id != me), None)
            if node is not None and not self._backs(part.bucket):
                groups.setdefault(node.node_id, (node, []))[1].append(part)
        await asyncio.gather(*[self._load_on(node, wanted) for node, wanted in groups.values()])

    async def _load_on(self, node: Node, parts: Sequence[ObjectRange]) -> None:
        for start in range(0, len(parts), peer_messages.MAX_PARTS):
            request = peer_messages.ReadRequest(list(parts[start : start + peer_messages.MAX_PARTS]))
            with suppress(MeshdError):
                await self._selector.peers.call_typed(node, peer_messages.LOAD_PARTS, request)

    def _is_lost(self, part: ObjectRange, quarantined: set[str]) -> bool:
        """Whether no node can have a sound copy; `quarantined`: other nodes that have it in quarantine."""
        readers = {node.node_id for node in self._mesh.route_for(part.bucket, part.key).read_set}
        if not readers or self._backs(part.bucket) or not self._mesh.all_nodes_complete():
            return False
        own = self._store.get(part.bucket, part.key) if self._mesh.node_id in readers else None
        here = own is not None and own.broken and own.etag == part.etag
        return readers <= quarantined | ({self._mesh.node_id} if here else set())

    async def _fetch_verified(
        self, node: Node, parts: Sequence[ObjectRange], room: MemoryFrame, *, proven: bool
    ) -> list[Location | ReadFailure]:
        """Fetch these parts from a node and verify them. The node sends parts of large objects unverified. A
        part that does not match its checksum is requested again with verification by the node, which then
        learns of damage on its disks; if it still does not match, it is a failure. Raises MeshdError,
        FrameError."""
        found = await self._fetch_from_node(node, parts, room, proven=proven)
        torn = await _mismatched_parts(room.fd, found)
        if not torn:
            return found
        metrics.remote_failures.labels("Damaged").inc(len(torn))
        name = f"{parts[torn[0]].bucket}/{parts[torn[0]].key}"
        fields = {"object": name, "parts": len(torn), "from": node.node_id}
        _log.warning(
            "bytes of another node do not match their checksum; asking it to verify its copy", extra=fields
        )
        again: Sequence[Location | ReadFailure] = ()
        try:
            again = await self._fetch_from_node(node, [parts[number] for number in torn], room, proven=True)
            still = await _mismatched_parts(room.fd, again)
        except (MeshdError, FrameError) as error:
            self._selector.report_unreachable(node, error)
            still = list(range(len(torn)))
        for place, number in enumerate(torn):
            damage = ReadFailure("Unreadable", f"what {node.node_id} sends of it does not match its checksum")
            found[number] = damage if place in still else again[place]
        return found

    async def _fetch_from_node(
        self, node: Node, parts: Sequence[ObjectRange], room: MemoryFrame, *, proven: bool
    ) -> list[Location | ReadFailure]:
        """Fetch these parts from a node with one call. Raises MeshdError, FrameError."""
        request = peer_messages.ReadRequest(list(parts), proven)
        patience = _VERIFY_TIMEOUT_S if proven else None
        async with self._selector.peers.open_typed(
            node, peer_messages.READ_PARTS, request, timeout=patience
        ) as answer:
            start, size = await receive_body(answer, room)
        return _parse_frame(room.fd, start, size, f"/proc/{os.getpid()}/fd/{room.fd}")

    async def _read_near_cache(
        self,
        parts: Sequence[ObjectRange],
        named: dict[int, tuple[str, str]],
        room: MemoryFrame,
        places: list[Location | ReadFailure | None],
    ) -> None:
        """Copy the parts that the near cache holds and remove them from `named`."""
        if self._near_cache is None or not named:
            return
        numbers = list(named)
        for number, data in zip(
            numbers, await self._near_cache.get_parts([parts[each] for each in numbers]), strict=True
        ):
            if data is not None:
                places[number] = append_bytes(room, data)
                del named[number]

    def _fill_near_cache(
        self,
        parts: Sequence[ObjectRange],
        numbers: Sequence[int],
        room: MemoryFrame,
        places: Sequence[Location | ReadFailure | None],
    ) -> None:
        if self._near_cache is None:
            return
        came = [(parts[number], places[number]) for number in numbers]
        kept = [(part, place.offset, place.length) for part, place in came if isinstance(place, Location)]
        self._near_cache.keep_parts(room.fd, kept)

    def _missing_error(self, part: ObjectRange) -> ReadFailure:
        """Return why a single node does not have the part."""
        return ReadFailure(
            "NoSuchKey" if self._store.get(part.bucket, part.key) is None else "SnapshotChanged"
        )

    async def _read_origin(
        self,
        parts: Sequence[ObjectRange],
        number: int,
        room: MemoryFrame,
        places: list[Location | ReadFailure | None],
    ) -> None:
        data = await self.require_origins().read_range(parts[number])
        if isinstance(data, ReadFailure):
            places[number] = data
            return
        places[number] = append_bytes(room, data)


class FetchedParts:
    """Parts fetched from other nodes, in one piece of shared memory."""

    def __init__(self, room: MemoryFrame, places: Sequence[Location | ReadFailure]) -> None:
        self._room, self.places = room, places
        self.fd = room.fd

    def __repr__(self) -> str:
        return f"<FetchedParts {len(self.places)} parts, {self._room.size} bytes>"

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._room.close()


def append_bytes(room: MemoryFrame, data: bytes) -> Location:
    """Append bytes to the memory and return their location."""
    start = room.size
    room.grow(start + len(data))
    os.pwrite(room.fd, data, start)
    return Location(f"/proc/{os.getpid()}/fd/{room.fd}", start, len(data), crc32c(data))


async def receive_body(answer: PeerResponse, room: MemoryFrame) -> tuple[int, int]:
    """Append a response body to the memory; return its offset and size in bytes. Raises
    PeerUnreachableError if the body ends early."""
    start, size = room.size, int(answer.headers["content-length"])
    room.grow(start + size)
    at = start
    async for piece in answer.iter_body():
        at += os.pwrite(room.fd, piece, at)
    if at - start != size:
        raise PeerUnreachableError(f"an answer of {size} bytes ended after {at - start}")
    metrics.remote_bytes.inc(size)
    return start, size


async def _mismatched_parts(fd: int, found: Sequence[Location | ReadFailure]) -> list[int]:
    """Return the numbers of the parts that do not match their checksums."""
    whole = sum(place.length for place in found if isinstance(place, Location))
    return (
        _verify_checksums(fd, found)
        if whole <= _AT_ONCE
        else await asyncio.to_thread(_verify_checksums, fd, found)
    )


def _verify_checksums(fd: int, found: Sequence[Location | ReadFailure]) -> list[int]:
    """Return the same as `_mismatched_parts` (blocking)."""
    buffer = memoryview(bytearray(_PIECE))
    torn: list[int] = []
    for number, place in enumerate(found):
        if not isinstance(place, Location):
            continue
        crc = 0
        for at in range(0, place.length, _PIECE):
            piece = buffer[: min(_PIECE, place.length - at)]
            got = os.preadv(fd, [piece], place.offset + at)
            crc = crc32c(piece[:got], crc)
        if crc != place.crc32c:
            torn.append(number)
    return torn


def _parse_frame(fd: int, start: int, size: int, path: str) -> list[Location | ReadFailure]:
    """Return the locations of a frame's blobs in the file. Raises FrameError."""
    length = header_size(os.pread(fd, 8, start)) if size >= 8 else 0
    header = parse_frame_header(os.pread(fd, min(length, size), start))
    if header.size != size:
        raise FrameError(f"a frame of {header.size} bytes came as {size}")

    def read(name: str) -> list[Any]:
        slot = header.tensors[name]
        values = np.frombuffer(os.pread(fd, slot.nbytes, start + slot.offset), DTYPES[slot.dtype])
        return cast("list[Any]", values.reshape(slot.shape).tolist())

    errors = {int(number): error for number, error in json.loads(header.metadata["errors"]).items()}
    quarantined = set(json.loads(header.metadata.get("quarantined", "[]")))  # earlier releases do not say
    first, room = start + header.tensors[BLOBS].offset, header.tensors[BLOBS].nbytes
    found: list[Location | ReadFailure] = []
    rows = zip(read(INDEX), read(STATUS), read(CRC), strict=True)
    for number, ((offset, nbytes), verdict, crc) in enumerate(rows):
        if number in errors:
            code, message = errors[number]
            found.append(ReadFailure(code, message, final=number in quarantined))
        elif verdict == Status.FAILED:
            found.append(ReadFailure("Unreadable", "its bytes are damaged or gone there"))
        elif not 0 <= offset <= offset + nbytes <= room:
            raise FrameError("a blob lies outside its frame")
        else:
            found.append(Location(path, first + offset, nbytes, crc))
    return found
