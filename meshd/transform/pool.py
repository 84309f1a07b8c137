"""The pool of transform processes, seen from the steward: rows go out in slices, outcomes come back.

Law: a process that dies costs its rows one retry, alone; the row a process dies on twice is a bad sample.
What a slice's frame holds is only meaningful once its outcome is there. Processes' time is shared evenly
between accounts, and between the jobs of one. A job that kills processes gets half of them, no more, until it
has behaved for a while, as does one that drags while others are about; nothing is lined up behind work that
takes long.
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
from meshd.transform.counting import count_reply
from meshd.transform.errors import PoolClosedError
from meshd.transform.messages import Failure, RenderReply, RenderRequest, Row, read_progress
from meshd.transform.process import PROGRAMS, program_key
from meshd.transform.queueing import FairQueue

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from meshd.net.unixmessages import MessageStream
    from meshd.transform.messages import FailureKind, RaggedColumn
    from meshd.transform.queueing import Turn
    from meshd.transform.reading import Piece

Placed = tuple[tuple[tuple[int, ...], ...], ...]
SLICE_ROWS = 32
IN_FLIGHT = 2  # slices a process has at a time: one it works on, one so that it never waits
QUICK = 0.25  # seconds; a slice expected to take longer has its process alone
DRAGGING = 5.0  # seconds; a job with a row that took longer leaves processes to other accounts
DISTRUST = 60.0  # seconds from a death until the job that caused it may use all processes again
_LOST = 2 * SLICE_ROWS  # deaths of processes that come to a slice behind one whose every row kills, twice
_RECONNECT = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class RowWork:
    """One row to render. `sources`: for each field, in order of name, the pieces of its bytes; `partner`:
    those of the row it is mixed with.
    """

    row: int
    position: int
    sources: tuple[tuple[Piece, ...], ...]
    partner: tuple[tuple[Piece, ...], ...] = ()


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
    ragged. `seconds` of the processes, and of these `reading` source bytes.
    """

    failures: list[Failure] = field(default_factory=list)
    parts: list[RaggedPart] = field(default_factory=list)
    checksums: list[RowChecksums] = field(default_factory=list)
    seconds: float = 0.0
    reading: float = 0.0

    def close(self) -> None:
        """Close the scratch files. Idempotent."""
        while self.parts:
            os.close(self.parts.pop().fd)


class _Call:
    """What all slices of one `render` share: the order, and the outcome as it comes together.

    The frame's descriptor is kept open until the last slice is through.
    """

    def __init__(self, order: _Order, frame_fd: int, rows: int) -> None:
        self.order = order
        self.frame_fd = os.dup(frame_fd)
        self.outcome: asyncio.Future[Rendered] = asyncio.get_running_loop().create_future()
        self._rendered = Rendered()
        self._left, self._slices = rows, 0

    @property
    def wanted(self) -> bool:
        """Whether somebody still waits for the outcome."""
        return not self.outcome.done()

    def enter(self) -> None:
        self._slices += 1

    def leave(self) -> None:
        self._slices -= 1
        if not self._slices:
            os.close(self.frame_fd)

    def take(self, part: Rendered, rows: int) -> None:
        """The outcome of `rows` more rows."""
        if not self.wanted:
            part.close()
            return
        self._rendered.failures += part.failures
        self._rendered.parts += part.parts
        self._rendered.checksums += part.checksums
        self._rendered.seconds += part.seconds
        self._rendered.reading += part.reading
        self._left -= rows
        if not self._left:
            self.outcome.set_result(self._rendered)

    def give_up(self, error: Exception) -> None:
        if self.wanted:
            self.discard()
            self.outcome.set_exception(error)

    def discard(self) -> None:
        """Of a call that failed or was cancelled: nobody else will close its scratch files."""
        self._rendered.close()


@dataclass(frozen=True, slots=True)
class _Order:
    """What is to be done with the rows of a call, and for whom."""

    account: str
    job: str
    program_text: str
    program: str
    epoch: int
    frame_bytes: int
    targets: tuple[tuple[int, int] | None, ...]
    assets: tuple[tuple[str, tuple[Piece, ...]], ...] = ()


