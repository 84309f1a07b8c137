"""What other nodes hold, for services: objects by name, bytes by ETag, documents.

Law: one call a node, all nodes at once; where one cannot give something the next holder is asked. Content is
named by its ETag: what comes is what was meant, or an error that says why not. A lone node calls nobody.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast, get_args

import numpy as np
from awscrt.checksums import crc32c

from meshd.assembly.elsewhere import Lost, Part
from meshd.assembly.errors import BatchError, Code, busy, damaged
from meshd.assembly.memory import Memory, MemoryFrame
from meshd.cluster.mesh import Mesh, lone_map
from meshd.control.memory import MemoryControl
from meshd.errors import MeshdError
from meshd.kit.clock import ManualClock
from meshd.kit.tasks import Tasks
from meshd.net.peers import PeerRefusedError, Peers, PeerUnreachableError, StaleMapError
from meshd.service import remotewire as wire
from meshd.service.waiting import Waiting
from meshd.store.records import Location, Page
from meshd.telemetry import metrics
from meshwire import percents
from meshwire.cluster import routes, slot_of
from meshwire.cluster.meeting import assemblers, frame_name, meeting
from meshwire.frames import DTYPES, FrameError, Status, header_size, parse_header
from meshwire.sampleframes import BLOBS, CRC, INDEX, STATUS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from meshd.assembly.addressing import Frame, FrameAddress, FrameResult
    from meshd.control.buckets import BucketTable
    from meshd.net.peers import PeerAnswer
    from meshd.service.nearby import Nearby
    from meshd.service.waiting import Names
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record
    from meshwire.cluster import ClusterMap, Node

_T = TypeVar("_T")
_SPREAD: Final = 2
"""Nodes that have a document before it counts as written, where there are so many."""
_ATTEMPTS: Final = 5
_PATIENCE: Final = 2.0
"""Seconds a newer map is waited for when another node has one."""
_AWAY: Final = ("away", "down")
_ORIGINS: Final = 64
"""Objects of buckets with origins that one request reads at a time."""
_AT_ONCE: Final = 4
"""Nodes asked for a document at a time."""
_ASK_NEXT: Final = frozenset({"NotHere", "NoSuchKey", "SnapshotChanged", "Unreadable", "Busy"})
"""What another holder may know better."""


class FromOrigins(Protocol):
    """What is read of buckets with origins; see `meshd.service.backed.samples`."""

    async def entries(self, name: str, prefix: str) -> list[tuple[str, Record]]: ...

    async def find(self, name: str, key: str) -> Record | None: ...

    def here(self, name: str, key: str, etag: str) -> Record | None: ...

    def used(self, name: str, key: str) -> None: ...

    async def read(self, part: Part) -> bytes | Lost: ...

    async def bring(self, name: str, key: str, etag: str, size: int) -> None: ...


async def _some(most: int, doing: Sequence[Awaitable[_T]]) -> list[_T]:
    """The results in order, at most so many under way."""
    slots = asyncio.Semaphore(most)

    async def one(each: Awaitable[_T]) -> _T:
        async with slots:
            return await each

    return await asyncio.gather(*[one(each) for each in doing])


class RemoteObjects:
    """One a process. `store` is this node's own: what it holds it is asked for first. `buckets` knows which
    have origins; `origins` reads those, while this process can; `near` has copies, on a node that keeps
    some."""

    def __init__(
        self, store: ObjectStore, mesh: Mesh, peers: Peers, buckets: BucketTable | None = None
    ) -> None:
        self._store, self._mesh, self._peers, self._buckets = store, mesh, peers, buckets
        self.origins: FromOrigins | None = None
        self.near: Nearby | None = None
        self._memory = Memory()
        self._tasks = Tasks("remote-objects")
        self._suspected: set[str] = set()

    def __repr__(self) -> str:
        return f"<RemoteObjects of {self._mesh.node_id}>"

    @property
    def alone(self) -> bool:
        """Whether this node holds everything."""
        return self._mesh.alone and (self._buckets is None or not self._buckets.any_backed())

    def backs(self, bucket: str) -> bool:
        """Whether what is in a bucket lies at an origin."""
        return self._buckets is not None and bool(self._buckets.writes(bucket))

    def _from_origins(self) -> FromOrigins:
        if self.origins is None:
            raise busy("buckets with origins cannot be read by this process")
        return self.origins

    def _is_mine(self, bucket: str, key: str) -> bool:
        """Whether this node is the one that reads a name of a bucket with an origin."""
        return self.backs(bucket) and self._mesh.is_reader(bucket, key)

    async def aclose(self) -> None:
        """End what runs in the background."""
        await self._tasks.aclose()

    # --- objects by name --------------------------------------------------------------------------------

    def others_hold(self, bucket: str, key: str) -> bool:
        """See Elsewhere.others_hold."""
        if self._mesh.alone or self.backs(bucket):
            return False
        readers = self._mesh.route(bucket, key).readers
        return any(node.node_id != self._mesh.node_id for node in readers)

    async def find(self, bucket: str, key: str) -> Record | None:
        """The current object's record, wherever it is. Raises BatchError Busy."""
        return (await self.many([(bucket, key)]))[0]

    async def many(self, names: Sequence[tuple[str, str]]) -> list[Record | None]:
        """The same of many, in their order, by one call a node. Raises BatchError Busy."""
        found: list[Record | None] = [None] * len(names)
        far, mine = list[int](), list[int]()
        for number, (bucket, key) in enumerate(names):
            if self.holds(bucket, key):
                found[number] = self._store.get(bucket, key)
            else:
                (mine if self._is_mine(bucket, key) else far).append(number)
        if mine:
            records = await _some(_ORIGINS, [self._from_origins().find(*names[n]) for n in mine])
            for number, record in zip(mine, records, strict=True):
                found[number] = record
        if far:
            await self._find_far(names, far, found)
        return found

    def own(self, names: Sequence[tuple[str, str]]) -> list[Record | None]:
        """The same by this node's own store alone (may be called in a thread)."""
        return [self._store.get(bucket, key) for bucket, key in names]

    async def _find_far(
        self, names: Sequence[tuple[str, str]], far: Sequence[int], found: list[Record | None]
    ) -> None:
        async def ask(node: Node, numbers: Sequence[int]) -> list[int]:
            body = wire.encode(wire.FindAsk([names[number] for number in numbers]))
            answer = wire.decode_found(await self._post(node, wire.FIND, body))
            unknown = set(answer.unknown)
            for place, (number, record) in enumerate(zip(numbers, answer.records, strict=True)):
                if place not in unknown:
                    found[number] = record
            return [numbers[place] for place in unknown]

        left = await self._ask_holders({number: names[number] for number in far}, ask)
        if left:
            number, why = next(iter(left.items()))
            raise busy(f"s3://{names[number][0]}/{names[number][1]} cannot be looked up now: {why}")

    async def entries(self, bucket: str, prefix: str) -> list[tuple[str, Record]]:
        """Every object under a prefix, in order of UTF-8 bytes, as the nodes that decide have it, under one
        map, or its origin. Raises BatchError Busy: never a shorter list."""
        if self.backs(bucket):
            return await self._from_origins().entries(bucket, prefix)
        for _ in range(_ATTEMPTS):
            cluster = self._mesh.map()
            deciders = self._deciders(cluster, bucket)
            listed = [self._listed(node, bucket, prefix, cluster.version) for node in deciders]
            answers = await asyncio.gather(*listed, return_exceptions=True)
            wrong = [answer for answer in answers if isinstance(answer, BaseException)]
            if any(isinstance(error, StaleMapError) for error in wrong):
                await self._mesh.newer_than(cluster.version, _PATIENCE)
                continue
            if wrong and isinstance(wrong[0], MeshdError):
                raise busy(f"{bucket} cannot be listed now: {wrong[0]}") from wrong[0]
            if wrong:
                raise wrong[0]
            found = [entry for page in answers if not isinstance(page, BaseException) for entry in page]
            found.sort(key=lambda entry: entry[0].encode())
            return found
        raise busy(f"{bucket} cannot be listed now: the nodes do not agree on the map yet")

    async def page(self, bucket: str, prefix: str, after: str, limit: int) -> Page:
        """A page of them: those after `after`, at most `limit`. Raises BatchError Busy."""
        for _ in range(_ATTEMPTS):
            cluster = self._mesh.map()
            ask = wire.ListAsk(bucket, prefix, after, cluster.version, limit)
            asked = [self._one_page(node, ask) for node in self._deciders(cluster, bucket)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            wrong = [answer for answer in answers if isinstance(answer, BaseException)]
            if any(isinstance(error, StaleMapError) for error in wrong):
                await self._mesh.newer_than(cluster.version, _PATIENCE)
                continue
            if wrong and isinstance(wrong[0], MeshdError):
                raise busy(f"{bucket} cannot be listed now: {wrong[0]}") from wrong[0]
            if wrong:
                raise wrong[0]
            return _page_of([page for page in answers if not isinstance(page, BaseException)], limit)
        raise busy(f"{bucket} cannot be listed now: the nodes do not agree on the map yet")

    async def _one_page(self, node: Node, ask: wire.ListAsk) -> wire.ListAnswer:
        if node.node_id == self._mesh.node_id:
            return decided_page(self._store, self._mesh, ask)
        return wire.decode_listed(await self._post(node, wire.LIST, wire.encode(ask)))

    def _deciders(self, cluster: ClusterMap, bucket: str) -> list[Node]:
        """Raises BatchError Busy while there are names nobody decides about."""
        table = routes(cluster, self._mesh.copies(bucket))  # of this map, whatever comes meanwhile
        masks = {node.node_id: table.decided_by(node.node_id) for node in cluster.nodes}
        if sum(int(mask.sum()) for mask in masks.values()) < cluster.slots:
            raise busy(f"{bucket} cannot be listed now: nodes that hold a part of it are away")
        return [node for node in cluster.nodes if masks[node.node_id].any()]

    async def _listed(self, node: Node, bucket: str, prefix: str, version: int) -> list[tuple[str, Record]]:
        found: list[tuple[str, Record]] = []
        after, here = "", node.node_id == self._mesh.node_id
        while True:
            ask = wire.ListAsk(bucket, prefix, after, version)
            page = await self._one_page(node, ask)
            if here:
                await asyncio.sleep(0)  # other requests get their turn between pages
            found += page.entries
            if not page.after:
                return found
            after = page.after

    # --- bytes by ETag ----------------------------------------------------------------------------------

    def names(self) -> Names:
        """What threads may ask: this node's store, or all nodes by way of this loop."""
        return self._store if self._mesh.alone else Waiting(self)

    def revision(self) -> object:
        """Equal to an earlier one only if every name still stands for the same bytes: never, where other
        nodes write, too."""
        return self._store.revision() if self._mesh.alone else object()

    def holds(self, bucket: str, key: str) -> bool:
        """Whether this node's own store says what there is under a name."""
        return not self.backs(bucket) and self._mesh.is_reader(bucket, key)

    def here(self, bucket: str, key: str, etag: str) -> Record | None:
        """The record of exactly this content, where this node has it, sound as far as is known."""
        if self.backs(bucket):
            return None if self.origins is None else self.origins.here(bucket, key, etag)
        record = self._store.get(bucket, key)
        if record is None or record.etag != etag or (record.broken and not self._mesh.alone):
            return None  # what is damaged here another owner has
        return record

    async def read(self, bucket: str, key: str, etag: str, offset: int, length: int) -> bytes:
        """Bytes of an object. Raises BatchError NoSuchKey, SnapshotChanged, CorruptData, Busy; StoreError."""
        return (await self.read_many([Part(bucket, key, etag, -1, offset, length)]))[0]

    async def read_many(self, parts: Sequence[Part]) -> list[bytes]:
        """The same of many parts, by one call a node. Raises as `read`, for the first that cannot be had."""
        found: list[bytes | None] = [None] * len(parts)
        far = []
        for number, part in enumerate(parts):
            record = self.here(part.bucket, part.key, part.etag)
            if record is None or part.size not in (-1, record.size):
                far.append(number)
            else:
                found[number] = await asyncio.to_thread(self._store.read, record, part.offset, part.length)
        if far and self.alone:
            raise lost_error(f"s3://{parts[far[0]].bucket}/{parts[far[0]].key}", Lost("SnapshotChanged"))
        if far:
            fetched = await self.fetch([parts[number] for number in far], self._memory)
            try:
                for number, place in zip(far, fetched.places, strict=True):
                    if isinstance(place, Lost):
                        raise lost_error(f"s3://{parts[number].bucket}/{parts[number].key}", place)
                    found[number] = os.pread(fetched.fd, place.length, place.offset)
            finally:
                fetched.close()
        return [data for data in found if data is not None]

    async def fetch(self, parts: Sequence[Part], memory: Memory) -> Gathered:
        """See Elsewhere.fetch."""
        room = MemoryFrame(0, memory)
        places: list[Location | Lost | None] = [None] * len(parts)
        path = f"/proc/{os.getpid()}/fd/{room.fd}"

        async def ask(node: Node, numbers: Sequence[int]) -> list[int]:
            body = wire.encode(wire.ReadAsk([parts[number] for number in numbers]))
            async with self._peers.call(node, "POST", wire.READ, body=body) as answer:
                start, size = await _receive(answer, room)
            again = []
            found = _parse(room.fd, start, size, path)
            for number, place in zip(numbers, found, strict=True):
                places[number] = place
                if isinstance(place, Lost) and place.code in _ASK_NEXT:
                    again.append(number)
            return again

        try:
            named = {number: (part.bucket, part.key) for number, part in enumerate(parts)}
            mine = [number for number, name in named.items() if self._is_mine(*name)]
            lone = [number for number in named if self._mesh.alone and not self.backs(parts[number].bucket)]
            for number in (*mine, *lone):
                del named[number]
            for number in lone:
                places[number] = self._gone(parts[number])
            await _some(_ORIGINS, [self._read_origin(parts, number, room, places) for number in mine])
            await self._take_near(parts, named, room, places)
            asked = list(named)
            left = await self._ask_holders(named, ask)
            self._keep_near(parts, asked, room, places)
        except BaseException:
            room.close()
            raise
        for number, why in left.items():
            lost = places[number]
            if not isinstance(lost, Lost) or lost.code == "NotHere":
                places[number] = Lost("Busy", why)
        return Gathered(room, [place or Lost("Busy") for place in places])

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
                places[number] = _placed(room, data)
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
        data = await self._from_origins().read(parts[number])
        if isinstance(data, Lost):
            places[number] = data
            return
        places[number] = _placed(room, data)

    async def own_part(self, part: Part) -> bytes:
        """A part of a bucket with an origin, for another node. Raises BatchError."""
        data = await self._from_origins().read(part)
        if isinstance(data, Lost):
            raise lost_error(f"s3://{part.bucket}/{part.key}", data)
        return data

    async def bring(self, bucket: str, key: str, record: Record) -> None:
        """Have all of an object of a bucket with an origin here, where this node is to have it. Raises
        BatchError."""
        if self._is_mine(bucket, key):
            await self._from_origins().bring(bucket, key, record.etag, record.size)

    def used(self, bucket: str, key: str) -> None:
        """See Elsewhere.used."""
        if self.origins is not None and self.backs(bucket):
            self.origins.used(bucket, key)

    async def _ask_holders(
        self,
        names: dict[int, tuple[str, str]],
        ask: Callable[[Node, Sequence[int]], Awaitable[list[int]]],
    ) -> dict[int, str]:
        """Asks for each name a reader of it, one call a node, then the next reader for what `ask` says was
        not had; gives the names nobody could answer for, and why."""
        tried: dict[int, set[str]] = {number: {self._mesh.node_id} for number in names}
        why: dict[int, str] = {}
        left = list(names)
        while left:
            groups: dict[str, list[int]] = defaultdict(list)
            nodes: dict[str, Node] = {}
            for number in left:
                readers = self._mesh.route(*names[number]).readers
                node = next((node for node in readers if node.node_id not in tried[number]), None)
                if node is None:
                    why.setdefault(number, "no node that holds it answers")
                    continue
                tried[number].add(node.node_id)
                nodes[node.node_id] = node
                groups[node.node_id].append(number)
            asked = [self._ask_one(nodes[each], numbers, ask, why) for each, numbers in groups.items()]
            left = [number for again in await asyncio.gather(*asked) for number in again]
        return why

    async def _ask_one(
        self,
        node: Node,
        numbers: list[int],
        ask: Callable[[Node, Sequence[int]], Awaitable[list[int]]],
        why: dict[int, str],
    ) -> list[int]:
        """The numbers to ask another node for. `why` has those without an answer so far."""
        again: list[int] = []
        for start in range(0, len(numbers), wire.MAX_PARTS):
            some = numbers[start : start + wire.MAX_PARTS]
            try:
                left = await ask(node, some)
            except (MeshdError, FrameError) as error:
                metrics.remote_failures.labels(type(error).__name__).inc()
                self._note(node, error)
                why |= dict.fromkeys(some, f"{node.node_id}: {error}")
                again += some
                continue
            for number in set(some) - set(left):
                why.pop(number, None)
            why |= dict.fromkeys(left, f"{node.node_id} does not have it")
            again += left
        return again

    def _note(self, node: Node, error: Exception) -> None:
        """Has a node that does not answer looked at, once at a time."""
        if isinstance(error, PeerUnreachableError) and node.node_id not in self._suspected:
            self._suspected.add(node.node_id)
            self._tasks.spawn(self._suspect(node.node_id, self._mesh.map().version), "suspect")

    async def _suspect(self, node_id: str, version: int) -> None:
        try:
            await self._mesh.suspect(node_id, version)
        finally:
            self._suspected.discard(node_id)

    # --- documents --------------------------------------------------------------------------------------

    def _others(self) -> list[Node]:
        """The storing nodes besides this one that are to have documents."""
        return [
            node
            for node in self._mesh.map().nodes
            if node.node_id != self._mesh.node_id and node.stores and node.state not in _AWAY
        ]

    async def document(self, key: str) -> bytes | None:
        """See Elsewhere.document."""
        target, silent = wire.DOCUMENTS + percents.encode(key, safe="/"), ""
        others = self._others()
        for start in range(0, len(others), _AT_ONCE):
            asked = [self._get(node, target) for node in others[start : start + _AT_ONCE]]
            for answer in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(answer, bytes):
                    return answer
                if isinstance(answer, MeshdError):
                    silent = str(answer)
                elif answer is not None:
                    raise answer
        if silent:
            raise busy(f"another node may have {key}, and does not answer: {silent}")
        return None

    async def documents(self, key: str) -> list[bytes]:
        """What each of the nodes that answer has under a key that is every node's own."""
        target = wire.DOCUMENTS + percents.encode(key, safe="/")
        asked = [self._get(node, target) for node in self._others()]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, bytes)]

    async def _get(self, node: Node, target: str) -> bytes | None:
        try:
            async with self._peers.call(node, "GET", target) as answer:
                return await answer.read()
        except PeerRefusedError as error:
            if error.status == 404:
                return None
            raise
        except PeerUnreachableError as error:
            self._note(node, error)
            raise

    async def spread(self, key: str, document: bytes) -> None:
        """See Elsewhere.spread."""
        target, others = wire.DOCUMENTS + percents.encode(key, safe="/"), self._others()
        own = self._mesh.map().node(self._mesh.node_id)
        needed = min(_SPREAD, len(others) + 1) - int(own is not None and own.stores)
        tasks = [self._put(node, target, document) for node in others]
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        wrong = [answer for answer in answers if isinstance(answer, BaseException)]
        if len(answers) - len(wrong) < needed:
            raise busy(f"too few nodes could keep {key}: {wrong[0]}")

    async def _put(self, node: Node, target: str, document: bytes) -> None:
        try:
            async with self._peers.call(node, "PUT", target, body=document) as answer:
                await answer.read()
        except PeerUnreachableError as error:
            self._note(node, error)
            raise

    async def met(self, address: FrameAddress) -> Frame | None:
        """The frame as the node has it at which its address meets; None where that is this node, or it does
        not give it: then it is made here."""
        place = address.rank, address.world, address.batch, address.origin
        name = frame_name(address.plan, address.epoch, address.step, *place)
        node = next(iter(meeting(assemblers(self._mesh.map()), name)), None)
        if node is None or node.node_id == self._mesh.node_id:
            return None
        room = MemoryFrame(0, self._memory)
        try:
            async with self._peers.call(node, "POST", wire.FRAMES, body=wire.encode(address)) as answer:
                await _receive(answer, room)
                room.rows = int(answer.headers["x-mesh-rows"])
                return room.hand_out(cast("FrameResult", answer.headers["x-mesh-frame"]))
        except MeshdError as error:
            self._note(node, error)
            return None

    async def kept_frame(self, address: FrameAddress) -> Frame | None:
        """A batch of which this node has a copy."""
        found = None if self.near is None else await self.near.frame(address)
        if found is None:
            return None
        pieces, rows = found
        room = MemoryFrame(0, self._memory)
        for piece in pieces:
            _placed(room, piece)
        room.rows = rows
        return room.hand_out("hit")

    def keep_frame(self, address: FrameAddress, frame: Frame) -> None:
        """Have this node keep a copy, if it keeps any."""
        if self.near is not None:
            self.near.keep_frame(address, frame.fd, frame.size, frame.rows)

    async def archive_index(
        self, bucket: str, key: str, record: Record, *, lines: bool = False, features: Sequence[str] = ()
    ) -> bytes:
        """The document of the index of an archive (a file of lines, or of TFRecords with these `features`)
        that other nodes hold. Raises BatchError BadSample and what else the holder says; Busy."""
        body = wire.encode(wire.IndexAsk(bucket, key, record.etag, lines, list(features)))
        found: list[bytes] = []
        refused: list[PeerRefusedError] = []

        async def ask(node: Node, numbers: Sequence[int]) -> list[int]:
            try:
                found.append(await self._post(node, wire.INDEX, body))
            except PeerRefusedError as error:
                if error.code == "NotHere":
                    return list(numbers)
                refused.append(error)
            return []

        left = await self._ask_holders({0: (bucket, key)}, ask)
        if refused:
            raise refused_error(refused[0])
        if not found:
            raise busy(f"s3://{bucket}/{key} cannot be read now: {left.get(0, '')}")
        return found[0]

    async def _post(self, node: Node, target: str, body: bytes) -> bytes:
        async with self._peers.call(node, "POST", target, body=body) as answer:
            return await answer.read()


