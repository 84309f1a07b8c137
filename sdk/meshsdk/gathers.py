"""Gather: many objects, shard members and byte ranges in a few requests, in order.

Law: an answer for every item, in the order asked, bytes or an error and never one for the other. Invariant:
no more than the credit is on its way or held here; the node is told, and sends no more.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from meshsdk.errors import ConfigurationError, CorruptFrameError, MeshError, server_error
from meshsdk.transport import Request
from meshwire.frames import FrameError, Status
from meshwire.names import check_key
from meshwire.sampleframes import SampleFrame

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from meshsdk.connections import Response
    from meshsdk.errors import ServerError
    from meshsdk.transport import Transport

CREDIT: Final = 64 << 20
_MOST, _LEAST = 8192, 16  # items of a request
_BODY_BYTES = 3 << 20  # of a request; the node takes 4 MiB
_OVERHEAD = 256  # bytes of a frame for an item beside its data: index, checksum, alignment, an error's code


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to gather: an object, or with `member` a file of a tar shard; of either the whole, or
    `length` bytes (None: all) from `offset`. `tag` is yours: it stays here and comes back with the answer.
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

    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = {"bucket": self.bucket, "key": self.key}
        if self.member is not None:
            found["member"] = self.member
        if self.offset or self.length is not None:
            found["range"] = [self.offset, _TO_THE_END if self.length is None else self.length]
        return found


_TO_THE_END = 1 << 60


class Gathered:
    """The answer to an item: `error`, or else `data`."""

    __slots__ = ("_data", "error", "item")

    def __init__(self, item: Item, data: memoryview | None, error: ServerError | None = None) -> None:
        self.item, self._data, self.error = item, data, error

    @property
    def tag(self) -> Any:
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


def gather(transport: Transport, items: Iterable[Item], credit: int, *, verify: bool) -> Iterator[Gathered]:
    """See Client.gather."""
    if credit < 1:
        raise ConfigurationError(f"a credit of {credit} bytes lets nothing through")
    return _gathered(transport, iter(items), credit, verify=verify)


def _gathered(
    transport: Transport, source: Iterator[Item], credit: int, *, verify: bool
) -> Iterator[Gathered]:
    pending: deque[tuple[Item, bytes]] = deque()
    window = _MOST
    while True:
        wanted = max(0, window - len(pending))
        pending.extend((item, _encode(item)) for item in islice(source, wanted))
        if not pending:
            return
        asked = _request(pending, window, credit)
        frame = transport.call(asked.request, partial(asked.read, verify=verify))
        answered = [pending.popleft()[0] for _ in range(len(frame))]
        # What did not fit is asked for again, so the next question is not much larger than the answer.
        window = _MOST if len(answered) == asked.count else min(_MOST, max(_LEAST, 2 * len(answered)))
        yield from _answers(answered, frame)
        del frame  # before the next one comes


def _encode(item: Item) -> bytes:
    try:
        check_key(item.key)
        return json.dumps(item.document(), separators=(",", ":"), ensure_ascii=False).encode()
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"{item!r:.200} is not an item to gather: {error}") from error


@dataclass(frozen=True, slots=True)
class _Asked:
    request: Request
    count: int
    most: int  # bytes an answer may have

    def read(self, response: Response, *, verify: bool) -> SampleFrame:
        """The answer; raises CorruptFrameError, which has it asked for again."""
        if response.length is None or response.length > self.most:
            raise MeshError(
                f"the node answered a gather with {response.length} bytes, beyond its credit; upgrade it"
            )
        body = memoryview(bytearray(response.length))
        response.readinto(body)
        try:
            frame = SampleFrame(body.toreadonly())
            if verify:
                frame.verify()
        except FrameError as error:
            raise CorruptFrameError(f"a gathered frame is damaged: {error}") from error
        if not 1 <= len(frame) <= self.count:
            raise CorruptFrameError(f"{len(frame)} answers for {self.count} items")
        return frame


def _request(pending: Sequence[tuple[Item, bytes]], window: int, credit: int) -> _Asked:
    """A request for the first items, as many as it may carry."""
    parts: list[bytes] = []
    size = 0
    for _, text in islice(pending, window):
        size += len(text) + 1
        if size > _BODY_BYTES and parts:
            break
        parts.append(text)
    body = b'{"credit":%d,"names":false,"items":[%b]}' % (credit, b",".join(parts))
    headers = {"content-type": "application/json"}
    request = Request("POST", "/-/gather", "", headers, body, hashlib.sha256(body).hexdigest())
    return _Asked(request, len(parts), credit + _OVERHEAD * len(parts) + (64 << 10))


def _answers(items: Sequence[Item], frame: SampleFrame) -> Iterator[Gathered]:
    errors = _errors(frame.metadata)
    for number, (item, data, status) in enumerate(zip(items, frame, frame.status.tolist(), strict=True)):
        if status == Status.OK:
            yield Gathered(item, data)
        else:
            yield Gathered(item, None, _error(item, errors.get(str(number), "Unreadable")))


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
    "BadSample": (422, "lies in a tar that cannot be read; write it again"),
    "TooLarge": (413, "is larger than the credit: raise credit=, or ask for ranges of it"),
    "Unreadable": (500, "could not be read when its turn came: replaced meanwhile, or damaged on disk"),
}


def _error(item: Item, code: str) -> ServerError:
    status, meaning = _MEANING.get(code, (500, "failed"))
    return server_error(status, code, f"{item} {meaning}")
