"""Loader: the resumable iterator over this rank's slice of every global batch.

Law: the state is a position in an epoch and counts the batches that were returned. World size, prefetching
and failures never change the content of a step, because each batch is fetched by its address.
Invariant: one epoch iterator runs at a time; after its last step, a `break` or `close`, no thread or socket
remains.
"""

from __future__ import annotations

import logging
import operator
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeVar
from weakref import WeakSet

from meshsdk.client.native_api import bad_samples
from meshsdk.datasets.default_order import find_order
from meshsdk.errors import ClosedError
from meshsdk.loader.arguments import (
    FOREIGN_ARGUMENTS,
    check_rank_unchanged,
    checked_dataset,
    checked_steps,
    explain_foreign_arguments,
    lost_position_hint,
)
from meshsdk.loader.epoch_iterator import Position
from meshsdk.loader.loader_setup import (
    DOCTOR_VARIABLE,
    TRACE_LIMIT,
    checked_arguments,
    make_setup,
    setup_of_state,
)
from meshsdk.loader.plain_loader import tuple_loader
from meshsdk.loader_stats import LoaderReporter, Meter
from meshsdk.tools_package import LOADER_HOOKS, load_tool
from meshwire.plan.loader_state import LoaderState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from meshsdk.client.native_api import BadSample
    from meshsdk.datasets.batch import Batch
    from meshsdk.datasets.dataset import Dataset
    from meshsdk.datasets.default_order import Order
    from meshsdk.datasets.shuffle import LengthBuckets, Shuffle
    from meshsdk.loader.epoch_iterator import EpochIterator
    from meshsdk.loader.loader_setup import LoaderArguments, MeasuredPlan
    from meshsdk.loader.mapped_loader import MappedLoader
    from meshsdk.loader.output_stage import Normalize
    from meshsdk.loader.plain_loader import PlainLoader
    from meshsdk.loader.torch_iterable import LoaderIterable
    from meshsdk.loader_stats import LoaderStats

R = TypeVar("R")
_log = logging.getLogger("meshsdk")


