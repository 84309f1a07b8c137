"""The stateful iterator of a training process: this rank's slice of every global batch.

Law: the state is a position in an addressed epoch; it counts batches returned. What a step holds does not
depend on world size, prefetching or failures, as each batch is fetched by its address.
Invariant: one pass runs at a time; after its last step, a break or `close`, no thread or socket remains.
"""

from __future__ import annotations

import operator
import os
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from meshsdk.arenas import Arena
from meshsdk.datasets import read_frame
from meshsdk.deliveries import Order
from meshsdk.doctor import VARIABLE
from meshsdk.errors import ClosedError, ConfigurationError, StateMismatchError
from meshsdk.meters import Meter
from meshsdk.native import FrameAddress, bad_samples, register_plan
from meshsdk.outputs import make_stage
from meshsdk.parts import Parts
from meshsdk.passes import Pass
from meshsdk.ranks import find_rank
from meshsdk.reporting import Reporter
from meshsdk.watchers import TRACE_LIMIT, Watchers
from meshwire import plans
from meshwire.plans import LoaderState
from meshwire.slices import batch_rows, rank_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meshsdk.adapters.iterables import LoaderIterable
    from meshsdk.batches import Batch
    from meshsdk.datasets import Dataset
    from meshsdk.doctor.checkups import Subject
    from meshsdk.meters import LoaderStats
    from meshsdk.native import BadSample, FieldSchema
    from meshsdk.normalizing import Normalize
    from meshsdk.orders import LengthBuckets, Shuffle
    from meshsdk.transport import Request

DEFAULT_PREFETCH = 256 << 20
_FRAME_OVERHEAD = 16 << 10


