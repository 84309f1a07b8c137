"""The pool of transform processes, seen from the steward: rows go out in slices, outcomes come back.

Law: a process that dies costs its rows one retry, alone; the row a process dies on twice is a bad sample.
What a slice's frame holds is only meaningful once its outcome is there. Fair between jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from meshd.kit.tasks import Tasks
from meshd.net.unixmessages import StreamClosedError, connect
from meshd.telemetry import metrics
from meshd.transform.errors import PoolClosedError
from meshd.transform.messages import Failure, RenderReply, RenderRequest, Row, read_progress
from meshd.transform.process import PROGRAMS, program_key
from meshd.transform.queueing import FairQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from meshd.net.unixmessages import MessageStream
    from meshd.transform.messages import FailureKind, RaggedColumn

SLICE_ROWS = 16
IN_FLIGHT = 2  # slices a process has at a time: one it works on, one so that it never waits
_LOST = 20
_RECONNECT = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class RowWork:
    """One row to render. `sources`: for each field, in order of name, the (path, offset, length) of its
    bytes.
    """

    row: int
    position: int
    sources: tuple[tuple[tuple[str, int, int], ...], ...]


@dataclass(frozen=True, slots=True)
class RaggedPart:
    """Ragged data of some rows: `columns` one after the other in `fd`, which is the receiver's to close."""

    rows: tuple[int, ...]
    columns: tuple[RaggedColumn, ...]
    fd: int


@dataclass(frozen=True, slots=True)
class RowChecksums:
    """crc32c of `rows` that are in the frame: `columns`, one a fixed field in order of name."""

    rows: tuple[int, ...]
    columns: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Rendered:
    """The outcome of all rows asked for: those not in `failures` are in the frame, or in `parts` if
    ragged.
    """

    failures: list[Failure] = field(default_factory=list)
    parts: list[RaggedPart] = field(default_factory=list)
    checksums: list[RowChecksums] = field(default_factory=list)

    def close(self) -> None:
        """Close the scratch files. Idempotent."""
        while self.parts:
            os.close(self.parts.pop().fd)


class _Frame:
    """The frame's descriptor, kept open until the last slice that needs it is settled."""

    def __init__(self, fd: int) -> None:
        self.fd = os.dup(fd)
        self._users = 0

    def take(self) -> None:
        self._users += 1

    def drop(self) -> None:
        self._users -= 1
        if not self._users:
            os.close(self.fd)


@dataclass(frozen=True, slots=True)
class _Call:
    """What all slices of one `render` share."""

    job: str
    program_text: str
    program: str
    epoch: int
    frame: _Frame
    frame_bytes: int
    targets: tuple[tuple[int, int] | None, ...]
    assets: tuple[tuple[str, tuple[tuple[str, int, int], ...]], ...] = ()


class _Slice:
    """Rows on their way. `suspect`: one row, tried again because a process died on it; `lost`: how often a
    process died that had this slice but had not begun it.
    """

    def __init__(self, call: _Call, rows: Sequence[RowWork], *, suspect: bool = False) -> None:
        self.call, self.rows, self.suspect = call, rows, suspect
        self.number, self.lost = 0, 0
        self.outcome: asyncio.Future[Rendered] = asyncio.get_running_loop().create_future()
        call.frame.take()

    def settle(self, result: Rendered) -> None:
        self.call.frame.drop()
        if self.outcome.done():
            result.close()
        else:
            self.outcome.set_result(result)

    def fail(self, error: Exception) -> None:
        self.call.frame.drop()
        if not self.outcome.done():
            self.outcome.set_exception(error)

    def request(self, number: int, *, with_text: bool) -> RenderRequest:
        self.number = number
        paths: dict[str, int] = {}

        def placed(pieces: Sequence[tuple[str, int, int]]) -> tuple[tuple[int, int, int], ...]:
            return tuple(
                (paths.setdefault(path, len(paths)), offset, length) for path, offset, length in pieces
            )

        rows = tuple(
            Row(work.row, work.position, tuple(placed(pieces) for pieces in work.sources))
            for work in self.rows
        )
        call = self.call
        assets = tuple((digest, placed(pieces)) for digest, pieces in call.assets)
        text = call.program_text if with_text else ""
        return RenderRequest(
            number, call.program, text, call.epoch, call.frame_bytes, call.targets, tuple(paths), rows, assets
        )


