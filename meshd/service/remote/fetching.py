"""Bytes of other nodes and of origins, brought into this node's memory.

Law: bytes are named by their object's ETag: what comes is what was meant, or it is lost, with the reason.
What does not match its checksum is had again of a node that looks at it first, or of the next one. What this
node has copies of is not asked for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import numpy as np
from awscrt.checksums import crc32c

from meshd.assembly.elsewhere import Lost
from meshd.assembly.errors import busy
from meshd.assembly.memory import MemoryFrame
from meshd.errors import MeshdError
from meshd.net.peers import PATIENCE, PeerUnreachableError
from meshd.service.remote import wire
from meshd.service.remote.asking import some
from meshd.store.records import Location
from meshd.telemetry import metrics
from meshwire.frames import DTYPES, FrameError, Status, header_size, parse_header
from meshwire.sampleframes import BLOBS, CRC, INDEX, STATUS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshd.assembly.addressing import FrameAddress
    from meshd.assembly.elsewhere import Part
    from meshd.assembly.memory import Memory
    from meshd.net.peers import PeerAnswer
    from meshd.service.remote.asking import Asking
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Page, Record
    from meshwire.cluster import Node

_log = logging.getLogger(__name__)
ORIGINS: Final = 64
"""Objects of buckets with origins that one request reads at a time."""
_ASK_NEXT: Final = frozenset({"NotHere", "NoSuchKey", "SnapshotChanged", "Unreadable", "Busy"})
"""What another holder may know better."""
_PROVING: Final = 120.0
"""Seconds of silence while another node reads the extents that parts lie in: of gigabytes, on a slow disk."""
_AT_ONCE: Final = 256 << 10
"""Bytes that are compared at once; more are by a thread."""
_PIECE: Final = 1 << 20


class FromOrigins(Protocol):
    """What is read of buckets with origins; see `meshd.service.backed.samples`."""

    async def entries(self, name: str, prefix: str) -> list[tuple[str, Record]]: ...

    async def page(self, name: str, prefix: str, after: str, limit: int) -> Page: ...

    async def find(self, name: str, key: str) -> Record | None: ...

    def here(self, name: str, key: str, etag: str) -> Record | None: ...

    def used(self, name: str, key: str) -> None: ...

    async def read(self, part: Part) -> bytes | Lost: ...

    async def bring(self, name: str, key: str, etag: str, size: int) -> None: ...


class NearCache(Protocol):
    """Copies that this node keeps of what other nodes own."""

    async def parts(self, parts: Sequence[Part]) -> list[bytes | None]: ...

    async def frame(self, address: FrameAddress) -> tuple[list[bytes], int] | None: ...

    def keep_parts(self, fd: int, kept: Sequence[tuple[Part, int, int]]) -> None: ...

    def keep_frame(self, address: FrameAddress, fd: int, size: int, rows: int) -> None: ...


class Fetching:
    """One a process. `origins` reads what buckets with origins have, while this process can; `near` has
    copies, on a node that keeps some; `backs` says which buckets have an origin."""

    def __init__(self, store: ObjectStore, asking: Asking, backs: Callable[[str], bool]) -> None:
        self._store, self._asking, self._mesh, self._backs = store, asking, asking.mesh, backs
        self.origins: FromOrigins | None = None
        self.near: NearCache | None = None

    def __repr__(self) -> str:
        return f"<Fetching from {self._mesh.node_id}>"

    def from_origins(self) -> FromOrigins:
        """Raises BatchError Busy."""
        if self.origins is None:
            raise busy("buckets with origins cannot be read by this process")
        return self.origins

    def is_mine(self, bucket: str, key: str) -> bool:
        """Whether this node is the one that reads a name of a bucket with an origin."""
        return self._backs(bucket) and self._mesh.is_reader(bucket, key)

    async def fetch(self, parts: Sequence[Part], memory: Memory, *, proven: bool = False) -> Gathered:
        """See Elsewhere.fetch. `proven`: what is a part of an extent is of one that was read and compared as
        a whole; for new objects."""
        room = MemoryFrame(0, memory)
        places: list[Location | Lost | None] = [None] * len(parts)
        silent: set[int] = set()

        async def ask(node: Node, numbers: Sequence[int]) -> list[int]:
            wanted = [parts[number] for number in numbers]
            try:
                found = await self._compared(node, wanted, room, proven=proven)
            except (MeshdError, FrameError):
                silent.update(numbers)
                raise
            again = []
            for number, place in zip(numbers, found, strict=True):
                places[number] = place
                if isinstance(place, Lost) and place.code in _ASK_NEXT:
                    again.append(number)
            return again

        try:
            named = {number: (part.bucket, part.key) for number, part in enumerate(parts)}
            mine = [number for number, name in named.items() if self.is_mine(*name)]
            lone = [number for number in named if self._mesh.alone and not self._backs(parts[number].bucket)]
            for number in (*mine, *lone):
                del named[number]
            for number in lone:
                places[number] = self._gone(parts[number])
            await some(ORIGINS, [self._read_origin(parts, number, room, places) for number in mine])
            if not proven:  # what is kept here came as it was sent
                await self._take_near(parts, named, room, places)
            asked = list(named)
            left = await self._asking.holders(named, ask)
            self._keep_near(parts, asked, room, places)
        except BaseException:
            room.close()
            raise
        for number, why in left.items():
            lost = places[number]
            if not isinstance(lost, Lost):
                places[number] = Lost("Busy", why)
            elif lost.code == "NotHere":
                places[number] = Lost("Busy", lost.message or why)
            elif lost.code == "Unreadable" and number in silent:
                places[number] = Lost("Busy", "one copy is damaged, and who has another does not answer")
        return Gathered(room, [place or Lost("Busy") for place in places])

    async def _compared(
        self, node: Node, parts: Sequence[Part], room: MemoryFrame, *, proven: bool
    ) -> list[Location | Lost]:
        """What a node has of these. It sends large objects without a look at them: where such a one does not
        match, the node is to look, so that it learns of damage on its disks, and is asked for no more of it.
        Raises MeshdError, FrameError."""
        found = await self._asked(node, parts, room, proven=proven)
        torn = await _torn(room.fd, found)
        if not torn:
            return found
        metrics.remote_failures.labels("Damaged").inc(len(torn))
        name = f"{parts[torn[0]].bucket}/{parts[torn[0]].key}"
        told = {"object": name, "parts": len(torn), "from": node.node_id}
        _log.warning(
            "bytes of another node do not match their checksum; it is to look at its disk", extra=told
        )
        again: Sequence[Location | Lost] = ()
        try:
            again = await self._asked(node, [parts[number] for number in torn], room, proven=True)
            still = await _torn(room.fd, again)
        except (MeshdError, FrameError) as error:
            self._asking.note(node, error)
            still = list(range(len(torn)))
        for place, number in enumerate(torn):
            damage = Lost("Unreadable", f"what {node.node_id} sends of it does not match its checksum")
            found[number] = damage if place in still else again[place]
        return found

    async def _asked(
        self, node: Node, parts: Sequence[Part], room: MemoryFrame, *, proven: bool
    ) -> list[Location | Lost]:
        """One call. Raises MeshdError, FrameError."""
        body, patience = wire.encode(wire.ReadAsk(list(parts), proven)), _PROVING if proven else PATIENCE
        async with self._asking.peers.call(node, "POST", wire.READ, body=body, timeout=patience) as answer:
            start, size = await receive(answer, room)
        return _parse(room.fd, start, size, f"/proc/{os.getpid()}/fd/{room.fd}")

    async def _take_near(
        self,
        parts: Sequence[Part],
        named: dict[int, tuple[str, str]],
        room: MemoryFrame,
        places: list[Location | Lost | None],
    ) -> None:
        """What this node has copies of need not be asked for."""
        if self.near is None or not named:
            return
        numbers = list(named)
        for number, data in zip(
            numbers, await self.near.parts([parts[each] for each in numbers]), strict=True
        ):
            if data is not None:
                places[number] = placed(room, data)
                del named[number]

    def _keep_near(
        self,
        parts: Sequence[Part],
        numbers: Sequence[int],
        room: MemoryFrame,
        places: Sequence[Location | Lost | None],
    ) -> None:
        if self.near is None:
            return
        came = [(parts[number], places[number]) for number in numbers]
        kept = [(part, place.offset, place.length) for part, place in came if isinstance(place, Location)]
        self.near.keep_parts(room.fd, kept)

    def _gone(self, part: Part) -> Lost:
        """Why a lone node does not have what it was asked for."""
        return Lost("NoSuchKey" if self._store.get(part.bucket, part.key) is None else "SnapshotChanged")

    async def _read_origin(
        self, parts: Sequence[Part], number: int, room: MemoryFrame, places: list[Location | Lost | None]
    ) -> None:
        data = await self.from_origins().read(parts[number])
        if isinstance(data, Lost):
            places[number] = data
            return
        places[number] = placed(room, data)


class Gathered:
    """Parts that came from other nodes, in one piece of shared memory."""

    def __init__(self, room: MemoryFrame, places: Sequence[Location | Lost]) -> None:
        self._room, self.places = room, places
        self.fd = room.fd

    def __repr__(self) -> str:
        return f"<Gathered {len(self.places)} parts, {self._room.size} bytes>"

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._room.close()


def placed(room: MemoryFrame, data: bytes) -> Location:
    """Bytes at the end of the memory."""
    start = room.size
    room.grow(start + len(data))
    os.pwrite(room.fd, data, start)
    return Location(f"/proc/{os.getpid()}/fd/{room.fd}", start, len(data), crc32c(data))


async def receive(answer: PeerAnswer, room: MemoryFrame) -> tuple[int, int]:
    """An answer's body at the end of the memory: (offset, bytes)."""
    start, size = room.size, int(answer.headers["content-length"])
    room.grow(start + size)
    at = start
    async for piece in answer.pieces():
        at += os.pwrite(room.fd, piece, at)
    if at - start != size:
        raise PeerUnreachableError(f"an answer of {size} bytes ended after {at - start}")
    metrics.remote_bytes.inc(size)
    return start, size