class Loader:
    """Iterates over the batches of a dataset: each `for` is one epoch, or the rest of a resumed one.

    Pass the same arguments on every rank. The plan is registered immediately, so invalid arguments and ops
    fail before the first step. A batch uses the loader's memory until its last tensor is gone. Only one
    iteration runs at a time.

    Arguments:
        dataset: the dataset to load; its ops run on the nodes.
        global_batch: rows of a step over all ranks, at least one per rank. It may change on resume, as may
            the number of ranks.
        seed: integer that determines the order and the draws of random ops.
        shuffle: True or "global" (any sample at any position), `mesh.Blocks(shards=S)` (sequential reads), or
            False (stored order). The order is a function of seed and epoch. Default: blocks if the samples
            are on rotational disks and a full shuffle is slow there, else a full shuffle (`loader.order`).
        buckets: `mesh.LengthBuckets(field)` to group rows of similar length.
        tail: what to do with the incomplete last batch of an epoch: "pad" it with rows of status 3, "drop"
            it, or return it smaller ("ragged").
        on_bad: what to do with a sample that cannot be prepared: "substitute" another one (status 1), "mask"
            it with zeros (status 2), "drop" it (the batch is smaller), or "raise" BadSampleError.
        max_bad: share of bad rows in a global batch, 0 to 1, above which BadSampleError is raised in any
            case; one row is always allowed.
        rank, world: which part of each batch to load. Default: those of `torch.distributed` or
            `jax.distributed` if it is initialized, else RANK and WORLD_SIZE, else 0 of 1.
        device: where tensors are: "cpu", "cuda", "cuda:N" or a `torch.device`.
        output: "torch" or "numpy". Default: "torch" if it is installed.
        prefetch_bytes: size of the receive arena in bytes, which limits prefetching. Default: 256 MiB, or
            four frames if that is more.
        share: a name; for jobs with the same plan and name each batch is prepared only once.
        deadline: seconds for which an unavailable server is retried.
        verify: True checks the crc32c of each tensor that came over the network, "all" also verifies batches
            handed over through sealed shared memory, which never crossed the network, and False checks none.
        connections: maximum number of requests in flight, 1 to 64.
        report: name under which the nodes' metrics show how long this job waits. Default: MESH_REPORT.
        normalize: `mesh.Normalize(field)`, to convert images to bfloat16, float16 or float32, channels last,
            on the device.
        rows_from: "owners": in a mesh each node sends the rows whose bytes it stores, if rows have a fixed
            size and the batch is neither shared nor packed; "one": one node sends all rows of a batch.
        cache: what a node keeps of results of ops before the first random one, for later epochs: "auto" (what
            pays), "off", or the bytes that it may use for this plan. Batches are the same.

    Raises:
        ConfigurationError: an argument is invalid, or an epoch has no step.
        InvalidPlanError: the ops do not fit the fields; the message has the index of the op.
        SnapshotChangedError: an object was replaced since the dataset was opened.

    Example:
        loader = mesh.Loader(ds, global_batch=1024, seed=17, device="cuda")
        for epoch in range(90):
            for batch in loader:
                train_step(batch["image"], batch["label"])
    """

    @explain_foreign_arguments
    def __init__(
        self,
        dataset: Dataset,
        global_batch: int,
        *,
        seed: int = 0,
        shuffle: Shuffle | None = None,
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
        cache: Literal["auto", "off"] | int = "auto",
    ) -> None:
        given = dict(locals())
        del given["self"], given["dataset"]
        checked_dataset(dataset)
        self.dataset = dataset
        self._found = rank is None
        self._arguments = found = checked_arguments(given)
        self.rank, self.world, self.device = found.rank, found.world, found.device
        self.global_batch = found.global_batch
        self.report = os.environ.get("MESH_REPORT", "") if report is None else report
        self._meter, self._transport = Meter(), dataset.client.transport
        self._set_up(find_order(dataset, shuffle, found.global_batch, found.deadline))
        self._pass: EpochIterator | None = None
        self._moves, self._resumed, self._closed = 0, False, False
        self._followers: WeakSet[LoaderIterable] = WeakSet()
        if told := checked_steps(len(self), self.global_batch, self.plan.positions, tail):
            _log.warning("%s", told)

    def _set_up(self, order: Order) -> None:
        self.order, name = order, self.report
        self._arguments = given = replace(self._arguments, shuffle=order.shuffle)
        reporter = LoaderReporter(name, self.stats, lambda: self._meter.reached) if name else None
        self._feed, self._arena = make_setup(self.dataset, given, self._meter, name, reporter)
        self.plan, self._watchers = self._feed.addresses.plan, self._feed.watchers
        state = LoaderState(self.plan.hash, self.dataset.snapshot.hash, given.seed)
        self._place = Position(state, self.plan.positions, self.global_batch, given.tail)

    # --- position ---------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._place.state.epoch

    @property
    def step(self) -> int:
        """The step of the next batch, counted from the loader's origin (see `Batch.step`)."""
        return self._place.step

    @property
    def remaining(self) -> int:
        """The number of batches that the next `for` yields."""
        return self._place.remaining

    @property
    def _under_way(self) -> int:
        """The number of batches of the running `for`, including those already returned; else of the next."""
        return self.remaining if self._pass is None else self._pass.length

    def __len__(self) -> int:
        """The number of steps of a whole epoch, the same on every rank; see `remaining` for the current."""
        return self._place.steps_an_epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the job as plain values, about 200 bytes of JSON.

        The state is the same on all ranks, so one copy per checkpoint is enough. It counts the batches that
        were returned: in the loop body that includes the current batch, but no prefetched ones.
        """
        return self._place.state.to_dict()

    def load_state_dict(self, state: Mapping[str, Any] | str | bytes) -> None:
        """Resume at the position of a state; this ends a running iteration.

        The state may come from another number of ranks and another global batch. Raises StateMismatchError if
        the plan, snapshot or seed differs (`.field` names it), and ConfigurationError if it is not a state.
        Without `shuffle=` the loader takes over the order of the state.

        Example:
            loader.load_state_dict(checkpoint["loader"])
        """
        if (found := setup_of_state(self.dataset, self._arguments, self.plan, self.order, state)) is not None:
            self._end_pass()
            self._watchers.close()
            self.dataset, order = found
            self._set_up(order)
        self._move(self._place.after_resume(state))
        self._resumed = True

    def seek(self, epoch: int, step: int = 0) -> None:
        """Move to a step of an epoch, which becomes the next batch; this ends a running iteration.

        Both are counted from 0, steps from the beginning of the epoch in units of the current global batch.
        Call it on every rank. Raises IndexError.
        """
        self._move(self._place.after_seek(epoch, step))

    def set_epoch(self, epoch: int) -> None:
        """Move to the beginning of an epoch; this ends a running iteration.

        A loader does not need this call to reshuffle, because each `for` is the next epoch. After
        `load_state_dict` it discards the position within the epoch, and a warning says so.
        """
        position = self._place.state.position
        if self._resumed and position and operator.index(epoch) == self.epoch:
            _log.warning("%s", lost_position_hint(epoch, position))
        self.seek(epoch, 0)

    def skip(self, steps: int) -> None:
        """Skip the next `steps` batches, if need be into later epochs; this ends a running iteration.

        No rank receives the skipped batches, not even after a resume. Call it on every rank. Raises
        IndexError for a negative number.
        """
        self._move(self._place.after_skip(steps))

    def _move(self, place: Position) -> None:
        self._end_pass()
        self._place, self._resumed = place, False
        self._moves += 1
        for follower in self._followers:
            follower.loader_moved()

    # --- batches ----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the rest of the epoch; when it ends, the loader is at the next epoch.

        A new iteration, `seek` and `load_state_dict` end a running iteration, which then raises ClosedError.

        Raises BadSampleError (with `on_bad="raise"`, or above `max_bad`), SnapshotChangedError and
        DeadlineError. All batches before the error were returned and counted; iterate again to continue.
        """
        self._check_usable(whole=True)
        if DOCTOR_VARIABLE in os.environ:
            measured_batches = load_tool(LOADER_HOOKS, "doctor", f"a script that runs with {DOCTOR_VARIABLE}")
            self._end_pass()
            measured: Iterator[Batch] | None = measured_batches(self)
            if measured is not None:  # else `mesh doctor` does not measure this loader
                return measured
        return self._iterate()

    def _iterate(self) -> Iterator[Batch]:
        self._end_pass()
        if self.remaining == 0:  # resumed after the last full batch, with tail="drop"
            self._place = self._place.after_epochs(1)
            return
        self._moves += 1
        self._check_usable()
        place, self._resumed = self._place, False
        running = self._pass = self._feed.begin_epoch(place, range(place.step, place.steps), self._arena)
        try:
            self._check_usable()  # another thread may have closed the loader before it could see this pass
            for _ in range(self.remaining):
                if self._pass is not running:
                    raise ClosedError(
                        "this iteration was ended by another iteration, seek or close: iterate over the "
                        "loader again"
                    )
                batch = running.next_batch()
                self._place = self._place.after_batch()
                yield batch
                del batch  # otherwise its slot would be held while waiting for the next batch
        finally:
            if self._pass is running:
                self._end_pass()

    def subject(self) -> MeasuredPlan:
        """Returns the plan that `mesh doctor` measures, as this rank reads it."""
        return self._feed.measured_plan(self._arena, self.dataset.snapshot.source)

    def as_iterable(self) -> LoaderIterable:
        """Return the loader as a torch IterableDataset, for code that requires torch's DataLoader.

        `DataLoader(loader.as_iterable(), num_workers=k)` yields each batch once, in order. Workers bring no
        speed-up: they copy every batch once more.
        """
        from meshsdk.loader.torch_iterable import LoaderIterable

        return LoaderIterable(self)

    def as_tuples(self, *fields: str) -> PlainLoader:
        """Return this loader with batches as tuples of these fields; both share the position.

        The fields may include "__status" and "__pos". Raises ConfigurationError for a field that batches do
        not have.

        Example:
            for images, labels in loader.as_tuples("image", "label"):
                train_step(images, labels)
        """
        return tuple_loader(self, self.plan.fields, fields)

    def map(
        self, function: Callable[..., R], *, workers: int = 1, processes: bool = False
    ) -> MappedLoader[R]:
        """Return this loader with a function of your own applied to each batch, here and not on the nodes.

        Results come in order, and the state counts those returned. A second parameter gets a NumPy generator,
        seeded by the batch's address. Ops, `mesh op push` included, cost the trainer nothing.

        Arguments:
            function: of a `Batch`; it may return anything.
            workers: calls at a time; up to two more batches wait.
            processes: call it in processes instead of threads, for code that holds the interpreter's lock.
                Batches are copied to them; the function must be at the top of a module.

        Example:
            for inputs in loader.map(tokenize_prompts, workers=2):
                train_step(inputs)
        """
        from meshsdk.loader.mapped_loader import MappedLoader

        return MappedLoader(self, function, workers=workers, processes=processes)

    def part(self, passes: int, part: int, parts: int) -> Iterator[Batch]:
        """Iterate over every `parts`-th remaining batch, from the `part`-th, without moving the loader.

        This is for several processes that each have a copy of this loader. `passes`: number of epochs that
        they have finished together, which are skipped.
        """
        self._check_usable()
        place = self._place.after_epochs(passes) if passes else self._place
        return self._feed.iterate_part(place, part, parts)

    def at(self, step: int, epoch: int | None = None) -> Batch:
        """Return the batch of a step of the current or another epoch, without moving the loader.

        Steps are counted as in `Batch.step`. The batch has its own memory, outside the arena. Raises
        IndexError, and the errors of iterating.
        """
        self._check_usable()
        epoch, step = self.epoch if epoch is None else operator.index(epoch), operator.index(step)
        return self._feed.fetch_step(epoch, step, self._place.origin_of(epoch, step))

    def __getitem__(self, index: object) -> NoReturn:
        """Raise TypeError: a loader is not a sequence; use `at`."""
        raise TypeError(
            "a Loader is not a sequence: iterate over it, use loader.at(step) for one batch, or pass "
            "loader.as_iterable() to torch's DataLoader"
        )

    if not TYPE_CHECKING:  # otherwise type checkers would accept any name

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError, with a hint for names of torch's DataLoader."""
            hint = f": {FOREIGN_ARGUMENTS[name]}" if name in FOREIGN_ARGUMENTS else ""
            raise AttributeError(f"a Loader has no attribute {name!r}{hint}", name=name, obj=self)

    # --- the rest ---------------------------------------------------------------------------------

    def stats(self, since: LoaderStats | None = None) -> LoaderStats:
        """Return the statistics of this loader so far, or since earlier ones; sends no request."""
        running = self._pass.tally if self._pass is not None else None
        found = self._meter.snapshot(running, self._arena.overflows)
        return found if since is None else found - since

    def trace(self, path: str | os.PathLike[str] | None, *, limit: int = TRACE_LIMIT) -> None:
        """Write what each step waits for, and what becomes of each request, to a file that Perfetto
        (ui.perfetto.dev) opens.

        The trace begins with the next `for` and ends when the loader is closed or with `trace(None)`. Raises
        ConfigurationError if another loader is writing the file, and without the package shardmesh-tools
        (`pip install 'shardmesh[tools]'`).

        Arguments:
            path: the file. With several ranks `.rankN` is added to the name, so that each has its own.
            limit: maximum size in bytes.
        """
        self._watchers.set_trace(path, limit)

    def bad(self) -> tuple[BadSample, ...]:
        """Return up to 1,000 bad samples of the plan, from the ledger of all jobs; sends one request."""
        return bad_samples(self._transport, self.plan.hash)

    def close(self) -> None:
        """End a running iteration and close idle connections. Idempotent; returned batches stay valid.

        Any thread may call it.
        """
        self._closed = True  # first, because an iteration that is starting checks it after its pass is set
        self._end_pass()
        self._watchers.close()
        self._transport.close()

    def _end_pass(self) -> None:
        running, self._pass = self._pass, None
        if running is not None:
            running.close()

    def _check_usable(self, *, whole: bool = False) -> None:
        check_rank_unchanged(self.rank, self.world, found=self._found, whole=whole)
        if self._closed:
            raise ClosedError("this loader is closed: create another one and load this one's state into it")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a copy for another process: the same plan at the same position, with its own connections."""
        check_rank_unchanged(self.rank, self.world, found=self._found)
        return _copy_loader, (self.dataset, self._arguments, self._place, self._moves, self._found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self._pass is not None else "idle"
        return (
            f"Loader({self.dataset.snapshot.source}, epoch {self.epoch}, step {self.step} of {len(self)}, "
            f"global batch {self.global_batch}, rank {self.rank} of {self.world}, "
            f"shuffle={self.order.shuffle!r}, {state}, {self._arena!r})"
        )


def _copy_loader(ds: Dataset, arguments: LoaderArguments, place: Position, moves: int, found: bool) -> Loader:
    made = Loader(ds, **arguments.to_kwargs())
    made._place, made._moves, made._found = place, moves, found
    return made
