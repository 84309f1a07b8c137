"""Pool of transform workers, in the coordinator process: sends out slices of rows and collects the results.

Law: when a worker dies, each of its rows is retried once, alone; a row that kills two workers is a bad
sample. The frame content of a slice is valid only after its result arrived. Worker time is shared
evenly between accounts, and between the jobs of an account. A job that kills workers, or that is slow
while others wait, gets at most half of the workers until it has behaved for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import weakref
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from meshd.rpc.process_client import ProcessClient, Reconnect
from meshd.rpc.process_rpc import ProcessLostError
from meshd.telemetry import metrics
from meshd.transform.errors import PoolClosedError
from meshd.transform.messages import MAX_PROGRAMS, RENDER, Failure, read_progress, record_reply_metrics
from meshd.transform.render_queue import (
    FairQueue,
    QueuePosition,
    RenderCall,
    RenderSpec,
    RowSlice,
    SliceSizer,
)
from meshd.transform.renderer import RaggedPart, RenderResult, RowChecksums, program_digest
from meshd.util.async_tasks import BackgroundTasks
from meshd.util.tenant_limits import current_tenant

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from meshd.rpc.process_client import Answer
    from meshd.transform.decoded_cache.cache import DecodedCache
    from meshd.transform.decoded_cache.sample_set import SampleSet
    from meshd.transform.messages import FailureKind, RenderReply
    from meshd.transform.renderer import RowWork
    from meshd.transform.source_files import AssetPlace

_log = logging.getLogger(__name__)
SLICE_ROWS = 32  # maximum; slices are smaller if fewer rows wait
SLOW_SLICE_SECONDS = 5.0  # a job with a slower slice leaves some processes to other accounts
DISTRUST_SECONDS = 60.0  # time after a crash until the job that caused it may use all processes again
EARLY_SECONDS = 10.0  # rows that nobody waits for yet count as requested so much later than they were
IN_FLIGHT = 2  # slices per process: one in progress, and one so that it never waits
QUICK_SLICE_SECONDS = 0.25  # a slice that is expected to take longer has its process for itself
_RECONNECT = Reconnect((0.02, 0.05, 0.1, 0.2, 0.5, 1.0), forever=True)
_LOST = 2 * SLICE_ROWS  # crashes that a slice sees while waiting behind one in which each row kills two
_SILENT = "the transform process returned no row"


class TransformPool:
    """The pool over `sockets`, one Unix socket path per transform process.

    Call `start` before use and `aclose` at the end. `decoded`: the node's decoded cache, if it has one.
    """

    def __init__(self, sockets: Sequence[Path], decoded: DecodedCache | None = None) -> None:
        if not sockets:
            raise ValueError("a pool needs at least one transform process")
        half = (len(sockets) + 1) // 2
        self._workers = [
            WorkerClient(path, self, accepts_restricted=number < half) for number, path in enumerate(sockets)
        ]
        self._decoded = decoded
        self._distrusted: dict[str, asyncio.TimerHandle] = {}
        self._asked: dict[str, float] = {}
        """The time of the last call of each account."""
        self._queue: FairQueue[RowSlice] = FairQueue()
        self._tasks = BackgroundTasks("transform-pool")
        self._slice_sizer = SliceSizer()
        self._waiting_rows = 0
        self.closed = False
        self.queued_rows = 0

    def __repr__(self) -> str:
        return f"<TransformPool of {len(self._workers)}, {self.queued_rows} rows queued>"

    def start(self) -> None:
        """Start connecting. Needs a running event loop."""
        for number, worker in enumerate(self._workers):
            self._tasks.spawn(worker.run(), f"worker-{number}")

    async def aclose(self) -> None:
        """Stop; waiting callers get PoolClosedError."""
        self.closed = True
        for timer in self._distrusted.values():
            timer.cancel()
        await self._tasks.aclose()
        while len(self._queue):
            self.abandon_slice((await self._queue.get()).item)

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
        assets: Sequence[AssetPlace] = (),
        samples: SampleSet | None = None,
        early: bool = False,
    ) -> RenderResult:
        """Render rows into the frame at `frame_fd`, which the caller keeps and closes.

        `targets`, `assets`, `samples`, `early`: see `Renderer`. Cancellation drops rows that have not begun;
        rows in progress still write into the frame. Raises PoolClosedError.
        """
        account = current_tenant()
        now = self._asked[account] = _now()
        spec = RenderSpec(
            now + (EARLY_SECONDS if early else 0.0),
            account,
            job,
            program_text,
            program_digest(program_text),
            epoch,
            frame_bytes,
            tuple(targets),
            tuple(assets),
            samples,
        )
        return await self._run(spec, rows, frame_fd)

    async def keep_prefixes(
        self,
        job: str,
        program_text: str,
        epoch: int,
        rows: Sequence[RowWork],
        *,
        samples: SampleSet,
        assets: Sequence[AssetPlace] = (),
    ) -> RenderResult:
        """Store what rendering these rows would store in the decoded cache, while no row waits for rendering.

        Arguments, cancellation and errors: see `render`. The result has `kept` for rows that did not fail.
        """
        now, account, program = _now(), current_tenant(), program_digest(program_text)
        spec = RenderSpec(
            now, account, job, program_text, program, epoch, 0, (), tuple(assets), samples, prefixes_only=True
        )
        no_frame = os.memfd_create("mesh-no-frame", os.MFD_CLOEXEC)
        try:
            return await self._run(spec, rows, no_frame)
        finally:
            os.close(no_frame)

    async def _run(self, spec: RenderSpec, rows: Sequence[RowWork], frame_fd: int) -> RenderResult:
        if self.closed:
            raise _closed_error()
        if not rows:
            return RenderResult()
        call = RenderCall(spec, frame_fd, len(rows))
        for start in range(0, len(rows), SLICE_ROWS):
            self._put(RowSlice(call, rows[start : start + SLICE_ROWS]))
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

    def _put(self, item: RowSlice, *, first: bool = False) -> None:
        spec = item.call.spec
        self._waiting_rows += len(item.rows)
        place = QueuePosition(spec.asked, spec.epoch, item.rows[0].position)
        background = spec.prefixes_only
        self._queue.put(spec.account, spec.job, item, first=first, place=place, background=background)

    async def next_slice(self, *, accept_restricted: bool) -> RowSlice:
        """Return the next slice of a pending call; of jobs that killed processes, too, or not."""
        while True:
            ticket = await self._queue.get(accept_restricted=accept_restricted)
            item = ticket.item
            waiting, self._waiting_rows = self._waiting_rows, self._waiting_rows - len(item.rows)
            if item.call.is_pending:
                item.ticket = ticket
                self._split_slice(item, waiting)
                return item
            self._queue.finish_ticket(ticket)
            item.call.release_slice()

    def _split_slice(self, item: RowSlice, waiting: int) -> None:
        """Put back the rows for other processes; `waiting`: all waiting rows, including those of `item`."""
        portion = self._slice_sizer.slice_rows(
            item.call.spec.job, len(item.rows), waiting, len(self._workers)
        )
        if portion < len(item.rows):
            rest = RowSlice(item.call, item.rows[portion:])
            item.rows = item.rows[:portion]
            self._put(rest, first=True)

    def _return_ticket(self, item: RowSlice, seconds: float | None) -> None:
        if item.ticket is not None:
            self._queue.finish_ticket(item.ticket, seconds)
            item.ticket = None

    def on_reply(self, item: RowSlice, reply: RenderReply, fds: Sequence[int]) -> None:
        """Handle the result of all or a part of `item`; the remaining rows are queued again for their job."""
        in_advance = item.call.spec.prefixes_only
        self._return_ticket(item, reply.seconds)
        if self._decoded is not None and item.prefixes is not None and reply.prefixes is not None:
            self._decoded.on_reply(item.prefixes, reply.prefixes, in_advance=in_advance)
        if reply.seconds > SLOW_SLICE_SECONDS and self._has_neighbours():
            self._distrust(item.call.spec.job)
        item.record_spans(reply)
        record_reply_metrics(reply, in_advance=in_advance)
        answered = {*reply.rendered, *(failure.row for failure in reply.failures)}
        self._slice_sizer.record_duration(item.call.spec.job, len(answered), reply.seconds)
        left = [work for work in item.rows if work.row not in answered]
        if len(left) == len(item.rows):
            left, reply = [], msgspec.structs.replace(reply, failures=_failures(item, "op", _SILENT))
        parts = [RaggedPart(reply.rendered, reply.ragged, fds[0])] if fds else []
        sums = [RowChecksums(reply.rendered, reply.sums)] if reply.rendered and not reply.verdicts else []
        part = RenderResult(list(reply.failures), parts, sums, reply.seconds, reply.reading, reply.cpu)
        part.add_kept(item.rows, item.prefixes, reply)
        item.call.add_result(part, len(item.rows) - len(left))
        if left and item.call.is_pending:
            self._put(RowSlice(item.call, left), first=True)
        item.call.release_slice()

    def order_prefixes(self, item: RowSlice, writer: object) -> None:
        """Decide what the process `writer` does with the decoded cache for a slice; it is sent next."""
        spec, rows = item.call.spec, item.rows
        if self._decoded is not None:
            fields = len(rows[0].sources)
            item.prefixes = self._decoded.order(
                spec.program, spec.samples, len(rows), fields, writer, in_advance=spec.prefixes_only
            )

    def on_writer_lost(self, writer: object, sent: Sequence[RowSlice]) -> None:
        """Note that a process died: nothing more is appended for these slices."""
        if self._decoded is not None:
            self._decoded.on_writer_lost(writer, [item.prefixes for item in sent if item.prefixes])

    def abandon_slice(self, item: RowSlice, error: Exception | None = None) -> None:
        """Fail `item`, by default because the node is shutting down."""
        self._return_ticket(item, None)
        item.call.fail_call(error or _closed_error())
        item.call.release_slice()

    def on_slice_lost(self, item: RowSlice) -> None:
        """Queue `item` again, a bounded number of times: a process died before it began the slice."""
        self._return_ticket(item, None)
        item.lost += 1
        if not item.call.is_pending:
            item.call.release_slice()
        elif item.lost > _LOST:
            self._fail(item, "read", "transform processes die before they reach this row")
        else:
            self._put(item, first=True)

    def on_worker_crash(self, item: RowSlice, row: int, seconds: float) -> None:
        """Handle the death of a process on a row of `item`, `seconds` after it began the slice.

        The row is retried once, alone; the other rows are queued again as they were. A block is not: its
        bytes are mapped, and those that a disk cannot read end the process (SIGBUS). Its rows are then
        rendered one by one, by reads that tell.
        """
        self._return_ticket(item, seconds)
        self._distrust(item.call.spec.job)
        if not item.call.is_pending:
            item.call.release_slice()
            return
        if item.suspect:
            self._fail(
                item, "bad", f"the transform process died on this sample twice (after {seconds:.3g} s)"
            )
            return
        others = [work for work in item.rows if work.row != row]
        suspects = [work for work in item.rows if work.row == row]
        if others:
            self._put(RowSlice(item.call, others), first=True)
        if suspects and suspects[0].block is not None:
            self._fail(RowSlice(item.call, suspects), "read", "the transform process died as it copied rows")
        elif suspects:
            self._put(RowSlice(item.call, suspects, suspect=True), first=True)
        item.call.release_slice()

    def _has_neighbours(self) -> bool:
        """Return whether several accounts used the pool recently."""
        since = _now() - DISTRUST_SECONDS
        self._asked = {account: at for account, at in self._asked.items() if at > since}
        return len(self._asked) > 1

    def _distrust(self, job: str) -> None:
        before = self._distrusted.pop(job, None)
        if before is not None:
            before.cancel()
        self._queue.restrict_job(job)
        self._distrusted[job] = asyncio.get_running_loop().call_later(DISTRUST_SECONDS, self._trust, job)

    def _trust(self, job: str) -> None:
        del self._distrusted[job]
        self._queue.release_job(job)

    def _fail(self, item: RowSlice, kind: FailureKind, reason: str) -> None:
        failures = _failures(item, kind, reason)
        for failure in failures:
            metrics.transform_failures.labels(failure.op).inc()
        item.call.add_result(RenderResult(list(failures)), len(item.rows))
        item.call.release_slice()


def _failures(item: RowSlice, kind: FailureKind, reason: str) -> tuple[Failure, ...]:
    return tuple(Failure(work.row, 0, kind, "process", reason) for work in item.rows)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _closed_error() -> PoolClosedError:
    return PoolClosedError("the node is shutting down; retry")


class WorkerClient:
    """The client of one transform process. `accepts_restricted`: it gets slices of jobs that
    kill processes, too.

    When the process dies, its slices return to the pool once: the current one as crashed, with the row, the
    others as lost. No slice waits in line behind a long one.
    """

    def __init__(self, path: Path, pool: TransformPool, *, accepts_restricted: bool) -> None:
        self._path, self._pool, self._accepts_restricted = path, pool, accepts_restricted
        self._sent: deque[RowSlice] = deque()
        self._number = 0
        self._progress = os.memfd_create("mesh-progress", os.MFD_CLOEXEC)
        self._finalizer = weakref.finalize(self, os.close, self._progress)
        self._room = asyncio.Event()
        self._since = 0.0
        """When the process began the first of its slices, at the earliest."""

    async def run(self) -> None:
        client = ProcessClient(self._path, reconnect=_RECONNECT)
        try:
            while not self._pool.closed:
                await client.connect()
                try:
                    await self._serve_connection(client)
                except Exception:  # its slices are tried a bounded number of times
                    _log.exception("slices could not be sent; connecting to the transform process again")
                    await client.aclose()
                    self._return_slices()
        finally:
            await client.aclose()
            for item in self._sent:
                self._pool.abandon_slice(item)
            self._finalizer()

    async def _serve_connection(self, client: ProcessClient) -> None:
        """Send slices until the process dies; then blame the slice it was working on."""
        self._update_room()
        sending = asyncio.ensure_future(self._send_all(client))
        lost = asyncio.ensure_future(client.wait_until_lost())
        try:
            await asyncio.wait((sending, lost), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()  # raises if sending failed
            await lost
        finally:
            sending.cancel()
            lost.cancel()
            await asyncio.gather(sending, lost, return_exceptions=True)
        self._return_slices()

    def _return_slices(self) -> None:
        """Return the slices of the dead process; the row it was working on is the suspect."""
        number, row = read_progress(self._progress)
        left, self._sent = list(self._sent), deque()
        self._pool.on_writer_lost(self, left)
        for item in reversed(left):
            if item.number == number:
                self._pool.on_worker_crash(item, row, _now() - self._since)
            else:
                self._pool.on_slice_lost(item)

    async def _send_all(self, client: ProcessClient) -> None:
        texts: set[str] = set()
        while True:
            await self._room.wait()
            item = await self._pool.next_slice(accept_restricted=self._accepts_restricted)
            program = item.call.spec.program
            if len(texts) > MAX_PROGRAMS // 2:
                texts.clear()
            self._number += 1
            if not self._sent:
                self._since = _now()
            self._sent.append(item)
            self._update_room()
            self._pool.order_prefixes(item, self)
            request = item.to_request(self._number, with_text=program not in texts)
            texts.add(program)
            try:
                fds = (item.call.frame_fd, self._progress)
                call = await client.start(RENDER, request, fds, connect=False)
            except ProcessLostError:
                return  # replies already received are handled before the loss is
            call.answer.add_done_callback(self._on_answer)

    def _on_answer(self, answer: asyncio.Future[Answer[RenderReply]]) -> None:
        """Handle a reply; they arrive in order. A slice without one is returned when the connection ends."""
        if answer.cancelled() or answer.exception() is not None:
            return
        item, self._since = self._sent.popleft(), _now()
        self._update_room()
        reply = answer.result()
        try:
            self._pool.on_reply(item, reply.message, reply.fds)
        except Exception as error:  # a defect, which must not leave the caller waiting
            _log.exception("the reply of a transform process cannot be used")
            self._pool.abandon_slice(item, error)

    def _update_room(self) -> None:
        """Set whether the process gets another slice: none waits behind a long or a background one."""
        quick = all(
            (item.ticket is None or item.ticket.expected < QUICK_SLICE_SECONDS)
            and not item.call.spec.prefixes_only
            for item in self._sent
        )
        if not self._sent or (quick and len(self._sent) < IN_FLIGHT):
            self._room.set()
        else:
            self._room.clear()
