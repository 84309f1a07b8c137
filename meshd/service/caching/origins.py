"""The origins of buckets, opened when first asked for, and let alone for a moment when they are down.

Law: one a bucket and process; another description opens another. An origin that just failed is asked by one
request at a time until it answers: the others are told at once.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from meshd.origin.errors import OriginDownError, OriginError
from meshd.origin.opening import open_origin

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Iterator, Sequence
    from pathlib import Path

    from meshd.control.buckets import Bucket
    from meshd.kit.clock import Clock
    from meshd.origin.interface import Facts, Listing, Origin, Reply

_REST: Final = 2.0  # seconds an origin that failed is let alone
_MOST: Final = 256


class Origins:
    """Opened origins by bucket."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._directory, self._clock = directory, clock
        self._open: OrderedDict[tuple[object, ...], GuardedOrigin] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Origins {len(self._open)} open>"

    def of(self, bucket: Bucket) -> GuardedOrigin:
        """The origin of a bucket that has one. Raises OriginRefusedError."""
        assert bucket.origin is not None
        key = (bucket.name, bucket.origin, self._changed(bucket.origin.credentials))
        found = self._open.get(key)
        if found is None:
            origin = open_origin(bucket.name, bucket.origin, self._directory)
            found = self._open[key] = GuardedOrigin(bucket.name, origin, self._clock)
            while len(self._open) > _MOST:
                self._open.popitem(last=False)
        return found

    def _changed(self, credentials: str) -> int:
        try:
            return (self._directory / credentials).stat().st_mtime_ns if credentials else 0
        except OSError:
            return 0


class GuardedOrigin:
    """An Origin that fails at once while it is down."""

    def __init__(self, name: str, origin: Origin, clock: Clock) -> None:
        self._name, self._origin, self._clock = name, origin, clock
        self._until = 0.0
        self._why = ""
        self._probing = False

    def __repr__(self) -> str:
        return f"<GuardedOrigin of {self._name}{' down' if self._until else ''}>"

    @contextmanager
    def _watched(self) -> Iterator[None]:
        probing = self._admit()
        try:
            yield
        except OriginDownError as error:
            self._until, self._why = self._clock.monotonic() + _REST, str(error)
            raise
        except OriginError:
            self._until = 0.0  # it answers
            raise
        else:
            self._until = 0.0
        finally:
            if probing:
                self._probing = False

    def _admit(self) -> bool:
        if not self._until:
            return False
        if self._probing or self._clock.monotonic() < self._until:
            raise OriginDownError(self._why)
        self._probing = True
        return True

    async def get(self, key: str, offset: int, length: int, *, etag: str = "") -> Reply:
        with self._watched():
            return await self._origin.get(key, offset, length, etag=etag)

    async def head(self, key: str) -> Facts:
        with self._watched():
            return await self._origin.head(key)

    async def list(self, prefix: str, delimiter: str, after: str, limit: int) -> Listing:
        with self._watched():
            return await self._origin.list(prefix, delimiter, after, limit)

    async def put(self, key: str, body: AsyncIterable[bytes], facts: Facts) -> str:
        with self._watched():
            return await self._origin.put(key, body, facts)

    async def delete(self, keys: Sequence[str]) -> None:
        with self._watched():
            await self._origin.delete(keys)