class _Slice:
    """Rows on their way. `suspect`: one row, tried again because a process died on it; `lost`: how often a
    process died that had this slice but had not begun it; `turn`: what the queue is to be told of.
    """

    def __init__(self, call: _Call, rows: Sequence[RowWork], *, suspect: bool = False) -> None:
        self.call, self.rows, self.suspect = call, rows, suspect
        self.number, self.lost = 0, 0
        self.turn: Turn[_Slice] | None = None
        call.enter()

    def request(self, number: int, *, with_text: bool) -> RenderRequest:
        self.number = number
        paths: dict[str, int] = {}

        def placed(pieces: Sequence[Piece]) -> tuple[tuple[int, ...], ...]:
            return tuple((paths.setdefault(piece[0], len(paths)), *piece[1:]) for piece in pieces)

        def all_placed(sources: Sequence[Sequence[Piece]]) -> Placed:
            return tuple(placed(pieces) for pieces in sources)

        rows = tuple(
            Row(work.row, work.position, all_placed(work.sources), all_placed(work.partner))
            for work in self.rows
        )
        order = self.call.order
        assets = tuple((digest, placed(pieces)) for digest, pieces in order.assets)
        return RenderRequest(
            number,
            order.program,
            order.program_text if with_text else "",
            order.epoch,
            order.frame_bytes,
            order.targets,
            tuple(paths),
            rows,
            assets,
            self.suspect,
        )


class TransformPool:
    """`sockets`: one Unix socket path a transform process. `start` before use, `aclose` at the end."""

    def __init__(self, sockets: Sequence[Path]) -> None:
        if not sockets:
            raise ValueError("a pool needs at least one transform process")
        brave = (len(sockets) + 1) // 2
        self._lanes = [_Lane(path, self, brave=number < brave) for number, path in enumerate(sockets)]
        self._distrusted: dict[str, asyncio.TimerHandle] = {}
        self._asked: dict[str, float] = {}
        """When each account asked for something last."""
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
        for timer in self._distrusted.values():
            timer.cancel()
        await self._tasks.aclose()
        while len(self._queue):
            self.abandon((await self._queue.get()).item)

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
        assets: Sequence[tuple[str, tuple[Piece, ...]]] = (),
        account: str = "",
    ) -> Rendered:
        """Render rows into the frame at `frame_fd` (which stays the caller's). `targets`, `assets`: see
        RenderRequest; `account`: with whose share of the processes' time.

        Cancelling forgets rows not yet begun; those under way still write into the frame. Raises
        PoolClosedError.
        """
        if self.closed:
            raise _closed()
        if not rows:
            return Rendered()
        self._asked[account] = asyncio.get_running_loop().time()
        program = program_key(program_text)
        order = _Order(account, job, program_text, program, epoch, frame_bytes, tuple(targets), tuple(assets))
        call = _Call(order, frame_fd, len(rows))
        for start in range(0, len(rows), SLICE_ROWS):
            self._put(_Slice(call, rows[start : start + SLICE_ROWS]))
        with self._accounting(len(rows)):
            try:
                return await call.outcome
            except BaseException:
                call.discard()
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

    def _put(self, item: _Slice, *, first: bool = False) -> None:
        order = item.call.order
        self._queue.put(order.account, order.job, item, first=first)

    async def next_slice(self, *, brave: bool) -> _Slice:
        """The next slice somebody still waits for; `brave`: also of jobs that killed processes."""
        while True:
            turn = await self._queue.get(shy=brave)
            if turn.item.call.wanted:
                turn.item.turn = turn
                return turn.item
            self._queue.done(turn)
            turn.item.call.leave()

    def _end_turn(self, item: _Slice, seconds: float | None) -> None:
        if item.turn is not None:
            self._queue.done(item.turn, seconds)
            item.turn = None

    def answered(self, item: _Slice, reply: RenderReply, fds: Sequence[int]) -> None:
        """A process is through with `item`, or with a part of it: what is left goes on when its job's turn
        comes."""
        self._end_turn(item, reply.seconds)
        if reply.seconds > DRAGGING and self._has_neighbours():
            self._distrust(item.call.order.job)
        count_reply(reply)
        told = {*reply.rendered, *(failure.row for failure in reply.failures)}
        left = [work for work in item.rows if work.row not in told]
        if len(left) == len(item.rows):
            left, reply = [], msgspec.structs.replace(reply, failures=_failures(item, "op", _SILENT))
        parts = [RaggedPart(reply.rendered, reply.ragged, fds[0])] if fds else []
        sums = [RowChecksums(reply.rendered, reply.sums)] if reply.rendered else []
        part = Rendered(list(reply.failures), parts, sums, reply.seconds, reply.reading)
        item.call.take(part, len(item.rows) - len(left))
        if left and item.call.wanted:
            self._put(_Slice(item.call, left), first=True)
        item.call.leave()

    def abandon(self, item: _Slice) -> None:
        """The node is going down with `item` undone."""
        self._end_turn(item, None)
        item.call.give_up(_closed())
        item.call.leave()

    def lost(self, item: _Slice) -> None:
        """A process died that had not begun `item`: another one gets it, a bounded number of times."""
        self._end_turn(item, None)
        item.lost += 1
        if not item.call.wanted:
            item.call.leave()
        elif item.lost > _LOST:
            self._fail(item, "read", "transform processes die before they come to this row")
        else:
            self._put(item, first=True)

    def crashed(self, item: _Slice, row: int, seconds: float) -> None:
        """A process died on a row of `item`, after so long. The row is tried once more, alone; the others as
        they were."""
        self._end_turn(item, seconds)
        self._distrust(item.call.order.job)
        if not item.call.wanted:
            item.call.leave()
            return
        if item.suspect:
            self._fail(
                item, "bad", f"the transform process died on this sample, twice (after {seconds:.3g} s)"
            )
            return
        others = [work for work in item.rows if work.row != row]
        suspects = [work for work in item.rows if work.row == row]
        if others:
            self._put(_Slice(item.call, others), first=True)
        if suspects:
            self._put(_Slice(item.call, suspects, suspect=True), first=True)
        item.call.leave()

    def _has_neighbours(self) -> bool:
        """Whether several accounts have been at work lately."""
        since = asyncio.get_running_loop().time() - DISTRUST
        self._asked = {account: at for account, at in self._asked.items() if at > since}
        return len(self._asked) > 1

    def _distrust(self, job: str) -> None:
        before = self._distrusted.pop(job, None)
        if before is not None:
            before.cancel()
        self._queue.mark(job, shy=True)
        self._distrusted[job] = asyncio.get_running_loop().call_later(DISTRUST, self._trust, job)

    def _trust(self, job: str) -> None:
        del self._distrusted[job]
        self._queue.mark(job, shy=False)

    def _fail(self, item: _Slice, kind: FailureKind, reason: str) -> None:
        failures = _failures(item, kind, reason)
        for failure in failures:
            metrics.transform_failures.labels(failure.op).inc()
        item.call.take(Rendered(list(failures)), len(item.rows))
        item.call.leave()


