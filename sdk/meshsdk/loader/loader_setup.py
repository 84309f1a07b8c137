"""Loader setup: registers the plan, sizes the arena, and builds the step reader and the observers.

Law: invalid arguments and plans fail here, before the first step. The step reader holds no position, so
several epoch iterators can share it. Observers are built when the first loop starts, and again in a forked
child; an observer that cannot be built is left out.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from meshsdk.client.arena import Arena
from meshsdk.client.native_api import derive_snapshot, register_plan
from meshsdk.client.settings import checked_seconds
from meshsdk.datasets.batch import read_frame
from meshsdk.datasets.default_order import Order, shuffle_of_plan
from meshsdk.datasets.sample_sequence import log_notes
from meshsdk.errors import BusyError, ServerError
from meshsdk.loader.arguments import (
    arena_bytes,
    checked_batch,
    checked_cache,
    checked_connections,
    checked_normalize,
    checked_seed,
    checked_share,
    checked_verify,
    find_rank,
    frame_bytes,
    may_split_frames,
    small_arena_hint,
)
from meshsdk.loader.epoch_iterator import EpochIterator, FrameAddress, FrameRequests
from meshsdk.loader.fetch_spec import FetchSpec
from meshsdk.loader.output_stage import device_name, make_stage
from meshsdk.loader.stats_page import describe, open_page
from meshsdk.tools_package import LOADER_HOOKS, find_tool, load_tool
from meshwire.plan.loader_state import LoaderState
from meshwire.plan.rank_slices import step_count
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meshsdk.client.native_api import PlanInfo
    from meshsdk.client.request import Request
    from meshsdk.client.transport import Transport
    from meshsdk.datasets.batch import Batch
    from meshsdk.datasets.dataset import Dataset
    from meshsdk.datasets.shuffle import LengthBuckets, Shuffle
    from meshsdk.loader.epoch_iterator import Position
    from meshsdk.loader.output_stage import Normalize, OutputStage
    from meshsdk.loader_stats import LoaderReporter, Meter, Observer
    from meshwire.plan.rank_slices import Tail


TRACE_LIMIT: Final = 64 << 20
"""Bytes of a trace: some 80,000 steps."""
TRACE_VARIABLE: Final = "MESH_TRACE"
DOCTOR_VARIABLE: Final = "MESH_DOCTOR"
"""Set by `mesh doctor` for the script it runs: the folder with its instructions, and for the report."""
PAGE_VARIABLE: Final = "MESH_TOP"
"""`off` turns the shared page for `mesh top` off."""


@dataclass(frozen=True, slots=True)
class ObservedLoader:
    """What the observers of a loader say about it. `batch`: the global batch; `steps`: of a whole epoch."""

    source: str
    plan: str
    rank: int
    world: int
    batch: int
    steps: int
    report: str


class LoaderObservers:
    """The observers of a loader: the page for `mesh top`, NVTX ranges and a trace."""

    def __init__(self, loader: ObservedLoader) -> None:
        self._loader = loader
        self._pid = 0
        self._usual: list[Observer] = []
        self._trace: Observer | None = None

    def __repr__(self) -> str:
        return f"<LoaderObservers {self._usual}, {self._trace}>"

    def active_observers(self) -> tuple[Observer, ...]:
        """Return the observers of this process, built if necessary; called when a loop begins."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._usual = _usual(self._loader)
            self._trace = None
            path = os.environ.get(TRACE_VARIABLE, "")
            if path:
                self._trace = _open_trace(self._loader, Path(path), TRACE_LIMIT, next_free=True)
        return (*self._usual, *(() if self._trace is None else (self._trace,)))

    def set_trace(self, path: str | os.PathLike[str] | None, limit: int) -> None:
        """Start a trace to `path`, or end it with None; `limit` is in bytes."""
        self.active_observers()
        if self._trace is not None:
            self._trace.close()
            self._trace = None
        if path is not None:
            self._trace = _open_trace(self._loader, Path(path), limit, next_free=False)

    def close(self) -> None:
        """Close all observers of this process. Idempotent."""
        if self._pid == os.getpid():
            for watcher in (*self._usual, *(() if self._trace is None else (self._trace,))):
                watcher.close()
        self._pid, self._usual, self._trace = 0, [], None