class Loader:
    """Batches of a dataset. One `for` is (the rest of) one epoch, the next `for` the next epoch.

    Give every rank the same arguments. The plan is registered at once, so that what cannot work is said
    before the first step. A batch's memory is the loader's until no tensor of it is left; only one iterator
    runs at a time.

    Arguments:
        dataset: what to load; its ops run on the storage nodes.
        global_batch: rows of a step over all ranks, at least one a rank; may change between runs, as may the
            number of ranks.
        seed: of the order and of random ops, an integer.
        shuffle: True or "global" (any sample anywhere), `mesh.Blocks(shards=S)` (reads sequentially), or
            False (stored order); a function of seed and epoch.
        buckets: `mesh.LengthBuckets(field)`: batches of rows of like lengths.
        tail: the last batch of an epoch: "pad" (filled up with rows of status 3), "drop" (left out) or
            "ragged" (smaller).
        on_bad: a sample that cannot be prepared: "substitute" (another one, status 1), "mask" (zeros, status
            2), "drop" (a smaller batch) or "raise".
        max_bad: the share of a global batch's rows, 0 to 1, above which bad samples raise all the same; one
            row is always allowed.
        rank, world: which part of each batch; those of `torch.distributed` if it is initialised, else RANK
            and WORLD_SIZE, else 0 of 1.
        device: "cpu", "cuda" or "cuda:N": where tensors are.
        output: "torch" or "numpy"; torch if it is installed.
        prefetch_bytes: bytes of the arena, and with it how far ahead is asked; 256 MiB, or four frames if
            that is more.
        share: a name; jobs with the same plan and name have each batch prepared once.
        deadline: seconds an unavailable server is waited for.
        verify: check each tensor's crc32c.
        connections: requests in flight at most, 1 to 64.
        report: a name under which the nodes' metrics show how long this job waits; MESH_REPORT if left out.
        normalize: `mesh.Normalize(field)`: images become bfloat16 or float16, channels last, on the device.
        rows_from: "owners": on a mesh each node sends the rows whose bytes it has, where rows have one size
            and nothing else is in the way; "one": one node sends all rows of a batch.

    Raises:
        ConfigurationError: an argument makes no sense, or an epoch has no step.
        InvalidPlanError: ops do not fit the fields; the message has the op's number.
        SnapshotChangedError: an object was replaced since the dataset was opened.
    """

    def __init__(
        self,
        dataset: Dataset,
        global_batch: int,
        *,
        seed: int = 0,
        shuffle: Shuffle = True,
        buckets: LengthBuckets | None = None,
        tail: Literal["pad", "drop", "ragged"] = "pad",
        on_bad: Literal["substitute", "raise", "mask", "drop"] = "substitute",
        max_bad: float = 0.01,
        rank: int | None = None,
        world: int | None = None,
        device: str | None = None,
        output: Literal["torch", "numpy"] | None = None,
        prefetch_bytes: int | None = None,
        share: str | None = None,
        deadline: float = 600.0,
        verify: bool = True,
        connections: int = 4,
        report: str | None = None,
        normalize: Normalize | None = None,
        rows_from: Literal["owners", "one"] = "owners",
    ) -> None:
        self._options = {name: value for name, value in locals().items() if name not in ("self", "dataset")}
        self.dataset = dataset
        self.rank, self.world = find_rank(rank, world)
        self._options |= {"rank": self.rank, "world": self.world}
        self.global_batch = _checked_batch(global_batch, self.world)
        spec = dataset.spec(
            seed=seed,
            shuffle=shuffle,
            tail=tail,
            on_bad=on_bad,
            max_bad=max_bad,
            batch=global_batch,
            buckets=buckets,
        )
        self._transport = dataset.client.transport
        self.device = device
        self._stage = make_stage(device, output, normalize)
        self.plan = register_plan(self._transport, dataset.snapshot.hash, spec, global_batch, deadline)
        self._tail: Literal["pad", "drop", "ragged"] = tail
        self._share = share
        self._deadline = deadline
        self._verify = verify
        self._connections = _checked_connections(connections)
        if rows_from not in ("owners", "one"):
            raise ConfigurationError(f"rows_from={rows_from!r}: 'owners' or 'one'")
        self._expected = _frame_bytes(self.plan.fields, -(-self.global_batch // self.world))
        self._parted = rows_from == "owners" and self._expected > 0 and not share and not spec.get("pack")
        self._budget = _budget(prefetch_bytes, self._stage.memory.capacity(self._expected))
        self._arena = Arena(self._budget, self._stage.memory)
        self._state = LoaderState(self.plan.hash, dataset.snapshot.hash, seed)
        self._meter = Meter()
        self.report = name = os.environ.get("MESH_REPORT", "") if report is None else report
        self._reporter = Reporter(name, self.stats) if name else None
        self._watchers = Watchers(self)
        self._pass: Pass | None = None
        self._moves = 0
        self._closed = False
        if self._count(0) == 0:
            raise ConfigurationError(
                f"{self.plan.positions} positions make no step of {self.global_batch} with tail='drop': "
                "lower global_batch, or use tail='pad'"
            )

    # --- where it stands --------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch the next batch belongs to."""
        return self._state.epoch

    @property
    def step(self) -> int:
        """The next batch's step, counted from the loader's origin (see `Batch.step`)."""
        return self._state.step(self.global_batch)

    @property
    def remaining(self) -> int:
        """Batches the next `for` gives."""
        return self._count(self._state.origin(self.global_batch)) - self.step

    def __len__(self) -> int:
        """Steps of a whole epoch, the same on every rank; `remaining` is what is left of the present one."""
        return self._count(0)

    def _count(self, origin: int) -> int:
        return plans.steps(self.plan.positions, self.global_batch, origin, self._tail)

    def state_dict(self) -> dict[str, Any]:
        """Where the job stands, as plain values (about 200 bytes of JSON), the same on all ranks: one
        rank's is enough for a checkpoint.

        It counts batches returned: inside the loop body, the one at hand included; what was prefetched is
        not.
        """
        return self._state.to_dict()

    def load_state_dict(self, state: Mapping[str, Any] | str | bytes) -> None:
        """Goes on where a state says, written with any number of ranks and any global batch. Ends a running
        iteration.

        Raises StateMismatchError when plan, snapshot or seed differ (`.field` names what does), and
        ConfigurationError for what is no state.
        """
        try:
            loaded = LoaderState.from_json(state)
            loaded.check(
                plan=self.plan.hash,
                snapshot=self._state.snapshot,
                seed=self._state.seed,
                samples=self.plan.positions,
            )
        except plans.StateMismatchError as error:
            raise StateMismatchError(str(error), error.path.removeprefix("state.")) from error
        except plans.PlanError as error:
            raise ConfigurationError(f"not a loader's state: {error}") from error
        self._move(loaded)

    def seek(self, epoch: int, step: int = 0) -> None:
        """Makes `step` of `epoch` (both from 0; steps of the present global batch, from the epoch's
        beginning) the next batch. Call it on every rank; raises IndexError."""
        if epoch < 0 or not 0 <= step < len(self):
            raise IndexError(f"epoch {epoch}, step {step}: an epoch has steps 0 to {len(self) - 1}")
        position = operator.index(step) * self.global_batch
        ahead = position - self._state.position if epoch == self._state.epoch else 0
        skips = self._state.skips + max(ahead, 0)
        self._move(replace(self._state, epoch=operator.index(epoch), position=position, skips=skips))

    def set_epoch(self, epoch: int) -> None:
        """Makes the beginning of `epoch` the next batch."""
        self.seek(epoch, 0)

    def skip(self, steps: int) -> None:
        """Passes over the next batches, into the next epochs where they are more than are left: no rank gets
        them, after a resume neither. Call it on every rank; raises IndexError below 0."""
        steps = operator.index(steps)
        if steps < 0:
            raise IndexError(f"skip({steps}): to go back, seek")
        state, left = self._state, self.remaining
        if steps < left:
            ahead = steps * self.global_batch
            moved = replace(state, position=state.position + ahead)
        else:
            epochs, step = divmod(steps - left, len(self))
            last = self.plan.positions - state.position + epochs * self.plan.positions
            ahead = last + step * self.global_batch
            moved = replace(state, epoch=state.epoch + 1 + epochs, position=step * self.global_batch)
        self._move(replace(moved, skips=state.skips + ahead))

    def _move(self, state: LoaderState) -> None:
        self._end_pass()
        self._state = state
        self._moves += 1

    # --- batches ----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """The rest of the epoch. A new iteration ends the one before, which then raises ClosedError; so do
        `seek` and `load_state_dict`.

        While it runs it raises BadSampleError (`on_bad="raise"`, or more than `max_bad`),
        SnapshotChangedError, DeadlineError. Batches before that were returned and counted: iterate again to
        go on.
        """
        self._check_open()
        if VARIABLE in os.environ and (looked_into := self._looked_into()) is not None:
            return looked_into
        return self._iterate()

    def _iterate(self) -> Iterator[Batch]:
        self._end_pass()
        if self.remaining == 0:  # resumed behind the last whole batch of a dropped tail
            self._state = replace(self._state, epoch=self._state.epoch + 1, position=0)
            return
        self._moves += 1
        running = self._begin()
        try:
            for _ in range(self.remaining):
                if self._pass is not running:
                    raise ClosedError(
                        "another iteration, seek or close ended this one: iterate the loader again"
                    )
                batch = running.next()
                self._state = self._state.after_batch(self.global_batch, self.plan.positions, self._tail)
                yield batch
                del batch  # or its slot would be held while waiting for the next
        finally:
            if self._pass is running:
                self._end_pass()

    def _looked_into(self) -> Iterator[Batch] | None:
        """The batches of a checkup, if `mesh doctor` runs this program and looks into this loader."""
        from meshsdk.doctor.enrolling import enrolled

        self._end_pass()
        return enrolled(self)

    def subject(self) -> Subject:
        """What `mesh doctor` looks into: the plan as this rank reads it."""
        from meshsdk.doctor.checkups import Subject

        return Subject(
            self._transport,
            self.plan,
            self.global_batch,
            self.rank,
            self.world,
            self._stage,
            self._arena,
            self._expected,
            self._connections,
            self._verify,
            self._deadline,
            self.dataset.snapshot.source,
        )

    def _begin(self) -> Pass:
        self._check_open()
        steps = range(self.step, self.step + self.remaining)
        self._pass = self._pass_over(self._state, steps, self._arena)
        return self._pass

    def _pass_over(self, state: LoaderState, steps: range, arena: Arena) -> Pass:
        epoch, origin = state.epoch, state.origin(self.global_batch)
        order = Order(
            lambda step: self._request(epoch, step, origin),
            steps,
            self._expected,
            self._verify,
            self._connections,
            self._deadline,
            parts=self._parts(epoch, origin) if self._parted else None,
        )
        watchers = self._watchers.present()
        return Pass(self._transport, order, arena, self._stage, self._meter, epoch, watchers)

    def _parts(self, epoch: int, origin: int) -> Parts:
        def ask(step: int, version: int) -> Request:
            request = self._request(epoch, step, origin)
            return replace(request, query=f"{request.query}&part={version}")

        def rows(step: int) -> int:
            whole = batch_rows(self.plan.positions, self.global_batch, origin, step, self._tail)
            first, end = rank_rows(whole, self.rank, self.world)
            return end - first

        return Parts(ask, rows)

    def as_iterable(self) -> LoaderIterable:
        """For code that insists on torch's loader: `DataLoader(loader.as_iterable(), num_workers=k)` gives
        each batch once, in order. Workers only cost here; they copy every batch once more."""
        from meshsdk.adapters.iterables import LoaderIterable

        return LoaderIterable(self)

    def part(self, passes: int, part: int, parts: int) -> Iterator[Batch]:
        """Every `parts`-th batch from the `part`-th on, of the rest of the epoch or, once `passes` were given
        to their end, of a later one. Moves nothing: for one of several processes, each with a copy of this
        loader."""
        self._check_open()
        state = self._state
        if passes:
            state = replace(state, epoch=state.epoch + passes, position=0)
        first, stop = state.step(self.global_batch), self._count(state.origin(self.global_batch))
        steps = range(first + part, stop, parts)
        if not steps:
            return
        least = 3 * self._stage.memory.capacity(self._expected)
        running = self._pass_over(state, steps, Arena(max(self._budget // parts, least), self._stage.memory))
        try:
            for _ in steps:
                batch = running.next()
                yield batch
                del batch
        finally:
            running.close()
            self._transport.close()

    def _address(self, epoch: int, step: int, origin: int) -> FrameAddress:
        return FrameAddress(
            self.plan.hash, epoch, step, self.rank, self.world, self.global_batch, origin, self._share
        )

    def _request(self, epoch: int, step: int, origin: int) -> Request:
        request = self._address(epoch, step, origin).request()
        reported = self._reporter.headers() if self._reporter is not None else None
        return replace(request, headers={**request.headers, **reported}) if reported else request

    def at(self, step: int, epoch: int | None = None) -> Batch:
        """The batch of a step (as `Batch.step` counts) of the present or another epoch, in memory of its own;
        changes no state. Raises IndexError, and what iterating raises."""
        self._check_open()
        origin = self._state.origin(self.global_batch)
        if not 0 <= step < self._count(origin):
            raise IndexError(f"step {step}: the epoch has steps 0 to {self._count(origin) - 1}")
        epoch = self._state.epoch if epoch is None else epoch
        request = self._address(epoch, operator.index(step), origin).request()
        frame = self._transport.call(
            request, lambda response: read_frame(response, step, verify=self._verify), self._deadline
        )
        return self._stage.finish(self._stage.begin(frame, epoch))

    # --- the rest ---------------------------------------------------------------------------------

    def stats(self) -> LoaderStats:
        """What this loader has done so far, without a request."""
        running = self._pass.tally if self._pass is not None else None
        return self._meter.read(running, self._arena.overflows)

    def trace(self, path: str | os.PathLike[str] | None, *, limit: int = TRACE_LIMIT) -> None:
        """Writes what each step waited for, and what became of each request, to a file that Perfetto
        (ui.perfetto.dev) opens, from the next `for` on until the loader is closed, or `trace(None)`.

        Args:
            path: the file; of several ranks each has its own, `.rankN` is added to the name.
            limit: bytes it takes at most.
        """
        self._watchers.trace(path, limit)

    def bad(self) -> tuple[BadSample, ...]:
        """The plan's ledger of bad samples, from all jobs: up to 1,000. A request."""
        return bad_samples(self._transport, self.plan.hash)

    def close(self) -> None:
        """Ends the pass, if one runs, and closes idle connections. Batches taken stay valid. Idempotent."""
        self._end_pass()
        self._watchers.close()
        self._transport.close()
        self._closed = True

    def _end_pass(self) -> None:
        running, self._pass = self._pass, None
        if running is not None:
            running.close()
            self._transport.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this loader is closed: make another, and load the state of this one into it")

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy for another process: the same plan at the same place, with connections of its own."""
        return _copied, (self.dataset, self._options, self._state, self._moves)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self._pass is not None else "idle"
        return (
            f"Loader({self.dataset.snapshot.source}, epoch {self.epoch}, step {self.step} of {len(self)}, "
            f"global batch {self.global_batch}, rank {self.rank} of {self.world}, {state}, {self._arena!r})"
        )


def _copied(dataset: Dataset, options: dict[str, Any], state: LoaderState, moves: int) -> Loader:
    made = Loader(dataset, **options)
    made._state, made._moves = state, moves
    return made


def _checked_batch(batch: int, world: int) -> int:
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ConfigurationError(
            f"global_batch={batch!r}: the rows of a step over all ranks, a number above 0"
        )
    if batch < world:
        raise ConfigurationError(f"global_batch={batch} is less than {world} ranks: some would get no row")
    return batch


def _checked_connections(count: int) -> int:
    if not 1 <= count <= 64:
        raise ConfigurationError(f"connections={count}: 1 to 64; 4 keep a 100 Gb/s link busy")
    return count


def _frame_bytes(fields: Mapping[str, FieldSchema], rows: int) -> int:
    """Bytes of a frame of `rows`; 0 when a ragged field leaves them unknown."""
    total = _FRAME_OVERHEAD + 16 * rows
    for field in fields.values():
        if field.shape is None:
            return 0
        width = 2 if field.dtype == "bfloat16" else np.dtype(field.dtype).itemsize
        total += rows * prod(field.shape) * width
    return total


def _budget(prefetch_bytes: int | None, slot: int) -> int:
    if prefetch_bytes is None:
        return max(DEFAULT_PREFETCH, 4 * slot)
    if prefetch_bytes < 1:
        raise ConfigurationError(f"prefetch_bytes={prefetch_bytes}: the arena's size in bytes, above 0")
    return prefetch_bytes
