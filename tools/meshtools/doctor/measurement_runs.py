"""The four timed runs of `mesh doctor`, as an iterator that replaces the loader's own.

Law: all runs have the same rows, and every rank yields the same number of batches: first batches that no
node has prepared, then the same rows under a new address, then frames that are prepared, then batches in
memory.
Invariant: the time of a step is that of the loop from one request for a batch to the next, never the
filling of the pipeline. A run continues until its step time is steady, except if ranks wait for each other.
"""

from __future__ import annotations

import secrets
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from meshsdk.datasets.batch import read_frame
from meshsdk.errors import ConfigurationError
from meshsdk.loader.epoch_iterator import EpochIterator
from meshsdk.loader.fetch_spec import FetchSpec
from meshsdk.loader_stats import Meter
from meshtools.doctor.stage_times import RUNS, Measured, measure_pace, run_length

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from meshsdk.client.request import Request
    from meshsdk.datasets.batch import Batch
    from meshsdk.loader.loader_setup import MeasuredPlan
    from meshtools.doctor.stage_times import Length

WARM_UP: Final = 3  # untimed steps: compilers, allocators, learning rates
AGAIN: Final = 8  # prepared frames that are requested repeatedly: they fit into the frame cache of any node
HELD: Final = 3  # batches in memory
_FIRST_EPOCH, _EPOCHS = 1 << 20, 1 << 30  # epochs that no job has read


@dataclass(slots=True)
class Network:
    """The run with prepared frames. `seconds`: duration of the loop; `receiving`: the part of it in which a
    frame was being received; `cpu`: CPU seconds of this process; `missed`: frames that the node no longer
    had."""

    frames: int = 0
    receiving: float = 0.0
    cpu: float = 0.0
    seconds: float = 0.0
    bytes: int = 0
    missed: int = 0


