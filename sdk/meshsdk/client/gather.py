"""Gather: many objects, archive members and byte ranges in few requests, fanned out over the nodes.

Law: each item yields one answer, bytes or an error, in the order of the items. The choice of node is
advice: a node without the object fetches it, and a dead node is skipped.
Invariant: frames never exceed the credit, with one per node in memory; further answers wait in the
sockets.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections import defaultdict, deque
from dataclasses import dataclass
from itertools import islice
from json.encoder import encode_basestring as quote
from operator import index
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import numpy as np

from meshsdk.client.routing import near_caches, replica_node
from meshsdk.client.transport import Request
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
"""Items taken beyond the one that is answered."""
_FIRST: Final = 4096
"""Items looked at before the first nodes are asked."""


def fan_out(
    source: Iterator[T],
    whose: Callable[[T], str],
    ask: Callable[[str, Iterator[T]], Generator[A, None, None]],
) -> Generator[A, None, None]:
    """The answers. `whose` names the node of an item; `ask` answers items of one node, in their order, and
    ends when it is given no more."""
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
            if answer is None:  # it had answered all there was for it
                flow = answers[node] = ask(node, _Share(shares, node))
                answer = next(flow)
            yield answer
    finally:
        for flow in answers.values():
            flow.close()


class _Shares(Generic[T]):
    """The items of a source by node. `order`: whose turn it is, item by item."""

    def __init__(self, source: Iterator[T], whose: Callable[[T], str]) -> None:
        self._source, self._whose, self._done = source, whose, False
        self.order: deque[str] = deque()
        self.queues: dict[str, deque[T]] = defaultdict(deque)

    def pull(self) -> bool:
        """Take one more item from the source; False at its end, or when there are enough."""
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
    """The items of one node; it may go on after it has ended, when more were taken."""

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
_MOST, _LEAST = 8192, 16  # items of a request
_BODY_BYTES = 3 << 20  # of a request; the node takes 4 MiB
_FRAME = 16 << 20  # bytes of items after which a frame may end
_ROOMS, _ROOM = 2, _FRAME + (1 << 20)  # how many of how many bytes are kept
_TO_THE_END = 1 << 60  # a length beyond any object
_OVERHEAD = 256  # bytes of a frame for an item beside its data: index, checksum, alignment, an error's code


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to gather: an object, or with `member` a file of an archive; of either the whole, or `length`
    bytes (None: to the end) from `offset`. `tag` is yours: it stays here and comes back with the answer.
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
    """The answer to an `item`: its `data`, or else an `error` (a ServerError; None if there is none)."""

    __slots__ = ("_data", "error", "item")

    def __init__(self, item: Item, data: memoryview | None, error: ServerError | None = None) -> None:
        self.item, self._data, self.error = item, data, error

    @property
    def tag(self) -> Any:
        """The item's."""
        return self.item.tag

    @property
    def data(self) -> memoryview:
        """The bytes, read only; raises `error` if there is one. Keeping it keeps all that came in the same
        frame (at most the credit): `bytes(got.data)` is a copy that does not."""
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
    """See Client.gather."""
    if credit < 1:
        raise ConfigurationError(f"a credit of {credit} bytes lets nothing through")
    cluster = transport.router.directory.current()
    if cluster is None or near_caches(cluster):
        return _Gathering(transport, iter(items), credit).run(verify=verify)
    return _fan_out(transport, iter(items), credit, verify=verify)


def _fan_out(
    transport: Transport, source: Iterator[Item], credit: int, *, verify: bool
) -> Generator[Gathered, None, None]:
    """From all nodes at once, each with its part of the credit; what is too large for that comes by
    itself."""
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
    """One call: the items that are still to be asked for. While a frame is received, the node looks up the
    next one and begins to send it."""

    def __init__(self, transport: Transport, source: Iterator[Item], credit: int, toward: str = "") -> None:
        self._transport, self._source, self._credit = transport, source, credit
        self._toward = toward
        self._first: _Flight | None = None
        self._pending: deque[tuple[Item, bytes]] = deque()
        self._window = _MOST

    def start(self) -> None:
        """Send the first question now, not when the first answer is wanted."""
        self._first = self._launch()

    def close(self) -> None:
        """Forget the first question, if nobody wanted its answers."""
        first, self._first = self._first, None
        if first is not None:
            first.close()

    def run(self, *, verify: bool) -> Generator[Gathered, None, None]:
        flight, self._first = self._first or self._launch(), None
        try:
            while flight is not None:
                rows = flight.begin()
                # What did not fit is asked for again: the next question is not much larger than this answer.
                most = _MOST if rows == flight.count else 2 * rows
                self._window = min(_MOST, max(_LEAST, most))
                items = [self._pending.popleft() for _ in range(rows)]
                current, flight = flight, None
                try:
                    flight = self._launch()
                    frame = current.read()
                finally:
                    current.close()
                if len(frame) < rows:  # asked again, and an item is larger than it was
                    self._pending.extendleft(reversed(items[len(frame) :]))
                    if flight is not None:
                        flight.close()
                    flight = self._launch()
                yield from _answers([item for item, _ in items[: len(frame)]], frame, verify=verify)
                del frame  # its room is free for a later one
        finally:
            if flight is not None:
                flight.close()

    def _launch(self) -> _Flight | None:
        """Sends the next question; None when nothing is left to ask for."""
        wanted = max(0, self._window - len(self._pending))
        self._pending.extend((item, _encode(item)) for item in islice(self._source, wanted))
        if not self._pending:
            return None
        asked = _request(self._pending, self._window, self._credit, self._toward)
        return _Flight(self._transport, asked)


