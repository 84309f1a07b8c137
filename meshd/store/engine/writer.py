"""Object writer: small objects wait in memory for the group commit, large ones stream to their own file.

Law: at most one chunk is being written while the next one fills, so a writer holds two chunks in
memory.
Invariant: nothing is visible before the commit succeeds; abort, error, cancellation and garbage
collection leave nothing behind.
"""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from awscrt import checksums

from meshd.store.disks.layout import has_free_space, reserves_kept
from meshd.store.engine.data_files import LargeObjectFile
from meshd.store.engine.group_commit import store_error_from
from meshd.store.engine.mutations import Mutation, PutObject, PutWithManifest
from meshd.store.engine.upload_mutations import PutPart
from meshd.store.engine.write_batch import Payload, timed_sync
from meshd.store.errors import (
    CorruptExtentError,
    DiskFailedError,
    DiskFullError,
    SizeMismatchError,
    StaleEpochError,
    StoreClosedError,
)
from meshd.store.records import INTERNAL_WRITE
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence
    from concurrent.futures import ThreadPoolExecutor

    from meshd.config import StoreSettings
    from meshd.store.disks.layout import Disks
    from meshd.store.engine.group_commit import Committer
    from meshd.store.engine.write_batch import WriteBatch
    from meshd.store.records import Meta, Record, Upload, WriteContext
    from meshd.store.writer_api import Buffer
    from meshd.util.clock import Clock
    from meshwire.http_values.conditional_requests import Conditions
    from meshwire.s3.bucket_settings import Versioning

_PIECE, _SMALLEST_PIECE = 1 << 20, 128 << 10
_GATHERED = 32 << 20  # limit of the chunks of all writers of a process together
_IOV_MAX = 900


class _RefillFileIds(Mutation):
    """Does nothing: every commit refills the free file numbers."""

    def update_index(self, batch: WriteBatch, txn: Any) -> None:
        return None