@dataclass(slots=True)
class MeasurementRuns:
    """The runs and their results. `batches()` is one loop over all runs, or over a part of them: if a loop
    ends early, the next one repeats the run that was interrupted.

    Each run times at least `steps`; with `alone` (no other rank waits for this one) up to eight times as many
    while step times vary. `begins` is called when a run begins, `done` after the last.
    """

    subject: MeasuredPlan
    steps: int = 32
    alone: bool = False
    done: Callable[[MeasurementRuns], None] = lambda _: None
    begins: Callable[[str], None] = lambda _: None
    runs: dict[str, Measured] = field(default_factory=dict)
    network: Network = field(default_factory=Network)
    _epoch: int = field(default_factory=lambda: _FIRST_EPOCH + secrets.randbelow(_EPOCHS))
    _warm: bool = False
    _stand_ins: int = 0  # counted over all runs: the loader warns of the first alone

    def __post_init__(self) -> None:
        if self._whole < 2:
            raise ConfigurationError(
                f"an epoch of {self.subject.plan.positions} rows is not two batches of {self.subject.batch}: "
                "use a smaller batch, or a larger dataset"
            )

    @property
    def _whole(self) -> int:
        """The number of whole batches in an epoch."""
        return self.subject.plan.positions // self.subject.batch

    @property
    def _length(self) -> Length:
        """The length of a run. A longer run never repeats rows, because their sources would be cached."""
        once = self._whole - 1 - WARM_UP - self.subject.connections
        return run_length(self.steps, self.subject.connections, once if self.alone else 0)

    def _batch_count(self, name: str) -> int:
        """Returns the number of batches that a finished run took."""
        return self.subject.connections + self.runs[name].steps

    def batches(self) -> Iterator[Batch]:
        """Yields the batches of all runs that are left; none if all are finished."""
        if len(self.runs) == len(RUNS):
            return
        if not self._warm:
            yield from self._request_batches(lambda number: self._request(number, moved=False), WARM_UP, None)
            self._warm = True
        for name in RUNS:
            if name not in self.runs:
                self.begins(name)
                yield from self._run(name)
        self.done(self)

    def _run(self, name: str) -> Iterator[Batch]:
        count = self.subject.connections + self._length.most
        if name == "compute":
            return self._repeat_from_memory(count)
        if name == "network":
            prepared = self._batch_count("preprocessing")
            last, several = WARM_UP + prepared - 1, min(AGAIN, prepared)
            return self._request_batches(
                lambda number: self._request(last - number % several, moved=True), count, name
            )
        if name == "preprocessing":
            read = self._batch_count("fetch")
            return self._request_batches(
                lambda number: self._request(WARM_UP + number, moved=True), read, name
            )
        return self._request_batches(lambda number: self._request(WARM_UP + number, moved=False), count, name)

    def _request(self, number: int, *, moved: bool) -> Request:
        epoch, step = self._place(number)
        return self.subject.frame_request(epoch, step, moved=moved)

    def _place(self, number: int) -> tuple[int, int]:
        """Returns epoch and step; never step 0, whose rows have only one address."""
        epochs, step = divmod(number, self._whole - 1)
        return self._epoch + epochs, step + 1

    def _request_batches(
        self, ask: Callable[[int], Request], count: int, name: str | None
    ) -> Iterator[Batch]:
        """Yields batches from the nodes."""
        subject, meter = self.subject, Meter(stand_ins=self._stand_ins)
        order = FetchSpec(
            ask,
            range(count),
            subject.expected,
            subject.verify,
            subject.connections,
            subject.deadline,
            lambda number: int(ask(number).path.rpartition("/")[2]),
        )
        running = EpochIterator(subject.transport, order, subject.arena, subject.stage, meter, self._epoch)
        with closing(running):
            yield from self._time_batches(lambda _: running.next_batch(), count, name, meter)
        self._stand_ins = meter.stand_ins
        if name == "network":
            self._note(meter)

    def _note(self, meter: Meter) -> None:
        stats = meter.snapshot(None, 0)
        self.network = Network(
            stats.batches,
            meter.receiving,
            stats.cpu,
            stats.seconds,
            stats.bytes,
            stats.frames.get("miss", 0),
        )

    def _repeat_from_memory(self, count: int) -> Iterator[Batch]:
        """Yields batches from memory."""
        held = [self._fetch_batch(number) for number in range(HELD)]
        yield from self._time_batches(lambda number: held[number % len(held)], count, "compute", Meter())

    def _fetch_batch(self, number: int) -> Batch:
        subject = self.subject
        epoch, step = self._place(WARM_UP + self._batch_count("preprocessing") - 1 - number)
        request = subject.frame_request(epoch, step, moved=True)
        frame = subject.transport.call(
            request, lambda response: read_frame(response, 0, verify=subject.verify), subject.deadline
        )
        return subject.stage.finish(subject.stage.begin(frame, epoch))

    def _time_batches(
        self, take: Callable[[int], Batch], count: int, name: str | None, meter: Meter
    ) -> Iterator[Batch]:
        """Yields the batches that `take` returns. Times the steps after the first few, in blocks, until the
        run is long enough."""
        warm, length = self.subject.connections, self._length
        marks: list[float] = []
        rows, waited, fetch = 0, 0.0, 0.0
        for number in range(count + 1):
            if name is not None and number >= warm and (number - warm) % length.block == 0:
                synchronize_gpu(getattr(self.subject.stage, "device", None))
                marks.append(time.monotonic())
                if number == warm:
                    waited, fetch = meter.waited, meter.fetch
                if number == count or length.ended(marks):
                    break
            if number == count:
                break
            batch = take(number)
            rows += batch.rows if number >= warm else 0
            yield batch
            del batch
        if name is None:
            return
        found, steps = measure_pace(marks, length.block), (len(marks) - 1) * length.block
        self.runs[name] = Measured(
            steps,
            marks[-1] - marks[0],
            rows,
            meter.waited - waited,
            meter.fetch - fetch,
            found.step,
            min(found.doubt, 1.0),
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the results as plain values."""
        network = {name: getattr(self.network, name) for name in Network.__slots__}
        return {"runs": {name: run.to_dict() for name, run in self.runs.items()}, "network": network}


def synchronize_gpu(device: Any = None) -> None:
    """Waits for the queued work of `device`, or else of the current GPU, if this process uses a GPU. Not run:
    no GPU was available."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize(device)