def local_objects(store: ObjectStore) -> RemoteObjects:
    """Those of a node without others."""
    clock = ManualClock()
    mesh = Mesh("local", MemoryControl(clock), lambda _: 1, lone=lone_map("local", "http://localhost"))
    return RemoteObjects(store, mesh, Peers("local", lambda _: b"", clock))


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


def _placed(room: MemoryFrame, data: bytes) -> Location:
    """Bytes at the end of the memory."""
    start = room.size
    room.grow(start + len(data))
    os.pwrite(room.fd, data, start)
    return Location(f"/proc/{os.getpid()}/fd/{room.fd}", start, len(data), crc32c(data))


async def _receive(answer: PeerAnswer, room: MemoryFrame) -> tuple[int, int]:
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


def decided_page(store: ObjectStore, mesh: Mesh, ask: wire.ListAsk) -> wire.ListAnswer:
    """A page of what this node decides. Raises StaleMapError unless the map is the one that is meant."""
    cluster = mesh.map()
    if cluster.version != ask.version:
        raise StaleMapError(cluster.version)
    decided = routes(cluster, mesh.copies(ask.bucket)).decided_by(mesh.node_id)
    page = store.list(ask.bucket, prefix=ask.prefix, after=ask.after, limit=ask.limit)
    entries = [
        (key, record)
        for key, found in page.entries
        if decided[slot_of(ask.bucket, key, cluster.slots)] and (record := wire.far(found)) is not None
    ]
    return wire.ListAnswer(entries, page.next_after if page.truncated else "")


