"""How many fetches are under way in a process: of all buckets, and of one.

Law: a bucket whose origin is slow or silent waits for itself; others always find room. First come, first
served within a bucket.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class Slots:
    """`total` at once, `each` of one bucket."""

    def __init__(self, total: int, each: int) -> None:
        self._total, self._each = asyncio.Semaphore(total), each
        self._shares: dict[str, tuple[asyncio.Semaphore, int]] = {}

    def __repr__(self) -> str:
        return f"<Slots of {len(self._shares)} buckets>"

    @asynccontextmanager
    async def taken(self, bucket: str) -> AsyncGenerator[None, None]:
        """For as long as a fetch takes."""
        share, users = self._shares.get(bucket, (asyncio.Semaphore(self._each), 0))
        self._shares[bucket] = (share, users + 1)
        try:
            async with share, self._total:
                yield
        finally:
            share, users = self._shares[bucket]
            if users == 1:
                del self._shares[bucket]
            else:
                self._shares[bucket] = (share, users - 1)