class TransformPool:
    """`sockets`: one Unix socket path a transform process. `start` before use, `aclose` at the end."""

    def __init__(self, sockets: Sequence[Path]) -> None:
        if not sockets:
            raise ValueError("a pool needs at least one transform process")
        self._lanes = [_Lane(path, self) for path in sockets]
        self._queue: FairQueue[_Slice] = FairQueue()
        self._tasks = Tasks("transform-pool")
        self.closed = False
        self.queued_rows = 0

    def __repr__(self) -> str:
        return f"<TransformPool of {len(self._lanes)}, {self.queued_rows} rows asked for>"

    def start(self) -> None:
        """Begin to connect. Needs the running event loop."""
        for number, lane in enumerate(self._lanes):
            self._tasks.spawn(lane.run(), f"lane-{number}")

    async def aclose(self) -> None:
        """Stop; whoever waits gets PoolClosedError."""
        self.closed = True
        await self._tasks.aclose()
        while len(self._queue):
            _, item = await self._queue.get()
            item.fail(PoolClosedError("the node is shutting down; ask again"))

    async def render(
        self,
        job: str,
        program_text: str,
        epoch: int,
        rows: Sequence[RowWork],
        *,
        frame_fd: int,
        frame_bytes: int,
        targets: Sequence[tuple[int, int] | None],
        assets: Sequence[tuple[str, tuple[tuple[str, int, int], ...]]] = (),
    ) -> Rendered:
        """Render rows into the frame at `frame_fd` (which stays the caller's). `targets`, `assets`: see
        RenderRequest.

        Cancelling forgets rows not yet begun; those under way still write into the frame. Raises
        PoolClosedError.
        """
        if self.closed:
            raise PoolClosedError("the node is shutting down; ask again")
        if not rows:
            return Rendered()
        frame = _Frame(frame_fd)
        program = program_key(program_text)
        call = _Call(job, program_text, program, epoch, frame, frame_bytes, tuple(targets), tuple(assets))
        slices = [_Slice(call, rows[start : start + SLICE_ROWS]) for start in range(0, len(rows), SLICE_ROWS)]
        for item in slices:
            self._queue.put(job, item)
        outcomes = [item.outcome for item in slices]
        with self._accounting(len(rows)):
            try:
                return _merge(await asyncio.gather(*outcomes))
            except BaseException:
                _discard(outcomes)
                raise

    @contextlib.contextmanager
    def _accounting(self, rows: int) -> Iterator[None]:
        self._account(rows)
        try:
            yield
        finally:
            self._account(-rows)

    def _account(self, rows: int) -> None:
        self.queued_rows += rows
        metrics.transform_queue.inc(rows)

    async def next_slice(self) -> _Slice:
        """The next slice somebody still waits for."""
        while True:
            _, item = await self._queue.get()
            if not item.outcome.done():
                return item
            item.fail(PoolClosedError("nobody waits"))

    def lost(self, item: _Slice) -> None:
        """A process died that had not begun `item`: another one gets it, a bounded number of times."""
        item.lost += 1
        if item.outcome.done():
            item.fail(PoolClosedError("nobody waits"))
        elif item.lost > _LOST:
            item.settle(_failed(item, "read", "transform processes die before they come to this row"))
        else:
            self._queue.put(item.call.job, item, first=True)

    def crashed(self, item: _Slice, row: int) -> None:
        """A process died on a row of `item`. The row is tried once more, alone; the others as they were."""
        if item.outcome.done():
            item.fail(PoolClosedError("nobody waits"))
            return
        if item.suspect:
            item.settle(_failed(item, "bad", "the transform process died on this sample, twice"))
            return
        others = [work for work in item.rows if work.row != row]
        suspects = [work for work in item.rows if work.row == row]
        again = [_Slice(item.call, rows, suspect=rows is suspects) for rows in (others, suspects) if rows]
        for part in reversed(again):
            self._queue.put(item.call.job, part, first=True)
        gathered = asyncio.gather(*(part.outcome for part in again))
        gathered.add_done_callback(lambda done: _pass_on(item, done))


