"""Shards for the webdataset library: `mesh://bucket/shard-{000..099}.tar`, over the SDK's connections.

Law: a shard is one stream, in order, of one version; a broken connection loses nothing.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from webdataset.gopen import gopen_schemes

from meshsdk.client.s3_client import connect
from meshsdk.errors import ConfigurationError
from meshsdk.transfers import stream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.client.s3_client import Client

_AHEAD = 1 << 20


class StreamReader(io.RawIOBase):
    """A file over an iterator of pieces, readable once from the start."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._left = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any, /) -> int:
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._left = memoryview(piece)
        target = memoryview(into).cast("B")
        count = min(len(target), len(self._left))
        target[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


def register(client: Client | None = None) -> None:
    """Register `mesh://` as a scheme of webdataset in this process; forked workers inherit it."""

    def opened(url: str, mode: str = "rb", _buffer: int = 0, **_: Any) -> io.BufferedReader:
        if mode != "rb":
            raise ConfigurationError(
                f"{url}: mode {mode!r} is not supported; shards are read-only here, write them with `mesh cp`"
            )
        bucket, _slash, key = url.removeprefix("mesh://").partition("/")
        return io.BufferedReader(StreamReader(stream(client or connect(), bucket, key)), _AHEAD)

    gopen_schemes["mesh"] = opened
