"""Epochs: a loader's position, the addresses of its frames, and the iterator over the remaining batches.

Law: a position is a value, and a move returns another one. Positions are counted over all ranks of an epoch,
so the number of ranks and the batch size may change on resume. An address is a function of plan, position and
rank; its content does not depend on the client or the time. The iterator returns batches in step order, as
prefetcher and output stage finish them, and counts them; the loader decides which steps.
Invariant: closing it in any state ends its thread and closes its sockets; interpreter exit closes it.
"""

from __future__ import annotations

import logging
import operator
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from meshsdk.client.request import Request
from meshsdk.errors import ConfigurationError, MeshError, StateMismatchError
from meshsdk.loader import interpreter_exit
from meshsdk.loader.prefetcher import Prefetcher
from meshsdk.loader.remaining_reports import report_end
from meshsdk.loader.split_frame_requests import SplitRequest
from meshsdk.loader_stats import Stall, Step, attribute_stall
from meshwire.cluster.routes import frame_address
from meshwire.http_values.mesh_headers import SAMPLE_CACHE_HEADER, sample_cache_value
from meshwire.plan import loader_state
from meshwire.plan.loader_state import LoaderState
from meshwire.plan.rank_slices import batch_rows, rank_rows, step_count
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshsdk.client.arena import Arena
    from meshsdk.client.native_api import PlanInfo
    from meshsdk.client.transport import Transport
    from meshsdk.datasets.batch import Batch
    from meshsdk.loader.fetch_spec import FetchSpec
    from meshsdk.loader.output_stage import OutputStage
    from meshsdk.loader_stats import Arrival, LoaderReporter, Meter, Observer, Tally
    from meshwire.plan.rank_slices import Tail


_log = logging.getLogger("meshsdk")

_NONE = Stall()
_STAND_IN = (
    "epoch %d, step %d: a sample could not be prepared, so its row in this batch is a substitute or masked "
    "(batch.status is not 0). loader.bad() lists bad samples and their errors, loader.stats() counts them. "
    "This warning appears once"
)


@dataclass(frozen=True, slots=True)
class Position:
    """Where the next batch begins.

    `state` has epoch and position; `positions` is the length of an epoch and `batch` the rows of a global
    batch. `gone_on`: the epoch that was resumed with another batch size, and its origin.
    """

    state: LoaderState
    positions: int
    batch: int
    tail: Tail
    gone_on: tuple[int, int] = (0, 0)

    @property
    def step(self) -> int:
        """The step of the next batch, counted from the origin."""
        return self.state.step(self.batch)

    @property
    def origin(self) -> int:
        """The position in the epoch at which step 0 begins."""
        return self.state.origin(self.batch)

    @property
    def remaining(self) -> int:
        """The number of batches left in the epoch."""
        return self.steps - self.step

    @property
    def steps(self) -> int:
        """The number of steps of the current epoch, from its origin."""
        return self._count_steps(self.origin)

    @property
    def steps_an_epoch(self) -> int:
        """The number of steps of a whole epoch."""
        return self._count_steps(0)

    def origin_of(self, epoch: int, step: int) -> int:
        """Return the position at which step 0 of an epoch begins. Raises IndexError if it lacks `step`."""
        if epoch == self.state.epoch:
            origin = self.origin
        else:
            origin = self.gone_on[1] if epoch == self.gone_on[0] else 0
        steps = self._count_steps(origin)
        if epoch < 0 or not 0 <= step < steps:
            has = f"has steps 0 to {steps - 1}" if steps else "was resumed where no full batch is left"
            raise IndexError(f"epoch {epoch}, step {step}: this epoch {has}")
        return origin

    def _count_steps(self, origin: int) -> int:
        """Return the number of steps of an epoch with this origin."""
        return step_count(self.positions, self.batch, origin, self.tail)

    def _at(self, epoch: int, position: int, skipped: int = 0) -> Position:
        skips = self.state.skips + skipped
        return replace(self, state=replace(self.state, epoch=epoch, position=position, skips=skips))

    def after_batch(self) -> Position:
        """Return the position after the next batch was returned."""
        return replace(self, state=self.state.after_batch(self.batch, self.positions, self.tail))

    @property
    def numbers(self) -> tuple[int, int, int, int, int]:
        """What distinguishes this position from others of the same loader; see `at_numbers`."""
        state = self.state
        return state.epoch, state.position, state.skips, *self.gone_on

    def at_numbers(self, epoch: int, position: int, skips: int, *gone_on: int) -> Position:
        """Return the position that has these `numbers`."""
        state = replace(self.state, epoch=epoch, position=position, skips=skips)
        return replace(self, state=state, gone_on=(gone_on[0], gone_on[1]))

    def after_epochs(self, count: int) -> Position:
        """Return the beginning of the epoch that is `count` epochs later."""
        return self._at(self.state.epoch + count, 0)

    def after_resume(self, state: Mapping[str, Any] | str | bytes) -> Position:
        """Return the position that a state has.

        Raises StateMismatchError for a state of another plan, snapshot or seed, and ConfigurationError if it
        is not a state.
        """
        here = self.state
        if not isinstance(state, (Mapping, str, bytes)):
            raise ConfigurationError(f"not a loader state: {state!r:.80}; pass what state_dict() returned")
        try:
            loaded = LoaderState.from_json(state)
            loaded.check(plan=here.plan, snapshot=here.snapshot, seed=here.seed, samples=self.positions)
        except loader_state.StateMismatchError as error:
            raise StateMismatchError(str(error), error.path.removeprefix("state.")) from error
        except PlanError as error:
            raise ConfigurationError(
                f"not a loader state: {error}; pass only what state_dict() returned, not the whole checkpoint"
            ) from error
        return replace(self, state=loaded, gone_on=(loaded.epoch, loaded.origin(self.batch)))

    def after_seek(self, epoch: int, step: int) -> Position:
        """Return the position of a step of an epoch, counted from the epoch's beginning.

        Rows of the current epoch that are passed over count as skipped. Raises IndexError.
        """
        epoch, step = operator.index(epoch), operator.index(step)
        if epoch < 0:
            raise IndexError(f"epoch {epoch}: epochs are counted from 0")
        if not 0 <= step < self.steps_an_epoch:
            raise IndexError(f"epoch {epoch}, step {step}: an epoch has steps 0 to {self.steps_an_epoch - 1}")
        position = step * self.batch
        ahead = position - self.state.position if epoch == self.state.epoch else 0
        return replace(self._at(epoch, position, max(ahead, 0)), gone_on=(epoch, 0))

    def after_skip(self, steps: int) -> Position:
        """Return the position `steps` batches later, if need be in a later epoch. Raises IndexError."""
        steps = operator.index(steps)
        if steps < 0:
            raise IndexError(f"skip({steps}): to go back, use seek")
        state, left = self.state, self.remaining
        if steps < left:
            ahead = steps * self.batch
            return self._at(state.epoch, state.position + ahead, ahead)
        epochs, step = divmod(steps - left, self.steps_an_epoch)
        passed = self.positions - state.position + epochs * self.positions
        position = step * self.batch
        return self._at(state.epoch + 1 + epochs, position, passed + position)


