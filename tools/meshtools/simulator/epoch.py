"""EpochSimulation: jobs train on a mesh while faults happen; simpy is the engine.

Law: windows are cut as the nodes' scheduler cuts them, from the epoch's order. A batch is prepared when the
windows of its samples have been read, and a step begins when its batch has arrived.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import simpy

from meshd.batches.read_ahead.extents import window_end
from meshd.batches.read_ahead.windows import (
    MAX_WINDOW_ROWS,
    MAX_WINDOW_SPAN,
    MIN_WINDOW_BYTES,
    first_size,
    fitting_size,
    has_room,
    next_size,
)
from meshsdk.errors import ConfigurationError
from meshtools.simulator.cluster_model import ClusterModel, added_slots
from meshtools.simulator.object_writes import ObjectWrites
from meshtools.simulator.origin_caches import OriginCaches
from meshtools.simulator.resources import NodeResources
from meshwire.cluster.routes import slot_of
from meshwire.plan.shuffle import BlocksOrder, ShuffleSpec, shuffle_order

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    import numpy.typing as npt

    from meshtools.simulator.scenario import Fault, Scenario
    from meshwire.plan.shuffle import SampleOrder

    Integers = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float64]
    Process = Generator[simpy.Event, Any, None]


@dataclass(slots=True, eq=False)
class _Window:
    """Positions first…end−1. rows: int64[n], the samples in stored order of shards; shards: int64[k]; done:
    float64[k], when each has been read; owners: int64[k], the node that reads each; bytes: of each node."""

    first: int
    end: int
    shards: Integers
    owners: Integers
    done: Floats
    bytes: int


@dataclass(slots=True, eq=False)
class _Reader:
    """The place of a job in an epoch, as a node's scheduler has it."""

    seed: int
    epoch: int
    order: SampleOrder
    next: int
    size: int
    windows: deque[_Window] = field(default_factory=deque)