_SILENT = "the transform process answered nothing"


def _failures(item: _Slice, kind: FailureKind, reason: str) -> tuple[Failure, ...]:
    return tuple(Failure(work.row, 0, kind, "process", reason) for work in item.rows)


def _closed() -> PoolClosedError:
    return PoolClosedError("the node is shutting down; ask again")


class _Lane:
    """One transform process: its connection, and the slices it has. `brave`: it takes those of jobs that kill
    processes.
    """

    def __init__(self, path: Path, pool: TransformPool, *, brave: bool) -> None:
        self._path, self._pool, self._brave = path, pool, brave
        self._sent: deque[_Slice] = deque()
        self._number = 0
        self._progress = os.memfd_create("mesh-progress", os.MFD_CLOEXEC)
        self._finalizer = weakref.finalize(self, os.close, self._progress)
        self._room = asyncio.Event()
        self._since = 0.0
        """When the process could begin the first of what it has."""

    async def run(self) -> None:
        try:
            # A task group that fails while it is being cancelled swallows the cancelling: hence the flag.
            while not self._pool.closed:
                stream = await self._connect()
                await self._converse(stream)
        finally:
            for item in self._sent:
                self._pool.abandon(item)
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
        self._make_room()
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
                self._pool.crashed(item, row, self._now() - self._since)
            else:
                self._pool.lost(item)

    async def _send_all(self, stream: MessageStream) -> None:
        texts: set[str] = set()
        while True:
            await self._room.wait()
            item = await self._pool.next_slice(brave=self._brave)
            program = item.call.order.program
            if len(texts) > PROGRAMS // 2:
                texts.clear()
            self._number += 1
            if not self._sent:
                self._since = self._now()
            self._sent.append(item)
            self._make_room()
            request = item.request(self._number, with_text=program not in texts)
            texts.add(program)
            try:
                await stream.send(request, (item.call.frame_fd, self._progress))
            except StreamClosedError:
                return  # the receiving side reads what was still answered, then notices too

    async def _receive_all(self, stream: MessageStream) -> None:
        while True:
            body, fds = await stream.receive()
            reply = msgspec.convert(body, RenderReply)
            item = self._sent.popleft()
            self._since = self._now()
            self._make_room()
            self._pool.answered(item, reply, fds)

    def _make_room(self) -> None:
        """Whether the process should be given more. What is expected to take long is not waited behind."""
        quick = all(item.turn is None or item.turn.expected < QUICK for item in self._sent)
        if not self._sent or (quick and len(self._sent) < IN_FLIGHT):
            self._room.set()
        else:
            self._room.clear()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