def _pass_on(item: _Slice, done: asyncio.Future[list[Rendered]]) -> None:
    if done.cancelled() or done.exception() is not None:
        item.fail(PoolClosedError("the node is shutting down; ask again"))
    else:
        item.settle(_merge(done.result()))


def _failed(item: _Slice, kind: FailureKind, reason: str) -> Rendered:
    return Rendered([Failure(work.row, 0, kind, "process", reason) for work in item.rows])


def _merge(outcomes: Iterable[Rendered]) -> Rendered:
    merged = Rendered()
    for outcome in outcomes:
        merged.failures += outcome.failures
        merged.parts += outcome.parts
        merged.checksums += outcome.checksums
    return merged


def _discard(outcomes: Iterable[asyncio.Future[Rendered]]) -> None:
    """Of a call that failed or was cancelled: nobody else will close its scratch files."""
    for outcome in outcomes:
        if not outcome.cancel() and not outcome.cancelled() and outcome.exception() is None:
            outcome.result().close()


class _Lane:
    """One transform process: its connection, and the slices it has."""

    def __init__(self, path: Path, pool: TransformPool) -> None:
        self._path, self._pool = path, pool
        self._sent: deque[_Slice] = deque()
        self._number = 0
        self._progress = os.memfd_create("mesh-progress", os.MFD_CLOEXEC)
        self._finalizer = weakref.finalize(self, os.close, self._progress)
        self._room = asyncio.Semaphore(IN_FLIGHT)

    async def run(self) -> None:
        try:
            # A task group that fails while it is being cancelled swallows the cancelling: hence the flag.
            while not self._pool.closed:
                stream = await self._connect()
                await self._converse(stream)
        finally:
            for item in self._sent:
                item.fail(PoolClosedError("the node is shutting down; ask again"))
            self._finalizer()

    async def _connect(self) -> MessageStream:
        attempt = 0
        while True:
            try:
                return await connect(self._path)
            except OSError:
                await asyncio.sleep(_RECONNECT[min(attempt, len(_RECONNECT) - 1)])
                attempt += 1

    async def _converse(self, stream: MessageStream) -> None:
        """Send and receive until the process is gone; then blame the slice it was working on."""
        self._room = asyncio.Semaphore(IN_FLIGHT)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._send_all(stream))
                group.create_task(self._receive_all(stream))
        except* StreamClosedError:
            pass
        finally:
            stream.close()
        self._share_out()

    def _share_out(self) -> None:
        """Give back what the dead process had; the row it was working on is the suspect."""
        number, row = read_progress(self._progress)
        left, self._sent = list(self._sent), deque()
        for item in reversed(left):
            if item.number == number:
                self._pool.crashed(item, row)
            else:
                self._pool.lost(item)

    async def _send_all(self, stream: MessageStream) -> None:
        texts: set[str] = set()
        while True:
            await self._room.acquire()
            item = await self._pool.next_slice()
            program = item.call.program
            if len(texts) > PROGRAMS // 2:
                texts.clear()
            self._number += 1
            self._sent.append(item)
            request = item.request(self._number, with_text=program not in texts)
            texts.add(program)
            try:
                await stream.send(request, (item.call.frame.fd, self._progress))
            except StreamClosedError:
                return  # the receiving side reads what was still answered, then notices too

    async def _receive_all(self, stream: MessageStream) -> None:
        while True:
            body, fds = await stream.receive()
            reply = msgspec.convert(body, RenderReply)
            item = self._sent.popleft()
            self._room.release()
            metrics.transform_samples.labels("row").inc(len(item.rows))
            metrics.transform_seconds.observe(reply.seconds)
            for failure in reply.failures:
                metrics.transform_failures.labels(failure.op).inc()
            parts = [RaggedPart(reply.rendered, reply.ragged, fds[0])] if fds else []
            sums = [RowChecksums(reply.rendered, reply.sums)] if reply.rendered else []
            item.settle(Rendered(list(reply.failures), parts, sums))