@dataclass(frozen=True, slots=True)
class FrameAddress:
    """The address of a rank's rows of a step, valid at any node and at any time."""

    plan: str
    epoch: int
    step: int
    rank: int
    world: int
    batch: int
    origin: int = 0
    share: str | None = None

    def request(self) -> Request:
        query = f"batch={self.batch}&format=tensors&origin={self.origin}&rank={self.rank}"
        if self.share:
            query += f"&share={quote(self.share, safe='')}"
        query += f"&world={self.world}"
        place = self.rank, self.world, self.batch, self.origin
        meets = frame_address(self.plan, self.epoch, self.step, *place)
        return Request("GET", f"/-/plans/{self.plan}/{self.epoch}/{self.step}", query, meets=meets)


@dataclass(frozen=True, slots=True)
class FrameRequests:
    """Makes the requests for one rank's frames.

    `parted`: frames may be split by node; `cache`: bytes of decoded samples that a node may keep, None if it
    decides.
    """

    plan: PlanInfo
    batch: int
    rank: int
    world: int
    tail: Tail
    share: str | None
    parted: bool
    reporter: LoaderReporter | None = None
    cache: int | None = None

    def bare_request(self, epoch: int, step: int, origin: int) -> Request:
        """Return the request for a frame, without a report."""
        share = self.share
        request = FrameAddress(
            self.plan.hash, epoch, step, self.rank, self.world, self.batch, origin, share
        ).request()
        if self.cache is None:
            return request
        return replace(request, headers={SAMPLE_CACHE_HEADER: sample_cache_value(self.cache)})

    def frame_request(self, epoch: int, step: int, origin: int) -> Request:
        """Return the request for a frame, with the job's report if that is due."""
        request = self.bare_request(epoch, step, origin)
        reported = self._report(epoch, origin)
        return replace(request, headers={**request.headers, **reported}) if reported else request

    def bare_report(self, epoch: int, origin: int, last: bool) -> Request | None:
        """Return a request that only reports, if that is due: for the plan, which every node has."""
        reported = self._report(epoch, origin, last=last)
        return Request("GET", f"/-/plans/{self.plan.hash}", headers=reported) if reported else None

    def _report(self, epoch: int, origin: int, *, last: bool = False) -> Mapping[str, str]:
        return {} if self.reporter is None else self.reporter.headers(epoch, origin, self.batch, last=last)

    def split_request(self, epoch: int, origin: int) -> SplitRequest | None:
        """Return how to request an epoch's frames in parts; None if they must not be split."""
        if not self.parted:
            return None

        def ask(step: int, version: int) -> Request:
            request = self.frame_request(epoch, step, origin)
            return replace(request, query=f"{request.query}&part={version}")

        def rows(step: int) -> int:
            whole = batch_rows(self.plan.positions, self.batch, origin, step, self.tail)
            first, end = rank_rows(whole, self.rank, self.world)
            return end - first

        return SplitRequest(ask, rows)