@dataclass(slots=True)
class JobResult:
    """What one job saw. waits: of each step, in seconds; starts: when its compute began."""

    starts: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    samples: int = 0
    end: float = 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time, for the trace: on a track, from `start`, in seconds."""

    track: str
    name: str
    start: float
    seconds: float


class EpochSimulation:
    """Runs a scenario with data and jobs. `on_progress` gets the completed share of all steps."""

    def __init__(self, scenario: Scenario, on_progress: Callable[[float], None] = lambda _: None) -> None:
        assert scenario.data is not None
        self.scenario, self._on_progress = scenario, on_progress
        mesh, self._data = scenario.mesh, scenario.data
        self.cluster = ClusterModel(mesh)
        joining = sum(fault.count for fault in scenario.faults if fault.kind == "join")
        self._env = simpy.Environment()
        self._dead = np.zeros(mesh.nodes + joining + 1, np.bool_)
        self._dead[-1] = True  # the owner of what nobody has, −1
        self._lost = np.zeros(mesh.slots, np.bool_)  # slots of which all copies are gone
        self._changed = self._env.event()
        self._readers: dict[tuple[int, int], _Reader] = {}
        self._prepared: dict[tuple[int, int], simpy.Process] = {}
        self._steps_done = 0
        count = max(1, int(self._data.samples * scenario.jobs.share))
        per_shard = self._data.samples_per_shard
        self._starts = np.append(np.arange(0, count, per_shard, dtype=np.int64), count)
        self._slots = np.array(
            [slot_of("data", f"shard-{n:07}.tar", mesh.slots) for n in range(self._starts.size - 1)], np.int64
        )
        self._owners, self._holders = self.cluster.read_owners(), self.cluster.owners()
        self.nodes = NodeResources(mesh, self._data, mesh.nodes + joining, self._holders[self._slots])
        self._spread = mesh.nodes / (mesh.copies if scenario.jobs.sharing else 1)
        """Bytes of a window ÷ those of it that a node reads."""
        self.slots_per_node = np.bincount(self.cluster.owners().ravel(), minlength=mesh.nodes)
        self.jobs = [JobResult() for _ in range(scenario.jobs.count)]
        self.spans: list[Span] = []
        shard_bytes = per_shard * self._data.sample_bytes
        self.caches = (
            None
            if scenario.origin is None
            else OriginCaches(scenario.origin, shard_bytes, mesh.nodes + joining)
        )
        self.writes = (
            None
            if scenario.writes is None
            else ObjectWrites(self._env, mesh, scenario.writes, self.cluster, self.nodes, self._dead)
        )
        self.repairs: list[tuple[str, float, float]] = []
        """What was copied to nodes: (why, bytes, seconds)."""

    def __repr__(self) -> str:
        return f"<EpochSimulation {self.scenario.name}>"

    @property
    def total_steps(self) -> int:
        """Steps of all jobs and epochs."""
        jobs = self.scenario.jobs
        return jobs.count * jobs.epochs * -(-int(self._starts[-1]) // jobs.batch)

    def run(self) -> None:
        """Run until all jobs have ended.

        Raises ConfigurationError if they cannot: all copies of some data are on lost nodes.
        """
        training = [self._env.process(self._train(number)) for number in range(self.scenario.jobs.count)]
        for fault in self.scenario.faults:
            self._env.process(self._fault(fault))
        if self.writes is not None:
            self._env.process(self.writes.run())
        try:
            self._env.run(until=self._env.all_of(training))
        except RuntimeError:  # no event is left
            raise ConfigurationError(
                "the jobs wait for data of which all copies are lost: use more racks or copies"
            ) from None

    def _train(self, number: int) -> Process:
        jobs, result, env = self.scenario.jobs, self.jobs[number], self._env
        for epoch in range(jobs.epochs):
            seed = self.scenario.seed + (0 if jobs.sharing else number)
            reader = self._reader(seed, epoch)
            steps = -(-reader.order.n // jobs.batch)
            ready: deque[simpy.Process] = deque()
            for step in range(steps):
                while len(ready) < min(jobs.prefetch, steps - step):
                    ready.append(env.process(self._batch(reader, seed, epoch, step + len(ready))))
                began = env.now
                yield ready.popleft()
                result.waits.append(env.now - began)
                result.starts.append(env.now)
                if env.now - began > 1e-3:
                    self.spans.append(Span(f"job {number}", "wait", began, env.now - began))
                self.spans.append(Span(f"job {number}", "compute", env.now, jobs.step_seconds))
                yield env.timeout(jobs.step_seconds)
                result.samples += min(jobs.batch, reader.order.n - step * jobs.batch)
                self._steps_done += 1
                self._on_progress(self._steps_done / self.total_steps)
        result.end = env.now

    def _reader(self, seed: int, epoch: int) -> _Reader:
        """Return the reader of an epoch, which all jobs of this seed have in common."""
        if (found := self._readers.get((seed, epoch))) is not None:
            return found
        jobs = self.scenario.jobs
        spec = ShuffleSpec(jobs.shuffle, jobs.block_shards if jobs.shuffle == "blocks" else 0)
        order = shuffle_order(spec, self._starts, seed, epoch)
        if self.caches is not None:
            self._plan(self.caches, spec, seed, epoch)
        size = first_size(order, jobs.batch / self._spread)
        self._readers[seed, epoch] = reader = _Reader(seed, epoch, order, 0, size)
        return reader

    def _plan(self, caches: OriginCaches, spec: ShuffleSpec, seed: int, epoch: int) -> None:
        """Tell the caches of the nodes the shards of this epoch and the next, in order."""
        both = []
        for each in (epoch, epoch + 1):
            order = shuffle_order(spec, self._starts, seed, each)
            ends = [*order.window_ends.tolist()] if isinstance(order, BlocksOrder) else [order.n]
            for first, end in pairwise([0, *(end for end in ends if end)]):
                samples = order.samples_at(np.arange(first, end, dtype=np.int64))
                both.append(np.unique(np.searchsorted(self._starts, samples, side="right") - 1))
        shards = np.concatenate(both)
        caches.plan(f"{seed} {epoch}", shards, self._owners[self._slots[shards]])

    def _batch(self, reader: _Reader, seed: int, epoch: int, step: int) -> Process:
        """Take the batch of a step from the request to its arrival; jobs that share have it prepared once."""
        env, jobs = self._env, self.scenario.jobs
        yield env.timeout(self.scenario.mesh.request_seconds)
        first = step * jobs.batch
        end = min(first + jobs.batch, reader.order.n)
        key = (seed, step + epoch * (1 << 40))
        made = self._prepared.get(key)
        if made is None:
            made = env.process(self._read_rows(reader, first, end))
            if jobs.sharing:
                self._prepared[key] = made
            computed = True
        else:
            computed = False
        owners = yield made
        if jobs.sharing:
            owners = np.full(owners.size, self._builder(epoch, step))
        sent = self.nodes.prepare(env.now, owners, computed=computed)
        size = (end - first) * float(self._data.delivered_bytes_per_sample or self._data.sample_bytes)
        yield env.timeout(max(sent - env.now, size / jobs.trainer_bytes_per_second))

    def _builder(self, epoch: int, step: int) -> int:
        """Return the node that prepares the batch of a step, whole: any, by chance, that answers."""
        there = np.flatnonzero(~self._dead[: self.scenario.mesh.nodes])
        return int(there[np.random.default_rng((self.scenario.seed, epoch, step)).integers(there.size)])

    def _read_rows(self, reader: _Reader, first: int, end: int) -> Generator[simpy.Event, Any, Integers]:
        """Wait until the rows first…end−1 have been read, and return the node of each, int64[rows]."""
        env = self._env
        self._extend(reader, first, end)
        samples = reader.order.samples_at(np.arange(first, end, dtype=np.int64))
        shards = np.searchsorted(self._starts, samples, side="right") - 1
        parts = [each for each in reader.windows if each.first < end and each.end > first]
        while True:
            owners, done = self._rows(parts, first, shards)
            # A row waits for its own bytes; whole batches, for those of their windows.
            waits = [part.done for part in parts] if self.scenario.jobs.sharing else [done]
            last = max(float(each.max()) for each in waits)
            if last > env.now:
                yield env.timeout(last - env.now)
            gone = self._dead[owners]
            if not gone.any():
                break
            named = self._owners[self._slots[shards[gone]]]
            if ((named == owners[gone]) | (named < 0)).any():
                yield self._changed  # the map still names nodes that do not answer, or none
            self._read_again(parts)
        return owners

    @staticmethod
    def _rows(parts: list[_Window], first: int, shards: Integers) -> tuple[Integers, Floats]:
        """Return the node of each row of a batch, and when its shard's part of the window has been read."""
        owners, done = np.empty(shards.size, np.int64), np.empty(shards.size)
        for part in parts:
            rows = slice(max(0, part.first - first), part.end - first)
            place = np.searchsorted(part.shards, shards[rows])
            owners[rows], done[rows] = part.owners[place], part.done[place]
        return owners, done

    def _share(self) -> int:
        """Return the bytes that windows of one job may hold on each node."""
        mesh, jobs = self.scenario.mesh, self.scenario.jobs
        readers = 1 if jobs.sharing else jobs.count
        return int(max(mesh.read_ahead_bytes, 2 * MIN_WINDOW_BYTES) // readers)

    def _extend(self, reader: _Reader, first: int, end: int) -> None:
        """Drop windows that are consumed, and add others while they fit."""
        batch, share = self.scenario.jobs.batch, self._share()
        while reader.windows and reader.windows[0].end <= first - 2 * batch:
            reader.windows.popleft()
        while reader.next < reader.order.n and (
            reader.next < end
            or has_room(reader.order, [each.bytes for each in reader.windows], reader.size, share)
        ):
            self._add_window(reader, share)
        if reader.next >= reader.order.n:  # the next epoch's first window is read in any case
            coming = self._reader(reader.seed, reader.epoch + 1)
            if not coming.next:
                self._add_window(coming, share)

    def _add_window(self, reader: _Reader, share: int) -> None:
        window = self._cut(reader, fitting_size(reader.size, share))
        reader.windows.append(window)
        reader.next, reader.size = window.end, next_size(reader.order, reader.size, share)

    def _cut(self, reader: _Reader, size: int) -> _Window:
        """Cut the next window, of about `size` bytes on each node, and queue its reads. All nodes have an
        equal share here, so their windows end at the same positions."""
        order, first, each = reader.order, reader.next, self._data.sample_bytes
        nodes = self._spread
        rows = int(min(int(1.25 * size / each) + 1, MAX_WINDOW_ROWS) * nodes)
        last = first + min(rows, MAX_WINDOW_SPAN, order.n - first)
        ends = order.window_ends if isinstance(order, BlocksOrder) else None
        positions = np.arange(first, last, dtype=np.int64)
        lengths = np.full(positions.size, each, np.int64)
        least, most = int(MIN_WINDOW_BYTES * nodes), int(size * nodes)
        end = window_end(positions, lengths, least, most, first, last, ends)
        samples = np.sort(order.samples_at(np.arange(first, end, dtype=np.int64)))
        of_sample = np.searchsorted(self._starts, samples, side="right") - 1
        shards, counts = np.unique(of_sample, return_counts=True)
        inside, owners = samples - self._starts[of_sample], self._owners[self._slots[shards]]
        done = np.full(shards.size, self._env.now)
        every = [owners]
        if self.scenario.jobs.sharing:  # whole batches: each node reads all that it has
            copies = self._holders[self._slots[shards]]
            every += [np.where(self._dead[column] | (column == owners), -1, column) for column in copies.T]
        for readers in every:
            there = readers >= 0
            read = self.nodes.read_shards(
                self._env.now,
                shards[there],
                inside[np.repeat(there, counts)],
                np.cumsum(counts[there]),
                readers[there],
                self._arrival(reader),
            )
            done[there] = np.maximum(done[there], read)
        return _Window(first, end, shards, owners, done, int((end - first) * each / nodes))

    def _arrival(self, reader: _Reader) -> Callable[[int, int], float] | None:
        """Return what tells when a shard is on a node, if shards come from an origin."""
        if (caches := self.caches) is None:
            return None
        name, now = f"{reader.seed} {reader.epoch}", self._env.now
        return lambda node, shard: caches.fetch(name, node, shard, now)

    def _read_again(self, parts: list[_Window]) -> None:
        """Read the shards of windows whose nodes are gone from their present owners, whole."""
        size = self._data.samples_per_shard
        for part in parts:
            lost = np.flatnonzero(self._dead[part.owners])
            owners = self._owners[self._slots[part.shards[lost]]]
            lost, owners = lost[owners >= 0], owners[owners >= 0]
            rows = np.tile(np.arange(size, dtype=np.int64), lost.size)
            ends = np.arange(1, lost.size + 1) * size
            part.done[lost] = self.nodes.read_shards(self._env.now, part.shards[lost], rows, ends, owners)
            part.owners[lost] = owners

    def _map_changed(self) -> None:
        self._owners = np.where(self._lost, -1, self.cluster.read_owners())
        changed, self._changed = self._changed, self._env.event()
        changed.succeed()

    def _fault(self, fault: Fault) -> Process:
        yield self._env.timeout(fault.at_seconds)
        numbers = range(fault.first, fault.first + fault.count)
        began = self._env.now
        if fault.kind == "slow":
            self.nodes.slow[list(numbers)] *= fault.factor
            yield self._env.timeout(fault.seconds)
            self.nodes.slow[list(numbers)] /= fault.factor
        elif fault.kind == "lose":
            yield from self._lose(numbers)
        elif fault.kind == "partition":
            yield from self._cut_off(numbers, fault.seconds)
        elif fault.kind == "restart":
            for first in range(0, fault.count, fault.at_once):
                yield from self._restart(numbers[first : first + fault.at_once], fault.seconds)
        else:
            before = self.cluster.owners()
            self.cluster.add(fault.count)
            self.cluster.complete_all((yield from self._copy(f"{fault.count} nodes joined", before)))
            self._map_changed()
        self.spans.append(Span("faults", f"{fault.kind} {fault.count} nodes", began, self._env.now - began))

    def _lose(self, numbers: range) -> Process:
        mesh = self.scenario.mesh
        self._dead[list(numbers)] = True
        yield self._env.timeout(mesh.lease_seconds)
        self.cluster.mark_away(numbers)
        self._map_changed()
        yield self._env.timeout(mesh.lost_seconds)
        before = self.cluster.owners()
        self._lost |= self._dead[before].all(axis=1)
        self.cluster.give_up(numbers)
        self.cluster.complete_all((yield from self._copy(f"{len(numbers)} nodes lost", before)))
        self._map_changed()

    def _cut_off(self, numbers: range, seconds: float) -> Process:
        """Nodes do not answer for `seconds`; then they copy what was written meanwhile, and are complete."""
        mesh, nodes = self.scenario.mesh, list(numbers)
        self._dead[nodes] = True
        yield self._env.timeout(min(seconds, mesh.lease_seconds))
        if seconds <= mesh.lease_seconds:
            self._dead[nodes] = False
            self._map_changed()  # nobody has marked them; requests that wait go on
            return
        self.cluster.mark_away(numbers)
        self._map_changed()
        yield self._env.timeout(seconds - mesh.lease_seconds)
        if self.writes is not None:
            missed = self.writes.missed_bytes[nodes]
            took = float(missed.max()) / mesh.repair_bytes_per_second
            self.repairs.append((f"{len(nodes)} nodes were cut off", float(missed.sum()), took))
            yield self._env.timeout(took)
            self.writes.missed_bytes[nodes] = 0
        self._dead[nodes] = False
        self.cluster.bring_back(numbers)
        self._map_changed()

    def _restart(self, numbers: range, seconds: float) -> Process:
        """Restart a group: it leaves the map at once, as a node that ends by SIGTERM does."""
        self.cluster.mark_away(numbers)
        self._map_changed()
        self._dead[list(numbers)] = True
        yield self._env.timeout(seconds)
        self._dead[list(numbers)] = False
        self.cluster.bring_back(numbers)
        self._map_changed()

    def _copy(self, why: str, before: Integers) -> Generator[simpy.Event, Any, Floats]:
        """Copy what nodes own now and did not before, at the rate of repairs; their disks are slower then.
        Return how long it takes each, float64[nodes]."""
        mesh, data = self.scenario.mesh, self._data
        slot_bytes = data.samples * data.sample_bytes / mesh.slots
        gained = added_slots(before, self.cluster.owners(), self.nodes.slow.size) * slot_bytes
        seconds = float(gained.max()) / mesh.repair_bytes_per_second
        rate = mesh.disks_per_node * mesh.disk_bytes_per_second
        slower = 1 / max(0.05, 1 - 2 * mesh.repair_bytes_per_second / rate)
        busy = np.flatnonzero(gained)
        self.nodes.slow[busy] *= slower
        self.repairs.append((why, float(gained.sum()), seconds))
        yield self._env.timeout(seconds)
        self.nodes.slow[busy] /= slower
        return np.array([size / mesh.repair_bytes_per_second for size in gained.tolist()])
