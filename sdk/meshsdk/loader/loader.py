"""Loader: the resumable iterator over this rank's slice of every global batch.

Law: the state is a position in an addressed epoch and counts returned batches. World size, prefetching
and failures never change what a step contains, because each batch is fetched by its address.
Invariant: one epoch iterator runs at a time; after its last step, a break or `close`, no thread or
socket remains.
"""

from __future__ import annotations

import logging
import operator
import os
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

from meshsdk.client.native_api import bad_samples
from meshsdk.errors import ClosedError, ConfigurationError
from meshsdk.loader.arguments import (
    FOREIGN_ARGUMENTS,
    check_rank_unchanged,
    checked_dataset,
    explain_foreign_arguments,
    lost_position_hint,
    oversized_batch_hint,
)
from meshsdk.loader.frame_requests import LoaderReporter
from meshsdk.loader.loader_setup import (
    DOCTOR_VARIABLE,
    TRACE_LIMIT,
    LoaderObservers,
    checked_arguments,
    make_setup,
)
from meshsdk.loader.position import Position
from meshsdk.meters import Meter
from meshsdk.optional_tools import LOADER_HOOKS, load_tool
from meshwire.plan.plan_spec import LoaderState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from meshsdk.client.native_api import BadSample
    from meshsdk.datasets.batch import Batch
    from meshsdk.datasets.dataset import Dataset
    from meshsdk.datasets.shuffle import LengthBuckets, Shuffle
    from meshsdk.loader.epoch_iterator import EpochIterator
    from meshsdk.loader.loader_setup import LoaderArguments
    from meshsdk.loader.measured_plan import MeasuredPlan
    from meshsdk.loader.output_stage import Normalize
    from meshsdk.loader.plain_batches import PlainLoader
    from meshsdk.loader.torch_iterable import LoaderIterable
    from meshsdk.meters import LoaderStats

