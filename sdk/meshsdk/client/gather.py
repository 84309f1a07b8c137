"""Gather: many objects, archive members and byte ranges in few requests, fanned out over the nodes.

Law: each item yields one answer, bytes or an error, in the order of the items. The choice of node is only a
preference: a node without the object fetches it, and a dead node is skipped.
Invariant: frames never exceed the credit, and one per node is in memory; further answers wait in the
sockets.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import defaultdict, deque
from dataclasses import dataclass
from itertools import islice
from json.encoder import encode_basestring as quote
from operator import index
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import numpy as np

from meshsdk.client.fork_safe_lock import ForkSafeLock
from meshsdk.client.request import Request
from meshsdk.client.routing import near_caches, replica_node
from meshsdk.errors import ConfigurationError, ConnectError, CorruptFrameError, MeshError, server_error
from meshwire.checksums.crc import crc32c
from meshwire.frame.sample_frames import SampleFrame
from meshwire.frame.tensor_frame import FrameError, Status
from meshwire.names import check_key

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from meshsdk.client.http_connection import Response
    from meshsdk.client.transport import Transport
    from meshsdk.errors import ServerError


T = TypeVar("T")
A = TypeVar("A")
AHEAD: Final = 16384
"""Items consumed ahead of the one that is answered."""
_FIRST: Final = 4096
"""Items consumed before the first requests are sent."""


def fan_out(
    source: Iterator[T],
    whose: Callable[[T], str],
    ask: Callable[[str, Iterator[T]], Generator[A, None, None]],
) -> Generator[A, None, None]:
    """Distribute the items of `source` over nodes, and yield the answers in the order of the items.

    `whose` returns the node of an item; `ask` yields the answers to the items of one node, in their order,
    and ends when its iterator does.
    """
    shares, answers = _Shares(source, whose), dict[str, "Generator[A, None, None]"]()
    try:
        while len(shares.order) < _FIRST and shares.pull():
            pass
        for node in list(shares.queues):
            answers[node] = ask(node, _Share(shares, node))
        while shares.order or shares.pull():
            node = shares.order.popleft()
            flow = answers.get(node)
            answer = None if flow is None else next(flow, None)
            if answer is None:  # it ended earlier, for lack of items
                flow = answers[node] = ask(node, _Share(shares, node))
                answer = next(flow)
            yield answer
    finally:
        for flow in answers.values():
            flow.close()


class _Shares(Generic[T]):
    """The items of a source, in one queue per node. `order`: the nodes of the items, in item order."""

    def __init__(self, source: Iterator[T], whose: Callable[[T], str]) -> None:
        self._source, self._whose, self._done = source, whose, False
        self.order: deque[str] = deque()
        self.queues: dict[str, deque[T]] = defaultdict(deque)

    def pull(self) -> bool:
        """Take one more item from the source; return False at its end, or if `AHEAD` items are waiting."""
        if self._done or len(self.order) >= AHEAD:
            return False
        try:
            item = next(self._source)
        except StopIteration:
            self._done = True
            return False
        node = self._whose(item)
        self.order.append(node)
        self.queues[node].append(item)
        return True


class _Share(Generic[T]):
    """Iterates over the items of one node; it may continue after its end, once more items were taken."""

    def __init__(self, shares: _Shares[T], node: str) -> None:
        self._shares, self._queue = shares, shares.queues[node]

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        while not self._queue:
            if not self._shares.pull():
                raise StopIteration
        return self._queue.popleft()


CREDIT: Final = 64 << 20
_MOST, _LEAST = 8192, 16  # items per request
_BODY_BYTES = 3 << 20  # per request; the node accepts 4 MiB
_FRAME = 16 << 20  # bytes of items after which a frame may end
_ROOMS, _ROOM = 2, _FRAME + (1 << 20)  # number and size in bytes of the buffers that are kept
_TO_THE_END = 1 << 60  # a length beyond any object
_OVERHEAD = 256  # bytes per item in a frame besides its data: index, checksum, alignment, error code


@dataclass(frozen=True, slots=True)
class Item:
    """One item to gather: an object, or a `member` of an archive, in whole or in part.

    Attributes:
        bucket, key: the object.
        member: name of a file in the archive; None for the object itself.
        offset: first byte to fetch.
        length: number of bytes to fetch; None: to the end.
        tag: any value of yours; it is not sent, and comes back with the answer.
    """

    bucket: str
    key: str
    member: str | None = None
    offset: int = 0
    length: int | None = None
    tag: Any = None

    def __str__(self) -> str:
        member = "" if self.member is None else f", member {self.member}"
        return f"s3://{self.bucket}/{self.key}{member}"


class Gathered:
    """The answer to an `item`: its `data`, or an `error` (a ServerError, else None)."""

    __slots__ = ("_data", "error", "item")

    def __init__(self, item: Item, data: memoryview | None, error: ServerError | None = None) -> None:
        self.item, self._data, self.error = item, data, error

    @property
    def tag(self) -> Any:
        """The tag of the item."""
        return self.item.tag

    @property
    def data(self) -> memoryview:
        """The bytes, read-only; raises `error` if there is one.

        Holding the view keeps the whole frame in memory (up to the credit); `bytes(got.data)` makes a copy
        that does not.
        """
        if self._data is None:
            assert self.error is not None
            raise self.error
        return self._data

    def __repr__(self) -> str:
        what = f"{len(self._data)} bytes" if self._data is not None else f"error={self.error!r}"
        return f"Gathered({self.item}, {what})"


def gather(
    transport: Transport, items: Iterable[Item], credit: int, *, verify: bool
) -> Generator[Gathered, None, None]:
    """Yield the answers to `items`, as documented at `Client.gather`."""
    if credit < 1:
        raise ConfigurationError(f"credit={credit}: expected a positive number of bytes")
    cluster = transport.router.directory.current()
    if cluster is None or near_caches(cluster):
        return _Gathering(transport, iter(items), credit).run(verify=verify)
    return _fan_out(transport, iter(items), credit, verify=verify)


def _fan_out(
    transport: Transport, source: Iterator[Item], credit: int, *, verify: bool
) -> Generator[Gathered, None, None]:
    """Gather from all nodes at once, each with an equal part of the credit.

    An item too large for that part is requested again by itself, with the whole credit.
    """
    directory = transport.router.directory
    cluster = directory.current()
    storing = sum(node.stores for node in cluster.nodes) if cluster is not None else 1
    part = max(1, credit // max(1, storing))
    asked: dict[str, _Gathering] = {}

    def whose(item: Item) -> str:
        known = directory.map
        node = None if known is None else replica_node(known, item.bucket, item.key)
        return "" if node is None else node.node_id

    def ask(node: str, items: Iterator[Item]) -> Generator[Gathered, None, None]:
        asked[node] = gathering = _Gathering(transport, items, part, node)
        gathering.start()
        return gathering.run(verify=verify)

    def large(answer: Gathered) -> Gathered:
        if answer.error is None or answer.error.code != "TooLarge" or part == credit:
            return answer
        return next(_Gathering(transport, iter([answer.item]), credit).run(verify=verify))

    try:
        for answer in fan_out(source, whose, ask):
            yield large(answer)
    finally:
        for gathering in asked.values():
            gathering.close()


class _Gathering:
    """The requests of one gather to one node, pipelined.

    While a frame is received, the node already looks up the next one and begins to send it.
    """

    def __init__(self, transport: Transport, source: Iterator[Item], credit: int, toward: str = "") -> None:
        self._transport, self._source, self._credit = transport, source, credit
        self._toward = toward
        self._first: _Flight | None = None
        self._pending: deque[tuple[Item, bytes]] = deque()
        self._window = _MOST

    def start(self) -> None:
        """Send the first request now rather than when the first answer is needed."""
        self._first = self._launch()

    def close(self) -> None:
        """Abandon the first request if its answers were never read."""
        first, self._first = self._first, None
        if first is not None:
            first.close()

    def run(self, *, verify: bool) -> Generator[Gathered, None, None]:
        flight, self._first = self._first or self._launch(), None
        try:
            while flight is not None:
                rows = flight.begin()
                # Items that did not fit are requested again, so the next request is sized by this answer.
                most = _MOST if rows == flight.count else 2 * rows
                self._window = min(_MOST, max(_LEAST, most))
                items = [self._pending.popleft() for _ in range(rows)]
                current, flight = flight, None
                try:
                    flight = self._launch()
                    frame = current.read()
                finally:
                    current.close()
                if len(frame) < rows:  # the frame was requested again, and an item has grown meanwhile
                    self._pending.extendleft(reversed(items[len(frame) :]))
                    if flight is not None:
                        flight.close()
                    flight = self._launch()
                yield from _answers([item for item, _ in items[: len(frame)]], frame, verify=verify)
                del frame  # its buffer becomes free for a later frame
        finally:
            if flight is not None:
                flight.close()

    def _launch(self) -> _Flight | None:
        """Send the next request; return None if no item is left."""
        wanted = max(0, self._window - len(self._pending))
        self._pending.extend((item, _encode(item)) for item in islice(self._source, wanted))
        if not self._pending:
            return None
        asked = _request(self._pending, self._window, self._credit, self._toward)
        return _Flight(self._transport, asked)


def _encode(item: Item) -> bytes:
    """Encode the item as JSON, by hand for speed: a gather often has thousands of items."""
    try:
        check_key(item.key)
        text = f'{{"bucket":{quote(item.bucket)},"key":{quote(item.key)}'
        if item.member is not None:
            text += f',"member":{quote(item.member)}'
        if item.offset or item.length is not None:
            length = _TO_THE_END if item.length is None else index(item.length)
            text += f',"range":[{index(item.offset)},{length}]'
        return f"{text}}}".encode()
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"cannot gather {item!r:.200}: {error}") from error


class _BufferPool:
    """Buffers for frames, reused once no view of them is left: new pages cost more than filling them."""

    def __init__(self) -> None:
        self._kept: list[npt.NDArray[np.uint8]] = []
        self._lock = ForkSafeLock()

    def take(self, size: int) -> memoryview:
        """Return `size` writable bytes of arbitrary content."""
        if size > _ROOM:
            return np.empty(size, np.uint8).data
        with self._lock:
            free = [uses == _UNUSED for uses in _references(self._kept)]
            if any(free):
                room = self._kept[free.index(True)]
            else:
                room = np.empty(_ROOM, np.uint8)
                if len(self._kept) < _ROOMS:
                    self._kept.append(room)
            return room.data[:size]


def _references(rooms: Sequence[npt.NDArray[np.uint8]]) -> list[int]:
    return [sys.getrefcount(room) for room in rooms]


_UNUSED = _references([np.empty(1, np.uint8)])[0]  # the references held by the list and the counting itself
_rooms = _BufferPool()


@dataclass(frozen=True, slots=True)
class _Asked:
    request: Request
    count: int
    most: int  # largest allowed response, in bytes

    def read(self, response: Response) -> SampleFrame:
        """Read the frame. Raises CorruptFrameError, after which the transport requests it again."""
        if response.length is None or response.length > self.most:
            raise MeshError(
                f"the node answered a gather with {response.length} bytes, more than the limit of "
                f"{self.most}; upgrade the node"
            )
        body = _rooms.take(response.length)
        response.readinto(body)
        try:
            frame = SampleFrame(body.toreadonly())
        except FrameError as error:
            raise CorruptFrameError(f"a gathered frame is damaged: {error}") from error
        if not 1 <= len(frame) <= self.count:
            raise CorruptFrameError(f"a gathered frame has {len(frame)} answers for {self.count} items")
        return frame


class _Flight:
    """A request that was sent. `count`: the number of its items."""

    def __init__(self, transport: Transport, asked: _Asked) -> None:
        self._transport, self._asked, self.count = transport, asked, asked.count
        self._begun = transport.begin(asked.request)
        self._answer: tuple[Response, Callable[[], None]] | None = None
        self._rows = 0

    def begin(self) -> int:
        """Wait for the head of the response; return how many items it answers."""
        begun, self._begun = self._begun, None
        self._answer = self._transport.open(self._asked.request, begun=begun)
        text = self._answer[0].headers.get("x-mesh-rows", "")
        self._rows = int(text) if text.isascii() and text.isdigit() else 0
        if not 1 <= self._rows <= self.count:
            self.close()
            raise MeshError(
                f"the node answered a gather of {self.count} items with x-mesh-rows: {text[:40]!r}; "
                "upgrade the older of SDK and node"
            )
        return self._rows

    def read(self) -> SampleFrame:
        """Return the frame; it is requested again if it breaks off, and may then have fewer rows."""
        assert self._answer is not None
        try:
            frame = self._asked.read(self._answer[0])
        except ConnectError:
            frame = self._transport.call(self._asked.request, self._asked.read)
        if len(frame) > self._rows:
            raise MeshError(f"a gathered frame has {len(frame)} answers, but announced {self._rows}")
        return frame

    def close(self) -> None:
        """Release the connection; one with unread bytes is closed. Idempotent."""
        answer, self._answer = self._answer, None
        if answer is not None:
            answer[1]()
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.close()


def _request(pending: Sequence[tuple[Item, bytes]], window: int, credit: int, toward: str = "") -> _Asked:
    """Return a request for the first of the pending items, as many as fit."""
    parts: list[bytes] = []
    size = 0
    for _, text in islice(pending, window):
        size += len(text) + 1
        if size > _BODY_BYTES and parts:
            break
        parts.append(text)
    body = b'{"credit":%d,"enough":%d,"names":false,"items":[%b]}' % (credit, _FRAME, b",".join(parts))
    headers = {"content-type": "application/json"}
    digest = hashlib.sha256(body).hexdigest()
    request = Request("POST", "/-/gather", "", headers, body, digest, toward=toward)
    return _Asked(request, len(parts), credit + _OVERHEAD * len(parts) + (64 << 10))


def _answers(items: Sequence[Item], frame: SampleFrame, *, verify: bool) -> Iterator[Gathered]:
    errors = _errors(frame.metadata)
    rows = zip(items, frame, frame.status.tolist(), frame.crc32c.tolist(), strict=True)
    for number, (item, data, status, expected) in enumerate(rows):
        if status != Status.OK:
            yield Gathered(item, None, _error(item, errors.get(str(number), "Unreadable")))
        elif verify and crc32c(data) != expected:
            yield Gathered(item, None, _error(item, "Damaged"))
        else:
            yield Gathered(item, data)


def _errors(metadata: Mapping[str, str]) -> Mapping[str, str]:
    try:
        return dict(json.loads(metadata.get("errors", "{}")))
    except (ValueError, TypeError) as error:
        raise MeshError(f"cannot parse the errors of a gather: {error}") from error


_MEANING: Final[Mapping[str, tuple[int, str]]] = {
    "NoSuchKey": (404, "does not exist"),
    "NoSuchBucket": (404, "is in a bucket that does not exist"),
    "AccessDenied": (403, "may not be read with this access key"),
    "InvalidRange": (416, "ends before the offset of the requested range"),
    "BadSample": (422, "is in an archive that cannot be read; write the archive again"),
    "TooLarge": (413, "is larger than the credit: raise credit=, or request ranges of it"),
    "Damaged": (500, "arrived with a wrong checksum: run meshd fsck on the node"),
    "Unreadable": (500, "could not be read: it was replaced during the gather, or is damaged on disk"),
}


def _error(item: Item, code: str) -> ServerError:
    status, meaning = _MEANING.get(code, (500, "failed"))
    return server_error(status, code, f"{item} {meaning}")
