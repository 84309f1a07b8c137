"""Index documents: the index of a file, kept in the catalog by the file's content and parsed from there.

Law: a document that cannot be parsed was written by another version and is made again. One that was just
made and cannot be parsed comes from a process that is not trusted: the file is refused by name.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Generic, TypeVar

from meshd.core.api_errors import BatchError
from meshd.util import failpoints
from meshd.util.async_tasks import SingleFlight
from meshwire.frame.columns import ColumnError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from meshd.core.document_store import DocumentStore
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record

T = TypeVar("T")
_SIZE = struct.Struct("<Q")


class IndexDocuments(Generic[T]):
    """Indexes of files of one format, for a worker. `what`: the format, as an error calls it; `parse` may
    raise ColumnError; so may `mark`, which returns what is kept with a document and its index."""

    def __init__(
        self,
        catalog: DocumentStore,
        what: str,
        parse: Callable[[bytes], T],
        mark: Callable[[bytes, T], str] | None = None,
    ) -> None:
        self._catalog, self._what, self._parse, self._mark = catalog, what, parse, mark
        self._reading: SingleFlight[str, T] = SingleFlight()

    def __repr__(self) -> str:
        return f"<IndexDocuments of {self._what}, {len(self._reading)} being read>"

    async def read(self, name: str, url: str, make: Callable[[], Awaitable[bytes]]) -> T:
        """Return the index with this name of the file at `url`; without a document of it, `make` one, once
        for all who ask. Raises BatchError BadSample and what `make` raises."""
        found = await self.find(name)
        return await self.make_again(name, url, make) if found is None else found

    async def find(self, name: str) -> T | None:
        """Return the index with this name if there is a document of it."""
        try:
            document = self._catalog.read_intact(name)
            return None if document is None else await asyncio.to_thread(self._parse, document)
        except ColumnError:  # written by another version
            return None

    async def make_again(self, name: str, url: str, make: Callable[[], Awaitable[bytes]]) -> T:
        """Make the index again, once for all who ask. Raises as `read`."""
        index, _ = await self._reading.run(name, lambda: self._make_index(name, url, make))
        return index

    async def _make_index(self, name: str, url: str, make: Callable[[], Awaitable[bytes]]) -> T:
        return await self.add(name, url, await make())

    async def add(self, name: str, url: str, document: bytes) -> T:
        """Keep a document, and return its index. Raises BatchError BadSample."""
        try:
            index = await asyncio.to_thread(self._parse, document)
            mark = "" if self._mark is None else await asyncio.to_thread(self._mark, document, index)
        except ColumnError as error:
            raise BatchError(
                "BadSample", f"{url} cannot be read as {self._what}: {error}", detail={"url": url}
            ) from error
        failpoints.hit("indexes.made")
        await self._catalog.write_document(name, document, mark=mark)
        return index


def read_copy_document(
    store: ObjectStore, copy: Record, footer_bytes: int, index_range: Callable[[bytes, int], tuple[int, int]]
) -> bytes:
    """Return the document of a converted copy: its size and the index at its end; empty if it has none
    (blocking). `index_range`: (offset, length) of the index by the last bytes of a copy and its size; may
    raise ColumnError."""
    foot = store.read_range(copy, max(0, copy.size - footer_bytes), min(footer_bytes, copy.size))
    try:
        place = index_range(foot, copy.size)
    except ColumnError:
        return b""
    return _SIZE.pack(copy.size) + store.read_range(copy, *place)


def split_copy_document(document: bytes) -> tuple[int, bytes]:
    """Return the size of the copy and its index. Raises ColumnError."""
    if len(document) < _SIZE.size:
        raise ColumnError("its converted copy has no footer")
    return _SIZE.unpack_from(document)[0], document[_SIZE.size :]