_log = logging.getLogger("meshsdk")


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
        device: "cpu", "cuda" or "cuda:N", or a `torch.device`: where tensors are.
        output: "torch" or "numpy"; torch if it is installed.
        prefetch_bytes: bytes of the arena, and with it how far ahead is asked; 256 MiB, or four frames if
            that is more.
        share: a name; jobs with the same plan and name have each batch prepared once.
        deadline: seconds an unavailable server is waited for.
        verify: check each tensor's crc32c where a batch was sent; "all": also where it was taken over as
            shared memory, which is sealed, and on no way.
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

    @explain_foreign_arguments(FOREIGN_ARGUMENTS)
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
        device: str | torch.device | None = None,
        output: Literal["torch", "numpy"] | None = None,
        prefetch_bytes: int | None = None,
        share: str | None = None,
        deadline: float = 600.0,
        verify: Literal[True, False, "all"] = True,
        connections: int = 4,
        report: str | None = None,
        normalize: Normalize | None = None,
        rows_from: Literal["owners", "one"] = "owners",
    ) -> None:
        given = dict(locals())
        del given["self"], given["dataset"]
        checked_dataset(dataset)
        self.dataset = dataset
        self._found = rank is None
        self._arguments = found = checked_arguments(given)
        self.rank, self.world, self.device = found.rank, found.world, found.device
        self.global_batch = found.global_batch
        self.report = name = os.environ.get("MESH_REPORT", "") if report is None else report
        self._meter = Meter()
        self._watchers = LoaderObservers(self)
        reporter = LoaderReporter(name, self.stats) if name else None
        rig = make_setup(dataset, found, self._meter, self._watchers, reporter)
        self.plan, self._arena, self._feed = rig.plan, rig.arena, rig.step_reader
        self._transport = dataset.client.transport
        state = LoaderState(self.plan.hash, dataset.snapshot.hash, found.seed)
        self._place = Position(state, self.plan.positions, self.global_batch, tail)
        self._pass: EpochIterator | None = None
        self._moves = 0
        self._resumed = False
        self._closed = False
        if len(self) == 0:
            raise ConfigurationError(
                f"{self.plan.positions} positions make no step of {self.global_batch} with tail='drop': "
                "lower global_batch, or use tail='pad'"
            )
        if told := oversized_batch_hint(self.global_batch, self.plan.positions, tail):
            _log.warning("%s", told)

    # --- where it stands --------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch the next batch belongs to."""
        return self._place.state.epoch

    @property
    def step(self) -> int:
        """The next batch's step, counted from the loader's origin (see `Batch.step`)."""
        return self._place.step

    @property
    def remaining(self) -> int:
        """Batches the next `for` gives."""
        return self._place.remaining

    @property
    def _under_way(self) -> int:
        """Batches of the `for` that runs, those it has given included; of none, of the next one."""
        return self.remaining if self._pass is None else self._pass.length

    def __len__(self) -> int:
        """Steps of a whole epoch, the same on every rank; `remaining` is what is left of the present one."""
        return self._place.steps_an_epoch

    def state_dict(self) -> dict[str, Any]:
        """Where the job stands, as plain values (about 200 bytes of JSON), the same on all ranks: one
        rank's is enough for a checkpoint.

        It counts batches returned: inside the loop body, the one at hand included; what was prefetched is
        not.
        """
        return self._place.state.to_dict()

    def load_state_dict(self, state: Mapping[str, Any] | str | bytes) -> None:
        """Goes on where a state says, written with any number of ranks and any global batch. Ends a running
        iteration.

        Raises StateMismatchError when plan, snapshot or seed differ (`.field` names what does), and
        ConfigurationError for what is no state.
        """
        self._move(self._place.after_resume(state))
        self._resumed = True

    def seek(self, epoch: int, step: int = 0) -> None:
        """Makes `step` of `epoch` (both from 0; steps of the present global batch, from the epoch's
        beginning) the next batch. Call it on every rank; raises IndexError."""
        self._move(self._place.after_seek(epoch, step))

    def set_epoch(self, epoch: int) -> None:
        """Makes the beginning of `epoch` the next batch. Not needed to shuffle anew: each `for` is the next
        epoch. Behind `load_state_dict` it gives up the place within the epoch, and a warning says so."""
        position = self._place.state.position
        if self._resumed and position and operator.index(epoch) == self.epoch:
            _log.warning("%s", lost_position_hint(epoch, position))
        self.seek(epoch, 0)

    def skip(self, steps: int) -> None:
        """Passes over the next batches, into the next epochs where they are more than are left: no rank gets
        them, after a resume neither. Call it on every rank; raises IndexError below 0."""
        self._move(self._place.after_skip(steps))

    def _move(self, place: Position) -> None:
        self._end_pass()
        self._place = place
        self._moves += 1
        self._resumed = False

    # --- batches ----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """The rest of the epoch. A new iteration ends the one before, which then raises ClosedError; so do
        `seek` and `load_state_dict`.

        While it runs it raises BadSampleError (`on_bad="raise"`, or more than `max_bad`),
        SnapshotChangedError, DeadlineError. Batches before that were returned and counted: iterate again to
        go on.
        """
        self._check_open()
        if self._found:
            check_rank_unchanged(self.rank, self.world)
        if DOCTOR_VARIABLE in os.environ and (looked_into := self._looked_into()) is not None:
            return looked_into
        return self._iterate()

    def _iterate(self) -> Iterator[Batch]:
        self._end_pass()
        if self.remaining == 0:  # resumed behind the last whole batch of a dropped tail
            self._place = self._place.after_epochs(1)
            return
        self._moves += 1
        running = self._begin()
        try:
            for _ in range(self.remaining):
                if self._pass is not running:
                    raise ClosedError(
                        "another iteration, seek or close ended this one: iterate the loader again"
                    )
                batch = running.next_batch()
                self._place = self._place.after_batch()
                yield batch
                del batch  # or its slot would be held while waiting for the next
        finally:
            if self._pass is running:
                self._end_pass()

    def _looked_into(self) -> Iterator[Batch] | None:
        """Returns the batches that `mesh doctor` measures; None if it does not measure this loader."""
        measured_batches = load_tool(LOADER_HOOKS, "doctor", f"a script that runs with {DOCTOR_VARIABLE}")
        self._end_pass()
        found: Iterator[Batch] | None = measured_batches(self)
        return found

    def subject(self) -> MeasuredPlan:
        """Returns the plan that `mesh doctor` measures, as this rank reads it."""
        return self._feed.measured_plan(self._arena, self.dataset.snapshot.source)

    def _begin(self) -> EpochIterator:
        self._check_open()
        self._resumed = False
        place = self._place
        self._pass = self._feed.begin_epoch(place, range(place.step, place.steps), self._arena)
        return self._pass

    def as_iterable(self) -> LoaderIterable:
        """For code that insists on torch's loader: `DataLoader(loader.as_iterable(), num_workers=k)` gives
        each batch once, in order. Workers only cost here; they copy every batch once more."""
        from meshsdk.loader.torch_iterable import LoaderIterable

        return LoaderIterable(self)

    def as_tuples(self, *fields: str) -> PlainLoader:
        """For `for images, labels in loader.as_tuples("image", "label")`: this loader, each batch a tuple of
        these fields; "__status" and "__pos" may be among them. Iterating one moves the other.

        Raises ConfigurationError for a field that batches do not have.
        """
        from meshsdk.loader.plain_batches import as_tuples

        return as_tuples(self, fields)

    def part(self, passes: int, part: int, parts: int) -> Iterator[Batch]:
        """Every `parts`-th batch from the `part`-th on, of the rest of the epoch or, once `passes` were given
        to their end, of a later one. Moves nothing: for one of several processes, each with a copy of this
        loader."""
        self._check_open()
        place = self._place.after_epochs(passes) if passes else self._place
        return self._feed.iterate_part(place, part, parts)

    def at(self, step: int, epoch: int | None = None) -> Batch:
        """The batch of a step (as `Batch.step` counts) of the present or another epoch, in memory of its own;
        changes no state. Raises IndexError, and what iterating raises."""
        self._check_open()
        epoch, step = self.epoch if epoch is None else operator.index(epoch), operator.index(step)
        origin = self._place.origin_of(epoch)
        steps = self._place.count_steps(origin)
        if epoch < 0 or not 0 <= step < steps:
            has = f"has steps 0 to {steps - 1}" if steps else "was resumed where no whole batch is left of it"
            raise IndexError(f"epoch {epoch}, step {step}: that epoch {has}")
        return self._feed.fetch_step(epoch, step, origin)

    def __getitem__(self, index: object) -> NoReturn:
        """A loader is no sequence: raises TypeError."""
        raise TypeError(
            "a Loader is iterated; loader.at(step) gives one batch, and loader.as_iterable() is what torch's "
            "DataLoader takes"
        )

    if not TYPE_CHECKING:  # or checkers would let every name pass

        def __getattr__(self, name: str) -> NoReturn:
            """Only what is not there: what torch's DataLoader calls otherwise."""
            hint = f": {FOREIGN_ARGUMENTS[name]}" if name in FOREIGN_ARGUMENTS else ""
            raise AttributeError(f"a Loader has no attribute {name!r}{hint}", name=name, obj=self)

    # --- the rest ---------------------------------------------------------------------------------

    def stats(self) -> LoaderStats:
        """What this loader has done so far, without a request."""
        running = self._pass.tally if self._pass is not None else None
        return self._meter.snapshot(running, self._arena.overflows)

    def trace(self, path: str | os.PathLike[str] | None, *, limit: int = TRACE_LIMIT) -> None:
        """Writes what each step waited for, and what became of each request, to a file that Perfetto
        (ui.perfetto.dev) opens, from the next `for` on until the loader is closed, or `trace(None)`.
        Raises ConfigurationError without the package shardmesh-tools (`pip install 'shardmesh[tools]'`).

        Args:
            path: the file; of several ranks each has its own, `.rankN` is added to the name. One that another
                loader is writing is a ConfigurationError.
            limit: bytes it takes at most.
        """
        self._watchers.set_trace(path, limit)

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

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this loader is closed: make another, and load the state of this one into it")

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy for another process: the same plan at the same place, with connections of its own."""
        return _copied, (self.dataset, self._arguments, self._place, self._moves)

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


def _copied(dataset: Dataset, arguments: LoaderArguments, place: Position, moves: int) -> Loader:
    made = Loader(dataset, **arguments.to_kwargs())
    made._place, made._moves = place, moves
    return made