def _page_of(pages: Sequence[wire.ListAnswer], limit: int) -> Page:
    """One page of those of all deciders: as far as all of them reach."""
    ends = [page.after.encode() for page in pages if page.after]
    found = sorted((entry for page in pages for entry in page.entries), key=lambda entry: entry[0].encode())
    if ends:
        found = [entry for entry in found if entry[0].encode() <= min(ends)]
    kept = tuple(found[:limit])
    if len(found) > limit:
        return Page(kept, (), truncated=True, next_after=kept[-1][0])
    return Page(kept, (), truncated=bool(ends), next_after=min(ends).decode() if ends else "")


def lost_error(name: str, lost: Lost) -> BatchError:
    """What could not be had, as an error."""
    if lost.code == "NoSuchKey":
        return BatchError("NoSuchKey", f"{name} is gone")
    if lost.code == "SnapshotChanged":
        return BatchError("SnapshotChanged", f"{name} was replaced meanwhile", help="ask again")
    if lost.code == "Unreadable":
        return damaged(name, lost.message, {"url": name})
    return busy(f"{name} cannot be read now: {lost.message or lost.code}")


def refused_error(error: PeerRefusedError) -> BatchError:
    """Another node's refusal in this node's name."""
    if error.code in get_args(Code) and error.code != "Busy":
        return BatchError(cast("Code", error.code), error.message)
    return busy(f"another node refused: {error.message}")