async def _torn(fd: int, found: Sequence[Location | Lost]) -> list[int]:
    """The numbers of what does not match its checksum."""
    whole = sum(place.length for place in found if isinstance(place, Location))
    return _compare(fd, found) if whole <= _AT_ONCE else await asyncio.to_thread(_compare, fd, found)


def _compare(fd: int, found: Sequence[Location | Lost]) -> list[int]:
    """The same (blocking)."""
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


def _parse(fd: int, start: int, size: int, path: str) -> list[Location | Lost]:
    """The places of a frame's blobs in the file. Raises FrameError."""
    length = header_size(os.pread(fd, 8, start)) if size >= 8 else 0
    header = parse_header(os.pread(fd, min(length, size), start))
    if header.size != size:
        raise FrameError(f"a frame of {header.size} bytes came as {size}")

    def read(name: str) -> list[Any]:
        slot = header.tensors[name]
        values = np.frombuffer(os.pread(fd, slot.nbytes, start + slot.offset), DTYPES[slot.dtype])
        return cast("list[Any]", values.reshape(slot.shape).tolist())

    errors = {int(number): error for number, error in json.loads(header.metadata["errors"]).items()}
    first, room = start + header.tensors[BLOBS].offset, header.tensors[BLOBS].nbytes
    found: list[Location | Lost] = []
    rows = zip(read(INDEX), read(STATUS), read(CRC), strict=True)
    for number, ((offset, nbytes), verdict, crc) in enumerate(rows):
        if number in errors:
            found.append(Lost(*errors[number]))
        elif verdict == Status.FAILED:
            found.append(Lost("Unreadable", "its bytes are damaged or gone there"))
        elif not 0 <= offset <= offset + nbytes <= room:
            raise FrameError("a blob lies outside its frame")
        else:
            found.append(Location(path, first + offset, nbytes, crc))
    return found