def _usual(loader: ObservedLoader) -> list[Observer]:
    found: list[Observer] = []
    if os.environ.get(PAGE_VARIABLE, "") != "off":
        job = describe(loader.rank, loader.world, loader.source, loader.plan, loader.batch, loader.report)
        page = open_page(job, loader.steps)
        found += [] if page is None else [page]
    if _uses_gpu() and (nvtx := find_tool(LOADER_HOOKS, "nvtx")) is not None:
        ranges: Observer | None = nvtx(sys.modules["torch"])
        found += [] if ranges is None else [ranges]
    return found


def _uses_gpu() -> bool:
    """Returns whether this process has started CUDA. The loader never starts it: a process that forks
    afterwards cannot use it in its children."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())


def _open_trace(loader: ObservedLoader, path: Path, limit: int, *, next_free: bool) -> Observer:
    """Raises ConfigurationError if the trace cannot be written, or `shardmesh-tools` is not installed."""
    if loader.world > 1:
        path = path.with_name(f"{path.stem}.rank{loader.rank}{path.suffix}")
    name = loader.report or loader.source
    open_trace = load_tool(LOADER_HOOKS, "trace", "a trace of steps (loader.trace or MESH_TRACE)")
    found: Observer = open_trace(
        path, rank=loader.rank, world=loader.world, name=name, limit=limit, next_free=next_free
    )
    return found


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """A plan as one rank reads it: what `mesh doctor` measures. It holds no position.

    `batch`: the global batch; `expected`: bytes of a frame, 0 if unknown; `deadline`: in seconds.
    """

    transport: Transport
    plan: PlanInfo
    batch: int
    rank: int
    world: int
    stage: OutputStage
    arena: Arena
    expected: int
    connections: int = 4
    verify: bool = True
    deadline: float = 600.0
    source: str = ""

    def frame_request(self, epoch: int, step: int, *, moved: bool = False) -> Request:
        """Returns the request for a step's rows. With `moved` it has another address, for the same node: a
        frame that the node has prepared under the first address does not answer it."""
        plain = FrameAddress(self.plan.hash, epoch, step, self.rank, self.world, self.batch).request()
        if not moved:
            return plain
        origin = step * self.batch
        other = FrameAddress(self.plan.hash, epoch, 0, self.rank, self.world, self.batch, origin).request()
        return replace(other, meets=plain.meets)


@dataclass(frozen=True, slots=True)
class StepReader:
    """Reads steps of a plan, in epochs or one by one; it holds no position.

    Attributes:
        expected: bytes of a frame; 0 if unknown.
        budget: bytes of the arena.
        deadline: seconds for which an unavailable server is retried.
        verify: whether to verify checksums; "all" includes frames in shared memory.
    """

    transport: Transport
    addresses: FrameRequests
    stage: OutputStage
    meter: Meter
    watchers: LoaderObservers
    expected: int
    budget: int
    connections: int
    deadline: float
    verify: Literal[True, False, "all"]

    def begin_epoch(self, place: Position, steps: range, arena: Arena) -> EpochIterator:
        """Start an iterator over these steps of the position's epoch; the caller closes it."""
        addresses, epoch, origin = self.addresses, place.state.epoch, place.origin
        order = FetchSpec(
            partial(addresses.frame_request, epoch, origin=origin),
            steps,
            self.expected,
            self.verify,
            self.connections,
            self.deadline,
            parts=addresses.split_request(epoch, origin),
            report=None if addresses.reporter is None else partial(addresses.bare_report, epoch, origin),
            series=partial(addresses.bare_request, epoch, origin=origin),
        )
        watchers = self.watchers.active_observers()
        return EpochIterator(self.transport, order, arena, self.stage, self.meter, epoch, watchers)

    def iterate_part(self, place: Position, part: int, parts: int) -> Iterator[Batch]:
        """Iterate over every `parts`-th remaining batch of the position's epoch, from the `part`-th.

        The iterator has its own arena with a share of the budget.
        """
        steps = range(place.step + part, place.steps, parts)
        if not steps:
            return
        least = 3 * self.stage.memory.capacity(self.expected)
        running = self.begin_epoch(place, steps, Arena(max(self.budget // parts, least), self.stage.memory))
        try:
            for _ in steps:
                batch = running.next_batch()
                yield batch
                del batch  # otherwise its slot would be held while waiting for the next batch
        finally:
            running.close()

    def fetch_step(self, epoch: int, step: int, origin: int) -> Batch:
        """Fetch the batch of a step into newly allocated memory."""
        frame = self.transport.call(
            self.addresses.bare_request(epoch, step, origin),
            lambda response: read_frame(response, step, verify=bool(self.verify)),
            self.deadline,
        )
        return self.stage.finish(self.stage.begin(frame, epoch))

    def measured_plan(self, arena: Arena, source: str) -> MeasuredPlan:
        """Returns the plan that `mesh doctor` measures."""
        addresses = self.addresses
        return MeasuredPlan(
            self.transport,
            addresses.plan,
            addresses.batch,
            addresses.rank,
            addresses.world,
            self.stage,
            arena,
            self.expected,
            self.connections,
            bool(self.verify),
            self.deadline,
            source,
        )


_log = logging.getLogger("meshsdk")


@dataclass(frozen=True, slots=True)
class LoaderArguments:
    """The checked arguments of `Loader` except the dataset, with rank and world resolved. `shuffle`: None
    until the order is chosen."""

    global_batch: int
    seed: int
    shuffle: Shuffle | None
    buckets: LengthBuckets | None
    tail: Tail
    on_bad: Literal["substitute", "raise", "mask", "drop"]
    max_bad: float
    rank: int
    world: int
    device: str | None
    output: Literal["torch", "numpy"] | None
    prefetch_bytes: int | None
    share: str | None
    deadline: float
    verify: Literal[True, False, "all"]
    connections: int
    report: str | None
    normalize: Normalize | None
    rows_from: Literal["owners", "one"]
    cache: Literal["auto", "off"] | int

    def plan_spec(self, dataset: Dataset) -> dict[str, Any]:
        """Return the plan's document. Raises ConfigurationError, which names the invalid value."""
        return dataset.spec(
            seed=self.seed,
            shuffle=True if self.shuffle is None else self.shuffle,
            tail=self.tail,
            on_bad=self.on_bad,
            max_bad=self.max_bad,
            batch=self.global_batch,
            buckets=self.buckets,
        )

    def to_kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments that create the same loader in another process."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def checked_arguments(given: Mapping[str, Any]) -> LoaderArguments:
    """Check each argument by itself and return all of them. Raises ConfigurationError."""
    rank, world = find_rank(given["rank"], given["world"])
    found = {
        "rank": rank,
        "world": world,
        "global_batch": checked_batch(given["global_batch"], world),
        "seed": checked_seed(given["seed"]),
        "share": checked_share(given["share"]),
        "deadline": checked_seconds("deadline", given["deadline"]),
        "connections": checked_connections(given["connections"]),
        "verify": checked_verify(given["verify"]),
        "device": device_name(given["device"]),
    }
    return LoaderArguments(**{**given, **found})


def _order_of_state(
    dataset: Dataset, arguments: LoaderArguments, present: PlanInfo, state: Mapping[str, Any] | str | bytes
) -> Order | None:
    """Return the order with which a loader of these arguments has the plan of a state; None if it has that
    plan at present, or more than its order differs."""
    try:
        loaded = LoaderState.from_json(state)
        loaded.check(plan=loaded.plan, snapshot=dataset.snapshot.hash, seed=arguments.seed)
    except (PlanError, TypeError, ValueError):
        return None  # `Position.after_resume` says what is wrong
    if loaded.plan == present.hash:
        return None
    transport = dataset.client.transport
    order = Order(shuffle_of_plan(transport, loaded.plan), "the order of the state")
    changed = replace(arguments, shuffle=order.shuffle)
    found = register_plan(
        transport, dataset.snapshot.hash, changed.plan_spec(dataset), changed.global_batch, changed.deadline
    )
    return order if found.hash == loaded.plan else None


def _dataset_of_state(dataset: Dataset, state: Mapping[str, Any] | str | bytes) -> Dataset:
    """Return the dataset with the snapshot of a state, if an earlier release made that of the same objects;
    else the dataset itself."""
    try:
        wanted = LoaderState.from_json(state).snapshot
    except (PlanError, TypeError, ValueError):
        return dataset  # `Position.after_resume` says what is wrong
    if wanted == dataset.snapshot.hash:
        return dataset
    try:
        found = derive_snapshot(dataset.client.transport, dataset.snapshot, {"pages": False})
    except BusyError:
        raise
    except ServerError:  # a node of an earlier release, or the document of all samples is too large
        return dataset
    given = dataset.client, found, dataset.ops, dataset.epoch, dataset.packing, dataset.mixing
    return type(dataset)(*given) if found.hash == wanted else dataset


def setup_of_state(
    dataset: Dataset,
    arguments: LoaderArguments,
    present: PlanInfo,
    order: Order,
    state: Mapping[str, Any] | str | bytes,
) -> tuple[Dataset, Order] | None:
    """Return the dataset and order with which a loader of these arguments has the plan of a state; None if it
    has that plan at present, or more than these differs."""
    former = _dataset_of_state(dataset, state)
    stated = _order_of_state(former, arguments, present, state) if order.reason else None
    return None if former is dataset and stated is None else (former, stated or order)


def make_setup(
    dataset: Dataset,
    arguments: LoaderArguments,
    meter: Meter,
    report: str,
    reporter: LoaderReporter | None,
) -> tuple[StepReader, Arena]:
    """Register the plan and return its step reader, and the arena for the loader's own iterations.

    `report` is the name of the job, or "".

    Raises ConfigurationError, and the errors of registering: InvalidPlanError, AccessError,
    SnapshotChangedError, DeadlineError.
    """
    transport, spec = dataset.client.transport, arguments.plan_spec(dataset)
    stage = make_stage(arguments.device, arguments.output, arguments.normalize)
    plan = register_plan(transport, dataset.snapshot.hash, spec, arguments.global_batch, arguments.deadline)
    log_notes(plan)
    checked_normalize(arguments.normalize, plan.fields)
    expected = frame_bytes(plan.fields, -(-arguments.global_batch // arguments.world))
    alike = expected > 0 and not arguments.share and not spec.get("pack")
    addresses = FrameRequests(
        plan,
        arguments.global_batch,
        arguments.rank,
        arguments.world,
        arguments.tail,
        arguments.share,
        may_split_frames(arguments.rows_from) and alike,
        reporter,
        checked_cache(arguments.cache),
    )
    slot = stage.memory.capacity(expected)
    arena = Arena(arena_bytes(arguments.prefetch_bytes, slot), stage.memory)
    if expected and (hint := small_arena_hint(arena.budget, slot)):
        _log.warning("%s", hint)
    steps = step_count(plan.positions, arguments.global_batch, 0, arguments.tail)
    observed = ObservedLoader(
        dataset.snapshot.source,
        plan.hash,
        arguments.rank,
        arguments.world,
        arguments.global_batch,
        steps,
        report,
    )
    reader = StepReader(
        transport,
        addresses,
        stage,
        meter,
        LoaderObservers(observed),
        expected,
        arena.budget,
        arguments.connections,
        arguments.deadline,
        arguments.verify,
    )
    return reader, arena