def _encode(item: Item) -> bytes:
    """The item as JSON: spelled by hand, for a gather is often of thousands."""
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
        raise ConfigurationError(f"{item!r:.200} is not an item to gather: {error}") from error


class _BufferPool:
    """Memory for frames, used again once nobody has a view of it: new pages cost more than to fill them."""

    def __init__(self) -> None:
        self._kept: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> memoryview:
        """`size` bytes, whatever they hold."""
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


_UNUSED = _references([np.empty(1, np.uint8)])[0]  # what the list and the counting itself hold
_rooms = _BufferPool()


@dataclass(frozen=True, slots=True)
class _Asked:
    request: Request
    count: int
    most: int  # bytes an answer may have

    def read(self, response: Response) -> SampleFrame:
        """The answer; raises CorruptFrameError, which has it asked for again."""
        if response.length is None or response.length > self.most:
            raise MeshError(
                f"the node answered a gather with {response.length} bytes, beyond its credit; upgrade it"
            )
        body = _rooms.take(response.length)
        response.readinto(body)
        try:
            frame = SampleFrame(body.toreadonly())
        except FrameError as error:
            raise CorruptFrameError(f"a gathered frame is damaged: {error}") from error
        if not 1 <= len(frame) <= self.count:
            raise CorruptFrameError(f"{len(frame)} answers for {self.count} items")
        return frame


class _Flight:
    """A question that was sent. `count`: the items it is about."""

    def __init__(self, transport: Transport, asked: _Asked) -> None:
        self._transport, self._asked, self.count = transport, asked, asked.count
        self._begun = transport.begin(asked.request)
        self._answer: tuple[Response, Callable[[], None]] | None = None
        self._rows = 0

    def begin(self) -> int:
        """Waits for the answer's head; gives how many items it answers."""
        begun, self._begun = self._begun, None
        self._answer = self._transport.open(self._asked.request, begun=begun)
        text = self._answer[0].headers.get("x-mesh-rows", "")
        self._rows = int(text) if text.isascii() and text.isdigit() else 0
        if not 1 <= self._rows <= self.count:
            self.close()
            raise MeshError(f"a gather of {self.count} items was answered with {text[:40]!r} rows")
        return self._rows

    def read(self) -> SampleFrame:
        """The answer, asked for again if it breaks off; it may then have fewer rows."""
        assert self._answer is not None
        try:
            frame = self._asked.read(self._answer[0])
        except ConnectError:
            frame = self._transport.call(self._asked.request, self._asked.read)
        if len(frame) > self._rows:
            raise MeshError(f"{len(frame)} answers in a frame of {self._rows}")
        return frame

    def close(self) -> None:
        """Gives the connection back; one with bytes still to come is closed. Idempotent."""
        answer, self._answer = self._answer, None
        if answer is not None:
            answer[1]()
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.close()


def _request(pending: Sequence[tuple[Item, bytes]], window: int, credit: int, toward: str = "") -> _Asked:
    """A request for the first items, as many as it may carry."""
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
        raise MeshError(f"the errors of a gather are not understood: {error}") from error


_MEANING: Final[Mapping[str, tuple[int, str]]] = {
    "NoSuchKey": (404, "is not there"),
    "NoSuchBucket": (404, "is in no bucket that there is"),
    "AccessDenied": (403, "may not be read with this key"),
    "InvalidRange": (416, "is shorter than the range's beginning"),
    "BadSample": (422, "lies in an archive that cannot be read; write it again"),
    "TooLarge": (413, "is larger than the credit: raise credit=, or ask for ranges of it"),
    "Damaged": (500, "came with another checksum than it was stored with: run meshd fsck on the node"),
    "Unreadable": (500, "could not be read when its turn came: replaced meanwhile, or damaged on disk"),
}


def _error(item: Item, code: str) -> ServerError:
    status, meaning = _MEANING.get(code, (500, "failed"))
    return server_error(status, code, f"{item} {meaning}")
