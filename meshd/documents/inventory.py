"""Document inventory: which shared documents exist, their size, and when each was last used.

Last-used times are a sketch in a file that all processes of a node write: names share slots by hash, so
an entry may look more recently used than it is, never less. The inventory changes nothing. It names
every node that did not answer, because that node's uses are unknown.
"""

from __future__ import annotations

import asyncio
import os
import struct
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from meshd.core.document_store import RESERVED_BUCKET, SHARED_PREFIXES
from meshd.documents.gc_policy import DocumentUsage, merge_usage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from meshd.store.api import ObjectStore
    from meshd.util.clock import Clock


MINUTE_MS: Final = 60_000
_SLOTS: Final = 1 << 20
_SLOT = struct.Struct("=I")


class LastUses:
    """The recorded uses at one time: they are read (4 MiB) when the first one is asked for."""

    def __init__(self, read: Callable[[], bytes]) -> None:
        self._read = read
        self._minutes: npt.NDArray[np.uint32] | None = None

    def __repr__(self) -> str:
        return f"<LastUses, {'unread' if self._minutes is None else np.count_nonzero(self._minutes)}>"

    def last_used_minute(self, key: str) -> int:
        """Returns the minute (since 1970) of the last use; 0 if none was recorded (blocking at first)."""
        if self._minutes is None:
            self._minutes = np.frombuffer(self._read(), np.uint32)
        return int(self._minutes[_slot_of(key)])


class UsageFile:
    """The sketch of uses in a file. It is read and written, not mapped: with a mapping a full disk would kill
    the process."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._clock = clock
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._fd, _SLOTS * _SLOT.size)

    def __repr__(self) -> str:
        return f"<UsageFile fd {self._fd}>"

    def note(self, key: str) -> None:
        """Records a use."""
        minute = self._clock.now_ms() // MINUTE_MS
        with suppress(OSError):
            os.pwrite(self._fd, _SLOT.pack(minute), _slot_of(key) * _SLOT.size)

    def last_uses(self) -> LastUses:
        """Returns everything recorded until the result is first asked."""
        return LastUses(lambda: os.pread(self._fd, _SLOTS * _SLOT.size, 0))

    def close(self) -> None:
        os.close(self._fd)


def _slot_of(key: str) -> int:
    return zlib.crc32(key.encode()) % _SLOTS


_PAGE: Final = 1000
PeerInventories = tuple[list[dict[str, DocumentUsage]], list[str]]


class MeshInventory(msgspec.Struct, frozen=True):
    """`held` by name; `silent`: nodes that could not be asked."""

    held: dict[str, DocumentUsage]
    silent: tuple[str, ...]


async def no_peers(prefix: str) -> PeerInventories:
    """Returns the inventory of the other nodes of a single-node daemon: nothing."""
    return [], []


class DocumentInventory:
    """Lists the documents of this node and of all nodes. One per process. `others` returns each other node's
    documents under a prefix, and the nodes that could not be asked."""

    def __init__(
        self,
        store: ObjectStore,
        uses: UsageFile,
        others: Callable[[str], Awaitable[PeerInventories]] = no_peers,
    ) -> None:
        self._store, self._uses, self._others = store, uses, others

    def list_local(self, prefix: str) -> dict[str, DocumentUsage]:
        """Returns this node's documents (blocking)."""
        found: dict[str, DocumentUsage] = {}
        after, more = "", True
        while more:
            some, after = self.local_page(prefix, after, _PAGE)
            found |= some
            more = bool(after)
        return found

    def local_page(self, prefix: str, after: str, limit: int) -> tuple[dict[str, DocumentUsage], str]:
        """Returns a page of them, and the start of the next page, "" at the end (blocking)."""
        uses = self._uses.last_uses()
        page = self._store.list(RESERVED_BUCKET, prefix=prefix, after=after, limit=limit)
        rows = {
            key: DocumentUsage(record.size, record.modified // MINUTE_MS, uses.last_used_minute(key))
            for key, record in page.entries
        }
        return rows, page.next_after if page.truncated else ""

    def local_sizes(self) -> dict[str, tuple[int, int]]:
        """Returns the number and bytes of this node's documents by kind (blocking)."""
        found = {}
        for prefix in SHARED_PREFIXES:
            held = self.list_local(prefix).values()
            found[prefix.rstrip("/")] = len(held), sum(each.size for each in held)
        return found

    async def collect(self, prefixes: Sequence[str]) -> MeshInventory:
        """Returns the documents of all nodes, merged."""
        tables, silent = list[dict[str, DocumentUsage]](), set[str]()
        for prefix in prefixes:
            tables.append(await asyncio.to_thread(self.list_local, prefix))
            remote, unreachable = await self._others(prefix)
            tables += remote
            silent |= set(unreachable)
        return MeshInventory(merge_usage(tables), tuple(sorted(silent)))
