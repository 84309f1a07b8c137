"""Epoch iterator: the remaining batches of one epoch, from prefetcher and output stage.

Law: it returns batches in step order and counts them; the loader decides which steps.
Invariant: closing it in any state ends its thread and closes its sockets; interpreter exit closes it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from meshsdk.errors import MeshError
from meshsdk.loader import interpreter_exit
from meshsdk.loader.prefetcher import Prefetcher
from meshsdk.meters import Stall, Step, attribute_stall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshsdk.client.arena import Arena
    from meshsdk.client.transport import Transport
    from meshsdk.datasets.batch import Batch
    from meshsdk.loader.output_stage import OutputStage
    from meshsdk.loader.prefetcher import FetchSpec
    from meshsdk.meters import Arrival, Meter, Observer, Tally


_log = logging.getLogger("meshsdk")

_NONE = Stall()
_STAND_IN = (
    "epoch %d, step %d: a sample could not be prepared, so its row in this batch is a substitute or masked "
    "(batch.status is not 0). loader.bad() lists bad samples and their errors, loader.stats() counts them. "
    "This warning appears once"
)


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
        interpreter_exit.close_at_exit(self)
        self.consumer: threading.Thread | None = None
        self._transport = transport
        self._delivery = Prefetcher(transport, order, arena)
        self._stage = stage
        self._meter = meter
        self._epoch = epoch
        self._observers = observers
        self._arrived: deque[tuple[Arrival | None, str, int]] = deque()
        self.length = self._untaken = len(order.steps)
        self._given = 0
        self._stall = _NONE
        self._begun: deque[Any] = deque()
        self._failure: MeshError | None = None
        self._open = True
        meter.start()

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
        self._given += 1
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
        self._begun.clear()
        self._meter.absorb(self._delivery.tally)
        self._meter.stop()
        for observer in self._observers if here else ():
            observer.on_end(time.monotonic(), self._meter)
        self._transport.close()

    def __repr__(self) -> str:
        state = "open" if self._open else "closed"
        return f"EpochIterator({state}, {self._untaken} frames left, {self._delivery!r})"
