"""Byte ranges of one object as a file, prefetched in parallel.

Law: one version of the object, or an error; only announced ranges are fetched.
Invariant: nothing before the position is kept, and at most the current span and `parallel` parts ahead of
it.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from meshsdk.client.request import get_request
from meshsdk.errors import CorruptFrameError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future

    from meshsdk.client.http_connection import Response
    from meshsdk.client.s3_client import Client
    from meshsdk.transfers import Tuning

    Span = tuple[int, int]

_GAP = 64 << 10  # unwanted bytes that are cheaper to read than a second request


def merged(ranges: Iterable[Span], most: int) -> list[Span]:
    """Sort ranges (first, end) and merge adjacent ones into spans of at most `most` bytes."""
    spans: list[Span] = []
    for first, last in sorted(ranges):
        if spans and first <= spans[-1][1] + _GAP and max(last, spans[-1][1]) - spans[-1][0] <= most:
            spans[-1] = spans[-1][0], max(last, spans[-1][1])
        else:
            spans.append((first, last))
    return spans


class Ranges(io.RawIOBase):
    """A file in which only the `spans` can be read, roughly in their order."""

    def __init__(self, client: Client, bucket: str, key: str, spans: Sequence[Span], tuning: Tuning) -> None:
        super().__init__()
        self._client, self._bucket, self._key = client, bucket, key
        self._spans, self._part, self._position = list(spans), tuning.part, 0
        self._firsts = [first for first, _ in spans]
        self._etag = client.head(bucket, key).etag
        self._ahead = tuning.part * tuning.parallel
        self._pool = ThreadPoolExecutor(tuning.parallel, thread_name_prefix="mesh-ranges")
        self._coming: OrderedDict[int, tuple[bytearray, list[Future[None]]]] = OrderedDict()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence == io.SEEK_END:
            raise io.UnsupportedOperation("ranges have no end")
        self._position = offset + (self._position if whence == io.SEEK_CUR else 0)
        return self._position

    def readinto(self, into: Any, /) -> int:
        target = memoryview(into).cast("B")
        number = bisect_right(self._firsts, self._position) - 1
        if number < 0 or self._position >= self._spans[number][1] or not target:
            return 0
        start = self._position - self._spans[number][0]
        data = memoryview(self._span(number))[start : start + len(target)]
        target[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _span(self, number: int) -> bytearray:
        """Return the bytes of a span; drop the spans before it and prefetch those after it."""
        for done in [known for known in self._coming if known < number]:
            del self._coming[done]
        ahead = 0
        for coming in range(number, len(self._spans)):
            if coming > number and ahead >= self._ahead:
                break
            first, last = self._spans[coming]
            ahead += last - first if coming > number else 0
            if coming not in self._coming:
                self._coming[coming] = self._ask(first, last)
        data, parts = self._coming[number]
        for part in parts:
            part.result()
        return data

    def _ask(self, first: int, last: int) -> tuple[bytearray, list[Future[None]]]:
        data = bytearray(last - first)
        view = memoryview(data)
        parts = []
        for start in range(0, len(data), self._part):
            into = view[start : start + self._part]
            parts.append(self._pool.submit(self._fetch, first + start, into))
        return data, parts

    def _fetch(self, offset: int, into: memoryview) -> None:
        def read(response: Response) -> None:
            if response.length != len(into):
                raise CorruptFrameError(f"received {response.length} bytes for a range of {len(into)} bytes")
            response.readinto(into)

        request = get_request(self._bucket, self._key, offset, len(into), self._etag)
        self._client.transport.call(request, read)

    def close(self) -> None:
        if not self.closed:
            self._pool.shutdown(cancel_futures=True)
            self._coming.clear()
        super().close()