class WriterResources:
    """Shared by all writers of a process: threads, file numbers, and the number of active writers."""

    def __init__(
        self,
        settings: StoreSettings,
        disks: Disks,
        committer: Committer,
        pool: ThreadPoolExecutor,
        clock: Clock,
        writer: str,
    ) -> None:
        self._clock = clock
        self.disks, self.committer, self.pool, self.writer = disks, committer, pool, writer
        self.small = settings.small_object_bytes
        self._durable = settings.durability == "commit"
        self.active = 0

    def chunk_bytes(self) -> int:
        """Returns how many bytes a writer collects before writing them to disk; fewer if many writers are
        active."""
        return max(_SMALLEST_PIECE, min(_PIECE, _GATHERED // (2 * max(1, self.active))))

    async def run_blocking(self, call: Callable[[], None]) -> None:
        """Runs a blocking call in the thread pool. Raises StoreError instead of OSError."""
        try:
            await asyncio.get_running_loop().run_in_executor(self.pool, call)
        except OSError as error:
            raise store_error_from(error) from error

    def finish_draft(self, large_file: LargeObjectFile) -> None:
        """Completes a draft and makes its data durable (blocking). Raises OSError."""
        large_file.write_trailer()
        if self._durable:
            timed_sync(large_file, self._clock)

    async def next_file_id(self) -> int:
        while (number := self.committer.next_file_id()) is None:
            await self.committer.submit(_RefillFileIds())
        return number

    def create_draft(self, order: Sequence[int], file: int, size: int | None, bucket: str) -> LargeObjectFile:
        """Creates a draft with reserved space on the first disk of `order` that has enough (blocking).

        Raises OSError, DiskFullError, DiskFailedError.
        """
        there = [(disk, root) for disk in order if (root := self.disks.roots.get(disk)) is not None]
        if not there:
            raise DiskFailedError("the disk has just failed; try again, another disk may take the object")
        for disk, root in there:
            if has_free_space(str(root), size or 0, reserves_kept(bucket)):
                metrics.store_off_home_writes.inc(disk != order[0])
                return self._reserve_file(disk, file, size or 0)
        raise DiskFullError(f"{size or 'more'} bytes do not fit on a disk; delete objects or add a disk")

    def _reserve_file(self, disk: int, file: int, size: int) -> LargeObjectFile:
        large_file = LargeObjectFile(self.disks, disk, file, self.writer)
        try:
            large_file.reserve(size)
        except OSError:
            large_file.discard()
            raise
        return large_file


class DiskObjectWriter:
    """Writes an object or, with `upload` and `number`, a part. See ObjectWriter."""

    def __init__(
        self,
        resources: WriterResources,
        bucket: str,
        key: str,
        size: int | None,
        upload: Upload | None = None,
        number: int = 0,
    ) -> None:
        self._resources, self._bucket, self._key, self._declared = resources, bucket, key, size
        self._upload, self._number = upload, number
        self._chunks: list[bytes | memoryview] = []
        self._gathered = self._total = self._crc = 0
        self._large_file: LargeObjectFile | None = None
        self._pending_write: asyncio.Task[None] | None = None
        self._payload: Payload | None = None
        self._state = "open"
        resources.active += 1

    def __repr__(self) -> str:
        where = f"{self._bucket}/{self._key}"
        return f"<DiskObjectWriter {where} {self._state} bytes={self._total} file={self._large_file}>"

    async def write(self, data: Buffer) -> None:
        self._append(data if type(data) is bytes else bytes(data))
        if self._large and (self._gathered >= self._resources.chunk_bytes() or len(self._chunks) >= _IOV_MAX):
            await self._flush()

    async def write_borrowed(self, data: memoryview) -> None:
        if max(self._total + len(data), self._declared or 0) <= self._resources.small:
            await self.write(data)
            return
        self._append(data)
        await self._flush()

    async def share_file(self) -> tuple[int, int] | None:
        """Returns a descriptor of the growing file of a large object whose size is declared, and the offset
        of its data; None for a small object. The caller closes the descriptor. Readers may read as many bytes
        as `flushed_bytes` has returned, even if the object is aborted. Raises StoreError."""
        if not self._large:
            return None
        if self._large_file is None:
            await self._open_file()
        assert self._large_file is not None
        self._large_file.eager = False
        return self._large_file.duplicate_fd()

    async def flushed_bytes(self) -> int:
        """Writes pending chunks and returns the number of bytes in the file. Raises StoreError."""
        await self._flush()
        await self._wait_pending_write()
        return 0 if self._large_file is None else self._large_file.size

    def _append(self, chunk: bytes | memoryview) -> None:
        self._require_open()
        self._total += len(chunk)
        if self._declared is not None and self._total > self._declared:
            raise SizeMismatchError(f"more than the declared {self._declared} bytes were written")
        self._chunks.append(chunk)
        self._gathered += len(chunk)

    @property
    def _large(self) -> bool:
        return max(self._total, self._declared or 0) > self._resources.small

    async def commit(
        self,
        meta: Meta,
        *,
        conditions: Conditions | None = None,
        versioning: Versioning = "",
        context: WriteContext = INTERNAL_WRITE,
    ) -> Record:
        self._require_open()
        if self._declared is not None and self._total != self._declared:
            raise SizeMismatchError(f"{self._total} of the declared {self._declared} bytes were written")
        try:
            mutation = self._mutation(meta, await self._get_payload(), conditions, versioning)
            future = self._resources.committer.submit(mutation, context)
        except BaseException:
            await self.abort()
            raise
        self._finish("committing")
        future.add_done_callback(self._on_committed)
        record: Record = await asyncio.shield(future)
        return record

    def _on_committed(self, future: asyncio.Future[Record]) -> None:
        """Handles the committer's result even if the caller no longer waits: removes the file of a refused
        write. After a StaleEpochError the file is kept, because the write may be repeated under the newer
        map."""
        error = None if future.cancelled() else future.exception()
        if isinstance(error, StaleEpochError):
            self._state = "open"
            self._resources.active += 1
            return
        self._payload = None
        if not future.cancelled() and error is None:
            self._state = "committed"
            return
        self._state = "failed"
        if self._large_file is not None:
            self._large_file.discard()

    async def read_back(self) -> AsyncGenerator[bytes, None]:
        self._require_open()
        payload = await self._get_payload()
        if payload.large_file is None:
            for chunk in payload.chunks:
                yield bytes(chunk)
            return
        fd, start = payload.large_file.duplicate_fd()
        crc = 0
        try:
            for at in range(0, payload.size, _PIECE):
                length = min(_PIECE, payload.size - at)
                data = await asyncio.to_thread(os.pread, fd, length, start + at)
                crc = checksums.crc32c(data, crc)
                yield data
        except OSError as error:
            raise store_error_from(error) from error
        finally:
            os.close(fd)
        if crc != payload.crc:
            raise CorruptExtentError("the bytes read back differ from those written; write the object again")

    async def abort(self) -> None:
        if self._state != "open":
            return
        self._finish("aborted")
        self._payload = None
        pending_write, self._pending_write = self._pending_write, None
        try:
            if pending_write is not None:
                with suppress(Exception):
                    await asyncio.shield(pending_write)
        except asyncio.CancelledError:  # cancelled again while waiting: clean up in the background
            _discard_after(pending_write, self._large_file)
            raise
        if self._large_file is not None:
            await self._resources.run_blocking(self._large_file.discard)

    def __del__(self) -> None:
        if getattr(self, "_state", "") == "open":
            self._finish("dropped")
            _discard_after(self._pending_write, self._large_file)

    def _require_open(self) -> None:
        if self._state != "open":
            raise StoreClosedError(
                f"the writer of {self._bucket}/{self._key} is {self._state}; open a new one"
            )

    def _finish(self, state: str) -> None:
        self._resources.active -= 1
        self._state = state
        self._chunks = []

    def _mutation(
        self, meta: Meta, payload: Payload, conditions: Conditions | None, versioning: Versioning
    ) -> PutObject | PutPart:
        if self._upload is not None:
            return PutPart(self._upload, self._number, meta, payload)
        kind = PutWithManifest if meta.parts else PutObject
        return kind(self._bucket, self._key, meta, payload, conditions, versioning)

    async def _get_payload(self) -> Payload:
        """Returns the payload; prepares it once."""
        if self._payload is None:
            self._payload = await self._prepare_payload()
        return self._payload

    async def _prepare_payload(self) -> Payload:
        """Returns the bytes ready for the commit: in memory, or complete and durable in their file."""
        if self._large_file is None and self._total <= self._resources.small:
            crc = 0
            for chunk in self._chunks:
                crc = checksums.crc32c(chunk, crc)
            return Payload(self._total, crc, self._chunks)
        await self._flush()
        await self._wait_pending_write()
        large_file, resources = self._large_file, self._resources
        assert large_file is not None
        await resources.run_blocking(lambda: resources.finish_draft(large_file))
        return Payload(large_file.size, large_file.crc, large_file=large_file)

    async def _flush(self) -> None:
        """Starts writing the collected chunks once the previous write has finished."""
        await self._wait_pending_write()
        if self._large_file is None:
            await self._open_file()
        large_file, chunks = self._large_file, self._chunks
        self._chunks, self._gathered = [], 0
        if large_file is not None and chunks:
            self._pending_write = asyncio.create_task(
                self._resources.run_blocking(lambda: large_file.append(chunks))
            )

    async def _wait_pending_write(self) -> None:
        pending_write, self._pending_write = self._pending_write, None
        if pending_write is not None:
            try:
                await asyncio.shield(pending_write)
            except asyncio.CancelledError:
                self._pending_write = pending_write
                raise

    async def _open_file(self) -> None:
        resources = self._resources
        name = self._key if self._upload is None else f"{self._key}\0{self._number}"
        order, file = resources.disks.placement_order(self._bucket, name), await resources.next_file_id()
        made: list[LargeObjectFile] = []
        abandoned = threading.Event()

        def create() -> None:
            made.append(resources.create_draft(order, file, self._declared, self._bucket))
            if abandoned.is_set():  # the event loop may have ended
                _discard(made)

        opening = asyncio.create_task(resources.run_blocking(create))
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            self._pending_write = opening
            abandoned.set()
            opening.add_done_callback(lambda _: _discard(made))
            raise
        self._large_file = made[0]


def _discard_after(pending_write: asyncio.Task[None] | None, large_file: LargeObjectFile | None) -> None:
    """Discards a draft once no thread writes to it: a descriptor closed earlier could already belong to
    another file."""
    if large_file is None:
        return
    if pending_write is None or pending_write.done():
        large_file.discard()
    else:
        pending_write.add_done_callback(lambda _: large_file.discard())


def _discard(files: list[LargeObjectFile]) -> None:
    """Discards these files, each once, even if a thread and the event loop do so at the same time."""
    with suppress(IndexError):
        while True:
            files.pop().discard()
