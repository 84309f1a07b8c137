"""EpochSimulation: jobs train on a mesh while faults happen; simpy is the engine.

Law: a batch is prepared when its rows have been read (`read_ahead`), and a step begins when its batch has
arrived. A write is acknowledged when all nodes of its write set have it, and repeated while one of them does
not answer. A disk takes it after the read in progress: reads ahead are queued one at a time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import simpy

from meshsdk.errors import ConfigurationError
from meshtools.simulator.cluster_model import ClusterModel
from meshtools.simulator.origin_caches import OriginCaches
from meshtools.simulator.read_ahead import ReadAhead
from meshtools.simulator.repairs import Repair, describe, plan_copies
from meshtools.simulator.resources import NodeResources
from meshwire.cluster.routes import batch_nodes, frame_address, rendezvous_order, routes, slot_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    import numpy.typing as npt

    from meshtools.simulator.read_ahead import EpochReads
    from meshtools.simulator.scenario import Fault, Scenario
    from meshwire.cluster.cluster_map import ClusterMap

    Integers = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float64]
    Process = Generator[simpy.Event, Any, None]
    from collections.abc import Generator

    from meshtools.simulator.scenario import Mesh, Writes


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


BUCKET = "data"


def shard_key(number: int) -> str:
    """Return the key of a shard, in BUCKET."""
    return f"shard-{number:07}.tar"


class EpochSimulation:
    """Runs a scenario with data and jobs. `on_progress` gets the completed share of all steps; `cluster`: the
    map of a mesh that exists, which places the data as there."""

    def __init__(
        self,
        scenario: Scenario,
        on_progress: Callable[[float], None] = lambda _: None,
        cluster: ClusterMap | None = None,
    ) -> None:
        assert scenario.data is not None
        self.scenario, self._on_progress = scenario, on_progress
        mesh, self._data = scenario.mesh, scenario.data
        self.cluster = ClusterModel(mesh, cluster)
        joining = sum(fault.count for fault in scenario.faults if fault.kind == "join")
        self._env = simpy.Environment()
        self._dead = np.zeros(mesh.nodes + joining + 1, np.bool_)
        self._dead[-1] = True  # the owner of what nobody has, −1
        self._lost = np.zeros(mesh.slots, np.bool_)  # slots of which all copies are gone
        self._prepared: dict[tuple[int, int], simpy.Process] = {}
        self._steps_done = 0
        count = max(1, int(self._data.samples * scenario.jobs.share))
        per_shard = self._data.samples_per_shard
        self._samples = count
        starts = np.append(np.arange(0, count, per_shard, dtype=np.int64), count)
        keys = (shard_key(number) for number in range(starts.size - 1))
        slots = np.array([slot_of(BUCKET, key, mesh.slots) for key in keys], np.int64)
        holders = self.cluster.owners()
        costs = self._data
        if scenario.jobs.sharing:  # whole batches wait for windows as a whole, not for scattered rows
            costs = replace(costs, cpu_seconds_per_seek=0.0)
        self.nodes = NodeResources(mesh, costs, mesh.nodes + joining, holders[slots])
        self.slots_per_node = np.bincount(holders.ravel(), minlength=mesh.nodes)
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
        self._reads = ReadAhead(
            self._env, scenario, starts, slots, self.nodes, self._dead, self.caches, self._note_window
        )
        self._reads.place(self.cluster.read_owners(), holders)
        self.repairs: list[Repair] = []

    def __repr__(self) -> str:
        return f"<EpochSimulation {self.scenario.name}>"

    @property
    def total_steps(self) -> int:
        """Steps of all jobs and epochs."""
        jobs = self.scenario.jobs
        return jobs.count * jobs.epochs * -(-self._samples // jobs.batch)

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
            reads = self._reads.epoch(seed, epoch)
            steps = -(-reads.order.n // jobs.batch)
            ready: deque[simpy.Process] = deque()
            for step in range(steps):
                while len(ready) < min(jobs.prefetch, steps - step):
                    ready.append(env.process(self._batch(reads, step + len(ready))))
                began = env.now
                yield ready.popleft()
                result.waits.append(env.now - began)
                result.starts.append(env.now)
                if env.now - began > 1e-3:
                    self.spans.append(Span(f"job {number}", "wait", began, env.now - began))
                self.spans.append(Span(f"job {number}", "compute", env.now, jobs.step_seconds))
                yield env.timeout(jobs.step_seconds)
                result.samples += min(jobs.batch, reads.order.n - step * jobs.batch)
                self._steps_done += 1
                self._on_progress(self._steps_done / self.total_steps)
        result.end = env.now

    def _batch(self, reads: EpochReads, step: int) -> Process:
        """Take the batch of a step from the request to its arrival; jobs that share have it prepared once."""
        env, jobs = self._env, self.scenario.jobs
        yield env.timeout(self.scenario.mesh.request_seconds)
        first = step * jobs.batch
        end = min(first + jobs.batch, reads.order.n)
        if jobs.sharing:
            key = (reads.seed, step + reads.epoch * (1 << 40))
            if not (again := key in self._prepared):
                self._prepared[key] = env.process(self._make(reads, step, first, end))
            owners = yield self._prepared[key]
            sent = self.nodes.deliver(env.now, owners, again=again)
        else:
            owners = yield from self._reads.parts(reads, first, end)
            sent = self.nodes.prepare(env.now, owners)
        size = (end - first) * float(self._data.delivered_bytes_per_sample or self._data.sample_bytes)
        yield env.timeout(max(sent - env.now, size / jobs.trainer_bytes_per_second))

    def _make(
        self, reads: EpochReads, step: int, first: int, end: int
    ) -> Generator[simpy.Event, Any, Integers]:
        """Read and prepare the rows first…end−1 on one node. Return the node of each, int64[rows]."""
        owners = yield from self._reads.whole(reads, first, end, self._builder(reads, step))
        yield self._env.timeout(max(0.0, self.nodes.compute(self._env.now, owners) - self._env.now))
        return owners

    def _builder(self, reads: EpochReads, step: int) -> int:
        """Return the node that prepares the batch of a step, whole: the first by rendezvous that answers."""
        address = frame_address(str(reads.seed), reads.epoch, step, 0, 1, self.scenario.jobs.batch, 0)
        there = rendezvous_order(batch_nodes(self.cluster.map), address)
        numbers = [self.cluster.number_of(node.node_id) for node in there]
        return next((number for number in numbers if not self._dead[number]), numbers[0])

    def _note_window(self, node: int, name: str, start: float, seconds: float) -> None:
        self.spans.append(Span(f"disks of {self.cluster.names[node]}", name, start, seconds))

    def _map_changed(self) -> None:
        owners = np.where(self._lost, -1, self.cluster.read_owners())
        self._reads.place(owners, self.cluster.owners())

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
        since = self._env.now - mesh.lost_seconds - mesh.lease_seconds
        self.cluster.complete_all((yield from self._copy(f"{len(numbers)} nodes lost", before, since)))
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
            size = float(missed.sum())
            why, short = f"{len(nodes)} nodes were cut off", seconds + took
            self.repairs.append(Repair(why, size, took, short_bytes=size, short_seconds=short))
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

    def _copy(
        self, why: str, before: Integers, short_since: float | None = None
    ) -> Generator[simpy.Event, Any, Floats]:
        """Copy what nodes own now and did not before, at the rate of repairs; their disks are slower then.
        `short_since`: since when copies are missing. Return how long it takes each node, float64[nodes]."""
        mesh, dead = self.scenario.mesh, self._dead.copy()
        slot_bytes = (self._data.samples * self._data.sample_bytes + mesh.stored_bytes) / mesh.slots
        plan = plan_copies(before, self.cluster.owners(), dead)
        times = plan.seconds(mesh, slot_bytes)
        seconds = float(times.max(initial=0.0))
        done = describe(why, plan, mesh, slot_bytes, seconds)
        if short_since is not None:
            missing = float((dead[before] & (before >= 0)).sum() * slot_bytes)
            done = replace(done, short_bytes=missing, short_seconds=self._env.now - short_since + seconds)
        self.repairs.append(done)
        moved = (plan.received() + plan.sent()) * slot_bytes
        rate = mesh.disks_per_node * mesh.disk_bytes_per_second
        slower = 1 / np.maximum(0.05, 1 - moved / max(1e-9, seconds) / rate)
        self.nodes.slow *= slower
        yield self._env.timeout(seconds)
        self.nodes.slow /= slower
        return times


class ObjectWrites:
    """Writes of a scenario. `dead`: bool[nodes], the nodes that do not answer. seconds: of each write, until
    it was acknowledged; missed_bytes: float64[nodes], what was written while a node was away."""

    def __init__(
        self,
        env: simpy.Environment,
        mesh: Mesh,
        writes: Writes,
        cluster: ClusterModel,
        nodes: NodeResources,
        dead: npt.NDArray[np.bool_],
    ) -> None:
        self._env, self._mesh, self._writes = env, mesh, writes
        self._cluster, self._nodes, self._dead = cluster, nodes, dead
        self._version = 0
        self._sets: list[tuple[int, ...]] = [()] * mesh.slots
        self.seconds: list[float] = []
        self.missed_bytes = np.zeros(dead.size)

    def __repr__(self) -> str:
        return f"<ObjectWrites, {len(self.seconds)} acknowledged>"

    def run(self) -> Generator[simpy.Event, Any, None]:
        """Begin writes at the rate of the scenario, for ever."""
        number = 0
        while True:
            yield self._env.timeout(self._writes.object_bytes / self._writes.bytes_per_second)
            self._env.process(self._write(number))
            number += 1

    def write_set(self, slot: int) -> tuple[int, ...]:
        """Return the numbers of the nodes that a write of this slot goes to, by the present map."""
        cluster = self._cluster.map
        if self._version != cluster.version:
            number = {name: place for place, name in enumerate(self._cluster.names)}
            for route, slots in routes(cluster, self._mesh.copies).slots_by_route():
                members = tuple(number[node.node_id] for node in route.write_set)
                for each in slots.tolist():
                    self._sets[each] = members
            self._version = cluster.version
        return self._sets[slot]

    def _write(self, number: int) -> Generator[simpy.Event, Any, None]:
        env, size, began = self._env, self._writes.object_bytes, self._env.now
        slot = slot_of("written", f"object-{number:09}", self._mesh.slots)
        yield env.timeout(self._mesh.request_seconds)
        while not (members := self.write_set(slot)) or self._dead[list(members)].any():
            yield env.timeout(self._writes.retry_seconds)
        done = self._nodes.write_object(env.now, members, number, size)
        for owner in self._cluster.target_owners(slot):
            if owner not in members:
                self.missed_bytes[owner] += size
        yield env.timeout(done - env.now)
        self.seconds.append(env.now - began)
