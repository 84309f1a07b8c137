"""ReadAhead: what nodes read ahead of the jobs' batches, and when the rows of a batch are in memory.

Law: windows are cut by the code of the nodes' scheduler, from the epoch's order. In a mesh of at most
OWN_WINDOWS nodes each has windows of its own, which follow the batches that it is asked for. In a larger one,
shares are taken as alike, and windows of all nodes end at the same positions; also where shards come from an
origin.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshd.batches.read_ahead.windows import (
    MAX_WINDOW_ROWS,
    MAX_WINDOW_SPAN,
    MIN_WINDOW_BYTES,
    cut_positions,
    first_size,
    fitting_size,
    has_room,
    next_size,
    window_end,
)
from meshwire.plan.shuffle import BlocksOrder, ShuffleSpec, shuffle_order

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    import numpy.typing as npt
    import simpy

    from meshtools.simulator.origin_caches import OriginCaches
    from meshtools.simulator.resources import NodeResources
    from meshtools.simulator.scenario import Scenario
    from meshwire.plan.shuffle import SampleOrder

    Integers = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float64]
    Wait = Generator[simpy.Event, Any, Integers]

OWN_WINDOWS: Final = 8
CHUNK, KEPT_CHUNKS = 1 << 16, 128  # positions of an order that are kept, for all nodes
BEHIND: Final = 2  # batches that a node keeps behind the latest request
REACH: Final = 32  # batches: a node that was not asked for so many begins again, a little before the request
IN_FLIGHT: Final = 4
IDLE_SECONDS: Final = (
    5.0  # a reader that rests for longer, and for its own pauses, holds no share of the memory
)
WAIT_SECONDS: Final = 2.0  # how long rows for other nodes wait for a window that brings them


@dataclass(slots=True, eq=False)
class _Window:
    """Positions first…end−1. shards: int64[k], in stored order; owners: int64[k], the node that reads each;
    done: float64[k], when it has been read; bytes: of each node."""

    first: int
    end: int
    shards: Integers
    owners: Integers
    done: Floats
    bytes: int


@dataclass(slots=True, eq=False)
class _Cursor:
    """The place of a node, or of all, in an epoch, as a scheduler has it."""

    size: int
    next: int = 0
    furthest: int = 0
    used: float = 0.0
    pause: float = 0.0
    started: bool = False
    windows: deque[_Window] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class EpochReads:
    """The reads of an epoch, for all jobs of its seed. cursors: one for each node, or one for all; again: of
    shards whose node was gone, the node that read them since, and when they were there; chunks: samples and
    shards at CHUNK positions each."""

    seed: int
    epoch: int
    order: SampleOrder
    cursors: list[_Cursor]
    again: dict[int, tuple[int, float]] = field(default_factory=dict)
    chunks: dict[int, tuple[Integers, Integers]] = field(default_factory=dict)


class ReadAhead:
    """Reads of all jobs. starts: int64[shards + 1], the first sample of each; slots: int64[shards]; dead:
    bool[nodes + 1], kept by the simulation. `on_window(node, name, start, seconds)` gets each window of a
    node."""

    def __init__(
        self,
        env: simpy.Environment,
        scenario: Scenario,
        starts: Integers,
        slots: Integers,
        nodes: NodeResources,
        dead: npt.NDArray[np.bool_],
        caches: OriginCaches | None,
        on_window: Callable[[int, str, float, float], None],
    ) -> None:
        assert scenario.data is not None
        self._env, self._scenario, self._data = env, scenario, scenario.data
        self._starts, self._slots, self._nodes, self._dead = starts, slots, nodes, dead
        self._caches, self._on_window = caches, on_window
        self._epochs: dict[tuple[int, int], EpochReads] = {}
        self._own_windows = scenario.mesh.nodes <= OWN_WINDOWS and caches is None
        self._read_until = np.zeros(dead.size)  # when the windows of each node that are queued have been read
        mesh = scenario.mesh
        self._spread = mesh.nodes / (mesh.copies if scenario.jobs.sharing else 1)
        """Bytes of a window ÷ those of it that a node reads, where all read as much."""
        self.changed = env.event()

    def __repr__(self) -> str:
        return f"<ReadAhead of {self._scenario.name}, {len(self._epochs)} epochs>"

    def place(self, owners: Integers, holders: Integers) -> None:
        """Use a new placement, and wake batches that wait for one. owners: int64[slots], the node that is
        read, −1 for none; holders: int64[slots, copies]."""
        self._owners, self._holders = owners, holders
        if self._own_windows:
            numbers = np.arange(self._dead.size - 1)
            read = holders if self._scenario.jobs.sharing else owners[:, None]
            self._own = (read[:, :, None] == numbers).any(axis=1).T  # bool[nodes, slots]
            self._fractions = self._own.mean(axis=1)
        changed, self.changed = self.changed, self._env.event()
        changed.succeed()

    def epoch(self, seed: int, epoch: int) -> EpochReads:
        """Return the reads of an epoch, which all jobs of this seed have in common."""
        if (found := self._epochs.get((seed, epoch))) is not None:
            return found
        jobs = self._scenario.jobs
        spec = ShuffleSpec(jobs.shuffle, jobs.block_shards if jobs.shuffle == "blocks" else 0)
        order = shuffle_order(spec, self._starts, seed, epoch)
        if self._caches is not None:
            self._plan(self._caches, spec, seed, epoch)
        shares = self._fractions.tolist() if self._own_windows else [1 / self._spread]
        cursors = [_Cursor(first_size(order, jobs.batch * share)) for share in shares]
        self._epochs[seed, epoch] = found = EpochReads(seed, epoch, order, cursors)
        return found

    def _plan(self, caches: OriginCaches, spec: ShuffleSpec, seed: int, epoch: int) -> None:
        """Tell the caches of the nodes the shards of this epoch and the next, in order."""
        both = []
        for each in (epoch, epoch + 1):
            order = shuffle_order(spec, self._starts, seed, each)
            ends = [*order.window_ends.tolist()] if isinstance(order, BlocksOrder) else [order.n]
            for first, end in pairwise([0, *(end for end in ends if end)]):
                both.append(
                    np.unique(self._shards_of(order.samples_at(np.arange(first, end, dtype=np.int64))))
                )
        shards = np.concatenate(both)
        caches.plan(f"{seed} {epoch}", shards, self._owners[self._slots[shards]])

    def _shards_of(self, samples: Integers) -> Integers:
        return samples // self._data.samples_per_shard

    # --- batches ------------------------------------------------------------------------------------

    def parts(self, reads: EpochReads, first: int, end: int) -> Wait:
        """Wait until the rows first…end−1 have been read, each by its node; return these, int64[rows]."""
        for number in range(len(reads.cursors)):
            if not (self._own_windows and self._dead[number]):
                self._request(reads, number, first, end)
        shards = self._shards_of(reads.order.samples_at(np.arange(first, end, dtype=np.int64)))
        while True:
            owners, done = self._rows(reads, first, end, shards)
            # A row waits for its own bytes; whole batches, for those of their windows.
            windows = self._windows(reads.cursors[0], first, end) if self._scenario.jobs.sharing else []
            yield from self._until(max([float(done.max()), *(float(each.done.max()) for each in windows)]))
            gone = self._dead[owners]
            if not gone.any():
                return owners
            if self._dead[self._owners[self._slots[shards[gone]]]].any():
                yield self.changed  # the map still names nodes that do not answer, or none
            else:
                self._read_again(reads, np.unique(shards[gone]))

    def whole(self, reads: EpochReads, first: int, end: int, builder: int) -> Wait:
        """Wait until the rows first…end−1 are on `builder`, which reads what it has, and then has others send
        the rest. Return the node of each row, int64[rows]."""
        if not self._own_windows:
            owners = yield from self.parts(reads, first, end)
            return np.full(owners.size, builder)
        self._request(reads, builder, first, end)
        windows = self._windows(reads.cursors[builder], first, end)
        yield from self._until(
            max((float(each.done.max()) for each in windows if each.done.size), default=0.0)
        )
        samples = np.sort(reads.order.samples_at(np.arange(first, end, dtype=np.int64)))
        shards = self._shards_of(samples)
        samples, shards = (rows[~self._own[builder, self._slots[shards]]] for rows in (samples, shards))
        for shard in np.unique(shards).tolist():
            while (owner := self._sender(shard)) < 0:
                yield self.changed
            inside = samples[shards == shard] - self._starts[shard]
            yield from self._until(self._sent_by(reads, owner, shard, inside, first, end))
        return np.full(end - first, builder)

    def _sender(self, shard: int) -> int:
        """Return the node that is asked for rows of a shard; −1 if none that has it answers."""
        slot = self._slots[shard]
        known = [int(self._owners[slot]), *self._holders[slot].tolist()]
        return next((node for node in known if node >= 0 and not self._dead[node]), -1)

    def _sent_by(
        self, reads: EpochReads, owner: int, shard: int, inside: Integers, first: int, end: int
    ) -> float:
        """Return when `owner` has rows of a shard: with its window; if none has been planned, it reads them
        by themselves, between reads of windows."""
        now = self._env.now
        for window in self._windows(reads.cursors[owner], first, end):
            place = int(np.searchsorted(window.shards, shard))
            if place < window.shards.size and window.shards[place] == shard:
                return min(float(window.done[place]), now + WAIT_SECONDS)
        one = np.array([shard]), inside, np.array([inside.size]), np.array([owner])
        return float(self._nodes.read_shards(now, *one, between=True)[0])

    def _until(self, when: float) -> Generator[simpy.Event, Any, None]:
        if when > self._env.now:
            yield self._env.timeout(when - self._env.now)

    @staticmethod
    def _windows(cursor: _Cursor, first: int, end: int) -> list[_Window]:
        return [each for each in cursor.windows if each.first < end and each.end > first]

    def _rows(self, reads: EpochReads, first: int, end: int, shards: Integers) -> tuple[Integers, Floats]:
        """Return the node of each row of a batch, −1 if nobody reads it, and when its shard's part of the
        window has been read."""
        owners, done = np.full(shards.size, -1, np.int64), np.zeros(shards.size)
        for cursor in reads.cursors:
            for part in self._windows(cursor, first, end):
                rows = np.arange(max(0, part.first - first), min(shards.size, part.end - first))
                place = np.searchsorted(part.shards, shards[rows])
                place[place == part.shards.size] = 0
                if part.shards.size:
                    rows, place = (each[part.shards[place] == shards[rows]] for each in (rows, place))
                    owners[rows], done[rows] = part.owners[place], part.done[place]
        if reads.again:
            for shard in np.unique(shards[self._dead[owners]]).tolist():
                owners[shards == shard], done[shards == shard] = reads.again.get(shard, (-1, 0.0))
        return owners, done

    def _read_again(self, reads: EpochReads, shards: Integers) -> None:
        """Read shards whose nodes are gone from their present owners, whole."""
        size, owners = self._data.samples_per_shard, self._owners[self._slots[shards]]
        rows = np.tile(np.arange(size, dtype=np.int64), shards.size)
        ends = np.arange(1, shards.size + 1) * size
        done = self._nodes.read_shards(self._env.now, shards, rows, ends, owners)
        reads.again |= zip(shards.tolist(), zip(owners.tolist(), done.tolist(), strict=True), strict=True)

    # --- windows ------------------------------------------------------------------------------------

    def _request(self, reads: EpochReads, number: int, first: int, end: int) -> None:
        """Note that a node is asked for a batch: drop windows that are consumed, add others that fit."""
        batch, cursor, now = self._scenario.jobs.batch, reads.cursors[number], self._env.now
        if first >= cursor.next + REACH * batch:
            share = self._fractions[number] if self._own_windows else 1 / self._spread
            size = first_size(reads.order, batch * share)
            reads.cursors[number] = cursor = _Cursor(size, max(0, first - IN_FLIGHT * batch), used=now)
        cursor.pause = max(cursor.pause, now - cursor.used) if cursor.started else 0.0
        cursor.furthest, cursor.used, cursor.started = max(cursor.furthest, first), now, True
        while cursor.windows and cursor.windows[0].end <= cursor.furthest - BEHIND * batch:
            cursor.windows.popleft()
        share = self._share(number)
        while cursor.next < reads.order.n and (
            cursor.next < end
            or has_room(reads.order, [each.bytes for each in cursor.windows], cursor.size, share)
        ):
            self._add_window(reads, number, share)
        if cursor.next >= reads.order.n:  # the next epoch's first window is read in any case
            coming = self.epoch(reads.seed, reads.epoch + 1)
            if not coming.cursors[number].next:
                self._add_window(coming, number, share)

    def _share(self, number: int) -> int:
        """Return the bytes that windows of one reader may hold on a node."""
        now, batch, budget = self._env.now, self._scenario.jobs.batch, self._scenario.mesh.read_ahead_bytes
        readers = 0
        for reads in self._epochs.values():
            cursor = reads.cursors[number]
            idle = now - cursor.used > max(IDLE_SECONDS, 3 * cursor.pause)
            readers += cursor.started and cursor.furthest + batch < reads.order.n and not idle
        return int(max(budget, 2 * MIN_WINDOW_BYTES) // max(1, readers))

    def _add_window(self, reads: EpochReads, number: int, share: int) -> None:
        cursor = reads.cursors[number]
        size = fitting_size(cursor.size, share)
        window = self._own_window(reads, number, size) if self._own_windows else self._window(reads, size)
        cursor.windows.append(window)
        cursor.next, cursor.size = window.end, next_size(reads.order, cursor.size, share)

    def _own_window(self, reads: EpochReads, number: int, size: int) -> _Window:
        """Cut a node's next window as its scheduler does, and queue its reads."""
        order, first, mean = reads.order, reads.cursors[number].next, self._data.sample_bytes

        def own_between(begin: int, end: int) -> tuple[Integers, Integers, Integers]:
            positions = np.arange(begin, end, dtype=np.int64)
            samples, shards = self._between(reads, begin, end)
            kept = self._own[number, self._slots[shards]]
            return positions[kept], samples[kept], np.full(int(kept.sum()), mean, np.int64)

        if not self._fractions[number]:
            empty = np.empty(0, np.int64)
            return _Window(first, order.n, empty, empty, np.empty(0), 0)
        cut = cut_positions(order, first, size, mean * self._fractions[number], own_between)
        shards, inside, counts = self._parts_of_shards(cut.samples)
        owners = np.full(shards.size, number)
        began = max(self._env.now, float(self._read_until[number]))
        done = self._nodes.read_shards(
            self._env.now, shards, inside, np.cumsum(counts), owners, self._arrival(reads)
        )
        if done.size and (last := float(done.max())) > began:
            self._read_until[number] = last
            self._on_window(number, f"positions {first:,} to {cut.end:,}", began, last - began)
        return _Window(first, cut.end, shards, owners, done, cut.bytes)

    def _window(self, reads: EpochReads, size: int) -> _Window:
        """Cut the next window of all nodes, of about `size` bytes on each, and queue its reads."""
        order, first, each = reads.order, reads.cursors[0].next, self._data.sample_bytes
        nodes = self._spread
        rows = int(min(int(1.25 * size / each) + 1, MAX_WINDOW_ROWS) * nodes)
        last = first + min(rows, MAX_WINDOW_SPAN, order.n - first)
        ends = order.window_ends if isinstance(order, BlocksOrder) else None
        positions = np.arange(first, last, dtype=np.int64)
        lengths = np.full(positions.size, each, np.int64)
        least, most = int(MIN_WINDOW_BYTES * nodes), int(size * nodes)
        end = window_end(positions, lengths, least, most, first, last, ends)
        samples = order.samples_at(np.arange(first, end, dtype=np.int64))
        shards, inside, counts = self._parts_of_shards(samples)
        owners = self._owners[self._slots[shards]]
        done = np.full(shards.size, self._env.now)
        every = [owners]
        if self._scenario.jobs.sharing:  # whole batches: each node reads all that it has
            copies = self._holders[self._slots[shards]]
            every += [np.where(self._dead[column] | (column == owners), -1, column) for column in copies.T]
        for readers in every:
            there = readers >= 0
            read = self._nodes.read_shards(
                self._env.now,
                shards[there],
                inside[np.repeat(there, counts)],
                np.cumsum(counts[there]),
                readers[there],
                self._arrival(reads),
            )
            done[there] = np.maximum(done[there], read)
        return _Window(first, end, shards, owners, done, int((end - first) * each / nodes))

    def _between(self, reads: EpochReads, begin: int, end: int) -> tuple[Integers, Integers]:
        """Return the samples at these positions, and the shard of each. Nodes ask for the same ones in turn,
        so the latest are kept."""
        for number in range(begin // CHUNK, -(-end // CHUNK)):
            if number not in reads.chunks:
                last = min((number + 1) * CHUNK, reads.order.n)
                samples = reads.order.samples_at(np.arange(number * CHUNK, last, dtype=np.int64))
                reads.chunks[number] = samples, self._shards_of(samples)
        skipped = begin // CHUNK * CHUNK
        found = [reads.chunks[number] for number in range(begin // CHUNK, -(-end // CHUNK))]
        while len(reads.chunks) > KEPT_CHUNKS:
            reads.chunks.pop(next(iter(reads.chunks)))
        samples, shards = (np.concatenate(each) for each in zip(*found, strict=True))
        return samples[begin - skipped : end - skipped], shards[begin - skipped : end - skipped]

    def _parts_of_shards(self, samples: Integers) -> tuple[Integers, Integers, Integers]:
        """Return the shards that have these samples, int64[k]; the samples' numbers in their shards, in
        stored order; how many each shard has, int64[k]."""
        samples = np.sort(samples)
        of_sample = self._shards_of(samples)
        shards, counts = np.unique(of_sample, return_counts=True)
        return shards, samples - self._starts[of_sample], counts

    def _arrival(self, reads: EpochReads) -> Callable[[int, int], float] | None:
        """Return what tells when a shard is on a node, if shards come from an origin."""
        if (caches := self._caches) is None:
            return None
        name, now = f"{reads.seed} {reads.epoch}", self._env.now
        return lambda node, shard: caches.fetch(name, node, shard, now)
