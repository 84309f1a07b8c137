"""Objects of the whole mesh for code that runs in a thread: each call waits for the loop to ask other nodes.

Law: never called in the loop's own thread, which would wait for itself.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from meshd.assembly.elsewhere import Part

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from meshd.service.remote.objects import RemoteObjects
    from meshd.store.records import Page, Record


class Names(Protocol):
    """What there is under names: a store, or the mesh."""

    def get(self, bucket: str, key: str) -> Record | None: ...

    def list(
        self, bucket: str, *, prefix: str = "", delimiter: str = "", after: str = "", limit: int = 1000
    ) -> Page: ...


class Waiting:
    """Made in the loop. Raises BatchError Busy where nodes do not answer."""

    def __init__(self, objects: RemoteObjects) -> None:
        self._objects, self._loop = objects, asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"<Waiting for {self._objects!r}>"

    def get(self, bucket: str, key: str) -> Record | None:
        """The current object."""
        found: Record | None = self._wait(self._objects.find(bucket, key))
        return found

    def list(
        self, bucket: str, *, prefix: str = "", delimiter: str = "", after: str = "", limit: int = 1000
    ) -> Page:
        """As a store's; without delimiters."""
        assert not delimiter
        page: Page = self._wait(self._objects.page(bucket, prefix, after, limit))
        return page

    def read(self, bucket: str, key: str, record: Record, offset: int, length: int) -> bytes:
        """Bytes of an object, or of an archive's copy."""
        return self.read_part(Part(bucket, key, record.etag, record.size, offset, length))

    def read_part(self, part: Part) -> bytes:
        """The same of any bytes that are named by their object's ETag. Raises BatchError."""
        found: list[bytes] = self._wait(self._objects.read_many([part]))
        return found[0]

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