class EpochIterator:
    """Iterates over the batches of `order.steps`; `length` is their number. For one consumer."""

    def __init__(
        self,
        transport: Transport,
        order: FetchSpec,
        arena: Arena,
        stage: OutputStage,
        meter: Meter,
        epoch: int,
        observers: Sequence[Observer] = (),
    ) -> None:
        interpreter_exit.check_not_exiting()
        self.consumer: threading.Thread | None = None
        self._transport = transport
        meter.reached = epoch, order.steps.start
        self._stage = stage
        self._meter = meter
        self._epoch = epoch
        self._observers = observers
        self._report = order.report
        self._arrived: deque[tuple[Arrival | None, str, int]] = deque()
        self._steps = order.steps
        self.length = self._untaken = len(order.steps)
        self._given = 0
        self._stall = _NONE
        self._begun: deque[Any] = deque()
        self._failure: MeshError | None = None
        self._open = True
        self._delivery = Prefetcher(transport, order, arena)
        self._traces = self._delivery.traces
        try:
            meter.start()
            interpreter_exit.close_at_exit(self)
        except BaseException:  # an interrupt, or the exit began meanwhile and has not seen this iterator
            self.close()
            raise

    def next_batch(self) -> Batch:
        """Return the next batch, waiting for it. Raises the MeshError with which its step failed."""
        self.consumer = threading.current_thread()
        try:
            return self._next()
        finally:
            self.consumer = None

    def _next(self) -> Batch:
        meter, cpu, clock = self._meter, time.thread_time(), time.monotonic()
        if self._given == 1:
            meter.mark_steady(clock)
        for observer in self._observers:
            observer.on_wait(clock)
        stall = _NONE
        try:
            self._fill()
            if not self._begun and self._failure is not None:
                raise self._failure
            batch = self._stage.finish(self._begun.popleft())
        finally:
            now = time.monotonic()
            stall, self._stall = self._stall, _NONE
            meter.add_wait(now - clock, stall, steady=self._given > 0)
            meter.cpu += time.thread_time() - cpu
        if self._traces is not None:
            self._traces.end_batch(self._steps[self._given], clock, now)
        self._given += 1
        meter.reached = batch.epoch, batch.step + 1
        good = meter.stand_ins == 0
        meter.add_rows(batch.status)
        if good and meter.stand_ins:
            _log.warning(_STAND_IN, batch.epoch, batch.step)
        if self._observers:
            self._tell(batch, clock, now, stall)
        return batch

    def _tell(self, batch: Batch, since: float, until: float, stall: Stall) -> None:
        arrival, origin, size = self._arrived.popleft()
        rest = max(until - since - stall.seconds, 0.0)
        whole = Stall(stall.network + rest, stall.preprocessing, stall.fetch)
        step = Step(batch.epoch, batch.step, batch.rows, size, since, until, whole, arrival, origin)
        for observer in self._observers:
            observer.on_batch(step, self._meter)

    def _fill(self) -> None:
        """Start the output stage on the next frame, and on further received ones that it can overlap."""
        while self._untaken and self._failure is None and len(self._begun) <= self._stage.ahead:
            if self._begun and not self._delivery.is_ready():
                return
            since = time.monotonic()
            try:
                frame = self._delivery.next_frame()
            except MeshError as error:
                self._failure = error  # batches that were started before it come first
                return
            if frame.arrival is not None:
                self._stall += attribute_stall(since, time.monotonic(), frame.arrival)
            if self._observers:
                self._arrived.append((frame.arrival, frame.origin, frame.nbytes))
            self._untaken -= 1
            self._begun.append(self._stage.begin(frame, self._epoch))

    @property
    def tally(self) -> Tally | None:
        """The counters of the running prefetcher; None once they were added to the meter."""
        return self._delivery.tally if self._open else None

    def close(self) -> None:
        """End the prefetcher. Idempotent; a forked child only drops what belongs to its parent."""
        if not self._open:
            return
        self._open = False
        self._delivery.close()
        here = not self._delivery.forked
        if here:
            self._stage.close()
        if here and self._traces is not None:
            self._traces.close()
        self._begun.clear()
        self._meter.absorb(self._delivery.tally)
        self._meter.stop()
        for observer in self._observers if here else ():
            observer.on_end(time.monotonic(), self._meter)
        # Not while the consumer waits for a node that perhaps does not answer.
        if here and self._given and self.consumer is None and self._report is not None:
            report_end(self._transport, self._report(True))
        self._transport.close()

    def __repr__(self) -> str:
        state = "open" if self._open else "closed"
        return f"EpochIterator({state}, {self._untaken} frames left, {self._delivery!r})"
