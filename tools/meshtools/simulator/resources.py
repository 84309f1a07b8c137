"""NodeResources: disks, processors and ports of all nodes as queues, in arrays.

Law: a queue is served in order of arrival, so that the time at which it is free is all of its state. The
page cache is known by samples.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from meshd.batches.read_ahead.extents import READ_BYTES, plan_reads
from meshd.batches.read_ahead.read_cost import SEEK_SECONDS, SHORT_SEEK_SECONDS, cost_of_reads

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from meshd.batches.read_ahead.extents import Reads
    from meshtools.simulator.scenario import Data, Mesh

    Integers = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float64]

_NEAR_BYTES = 1 << 30  # shards at most so far apart on a disk are a short seek apart
_ELSEWHERE = 1 << 60  # where shards lie that a node was given later
_OWN_FILE_BYTES = 1 << 20  # smaller shards share files, see --small-object
_INODES_IN_BLOCK = 16  # of ext4: 256 bytes each, in blocks of 4 KiB, each of which is a read when it is cold


class NodeResources:
    """The queues of `nodes` nodes. All times in seconds. holders: int64[shards, copies], the nodes on whose
    disks each shard lies, in order of the shards. slow: float64[nodes], 1 for a disk of full rate."""

    def __init__(self, mesh: Mesh, data: Data, nodes: int, holders: Integers) -> None:
        self._mesh, self._data = mesh, data
        self._shard_bytes = data.samples_per_shard * data.sample_bytes
        self._holders, self._places = holders, self._lay_out(holders)
        own_files = self._shard_bytes > _OWN_FILE_BYTES and mesh.seek_scale > 0
        self._inodes = [set[tuple[int, int]]() if own_files else None for _ in range(nodes)]
        self._arms = np.zeros((nodes, mesh.disks_per_node), np.int64)
        self.slow = np.ones(nodes)
        self._disk_free = np.zeros((nodes, mesh.disks_per_node))
        self._writes_free = np.zeros((nodes, mesh.disks_per_node))
        self._cpu_free, self._port_free = np.zeros(nodes), np.zeros(nodes)
        self._uplink_free = np.zeros(-(-nodes // mesh.nodes_per_rack))
        self.disk_seconds, self.cpu_seconds, self.port_bytes = (
            np.zeros(nodes),
            np.zeros(nodes),
            np.zeros(nodes),
        )
        self.written_bytes = 0.0
        self.seeks = self.read_bytes = self.wanted_bytes = self.samples = self.cached_bytes = 0.0
        self.computed_rows = self.sent_rows = 0
        self._cached: list[OrderedDict[int, npt.NDArray[np.bool_]]] = [OrderedDict() for _ in range(nodes)]
        self._cached_size = np.zeros(nodes)

    def __repr__(self) -> str:
        return f"<NodeResources of {self.slow.size} nodes>"

    def _lay_out(self, holders: Integers) -> Integers:
        """Return int64[shards, copies]: where each copy begins on its disk; shards follow each other."""
        shards = np.arange(holders.shape[0])[:, None]
        disks = (holders * self._mesh.disks_per_node + shards % self._mesh.disks_per_node).ravel()
        by_disk = np.argsort(disks, kind="stable")
        begins = np.searchsorted(disks[by_disk], disks[by_disk])
        places = np.empty(disks.size, np.int64)
        places[by_disk] = np.arange(disks.size) - begins
        return places.reshape(holders.shape) * self._shard_bytes

    def read_shards(
        self,
        now: float,
        shards: Integers,
        rows: Integers,
        ends: Integers,
        owners: Integers,
        there: Callable[[int, int], float] | None = None,
        *,
        between: bool = False,
    ) -> Floats:
        """Queue the reads of a window and return when each shard's are done, float64[shards].

        shards: int64[n], ascending; rows: the samples within their shards, shard after shard; ends: int64[n],
        where each shard's rows end in `rows`; owners: int64[n], the node that reads each. there(node, shard):
        when a shard is on a disk of the node; None: all are. between: they do not wait for windows that are
        queued, but for a read of one.
        """
        size = self._data.sample_bytes
        done = np.empty(shards.size)
        start = 0
        held = self._holders[shards] == owners[:, None]
        begins = self._places[shards, held.argmax(axis=1)]
        begins[~held.any(axis=1)] = _ELSEWHERE
        inodes = self._cold_inodes(shards, owners, begins)
        for place, (shard, end, node, begin) in enumerate(
            zip(shards.tolist(), ends.tolist(), owners.tolist(), begins.tolist(), strict=True)
        ):
            inside = rows[start:end]
            start = end
            reads = plan_reads(np.zeros(inside.size, np.int64), inside * size, np.full(inside.size, size))
            missing = self._missing_share(node, shard, reads)
            arrives = now if there is None else there(node, shard)
            if not missing:
                done[place] = now
                self.cached_bytes += inside.size * size
                continue
            cost = cost_of_reads(reads, inside.size, inside.size * size)
            disk = shard % self._mesh.disks_per_node
            gap = begin + int(reads.offsets[0]) - int(self._arms[node, disk])
            first = SHORT_SEEK_SECONDS if abs(gap) <= _NEAR_BYTES else SEEK_SECONDS  # a shard is a file
            seconds = (missing * (cost.seek_seconds - SEEK_SECONDS) + first) * self._mesh.seek_scale
            seconds += missing * cost.read / self._mesh.disk_bytes_per_second
            rest = missing * cost.reads * self._mesh.disk_rest_seconds
            seconds *= self.slow[node]
            self._arms[node, disk] = begin + int(reads.offsets[-1] + reads.lengths[-1])
            seeks = missing * (cost.seeks - 1) + 1
            before = inodes.pop((node, disk), 0)
            seeks += before
            seconds += before * SHORT_SEEK_SECONDS * self._mesh.seek_scale * self.slow[node]
            work = cost.read * missing * self._data.cpu_seconds_per_read_byte
            self._work(node, work + seeks * self._data.cpu_seconds_per_seek, now)
            free = max(now, float(self._disk_free[node, disk]), arrives)
            if between and free > now:
                done[place] = now + READ_BYTES / self._mesh.disk_bytes_per_second + seconds + rest
            else:
                done[place] = free + seconds + rest
            self._disk_free[node, disk] = free + seconds + rest
            self.disk_seconds[node] += seconds
            self.seeks += seeks
            self.read_bytes += cost.read * missing
            self.cached_bytes += inside.size * size * (1 - missing)
        self.wanted_bytes += rows.size * size
        self.samples += rows.size
        return done

    def _cold_inodes(self, shards: Integers, owners: Integers, begins: Integers) -> Counter[tuple[int, int]]:
        """Return how many blocks of inodes a window needs that are not in memory, by node and disk. A node
        reads them one after the other before the window's bytes, so that the arm stays among them."""
        found = Counter[tuple[int, int]]()
        places = zip(shards.tolist(), owners.tolist(), begins.tolist(), strict=True)
        for shard, node, begin in places:
            if (known := self._inodes[node]) is not None:
                disk = shard % self._mesh.disks_per_node
                block = (disk, begin // self._shard_bytes // _INODES_IN_BLOCK)
                found[node, disk] += block not in known
                known.add(block)
        return found

    def write_object(self, now: float, nodes: tuple[int, ...], number: int, size: int) -> float:
        """Write an object on nodes, the first of which sends it to the others; return when all have it. Reads
        that are queued already are not delayed, those that come are."""
        disk, done = number % self._mesh.disks_per_node, now
        sent = (len(nodes) - 1) * size
        first = nodes[0]
        self._port_free[first] = (
            max(now, float(self._port_free[first])) + sent / self._mesh.nic_bytes_per_second
        )
        self.port_bytes[first] += sent
        for node in nodes:
            begun = now if node == first else max(now, float(self._port_free[first]))
            busy = float(self._disk_free[node, disk]) > begun
            begun = max(begun, float(self._writes_free[node, disk]))
            begun += busy * READ_BYTES / self._mesh.disk_bytes_per_second
            seconds = SEEK_SECONDS * self._mesh.seek_scale + size / self._mesh.disk_bytes_per_second
            seconds *= self.slow[node]
            self._writes_free[node, disk] = begun + seconds
            self._disk_free[node, disk] = max(begun, float(self._disk_free[node, disk])) + seconds
            self._arms[node, disk] = _ELSEWHERE
            self.disk_seconds[node] += seconds
            self.written_bytes += size
            done = max(done, begun + seconds)
        return done

    def _work(self, nodes: Any, seconds: Any, now: float, *, short: bool = False) -> Any:
        """Queue work of processors, and return when it is done: of one node, or arrays of several. short: it
        does not wait for what is queued, since processors are shared."""
        took = seconds / self._mesh.cores_per_node
        self._cpu_free[nodes] = free = np.maximum(self._cpu_free[nodes], now) + took
        self.cpu_seconds[nodes] += seconds
        return now + took if short else free

    def _missing_share(self, node: int, shard: int, reads: Reads) -> float:
        """Return the share of these reads of a shard that is not in the page cache, and keep them there; the
        shard used longest ago gives way."""
        kept, size, count = self._cached[node], self._data.sample_bytes, self._data.samples_per_shard
        ends = reads.offsets + reads.lengths
        begins = np.append(True, reads.offsets[1:] != ends[:-1])  # of runs of reads without a gap
        steps = np.zeros(count + 1, np.int64)
        np.add.at(steps, np.minimum(-(-reads.offsets[begins] // size), count), 1)
        np.add.at(steps, np.minimum(ends[np.append(begins[1:], True)] // size, count), -1)
        wanted = np.cumsum(steps)[:-1] > 0
        have = kept.pop(shard, None)
        missing = wanted if have is None else wanted & ~have
        kept[shard] = wanted if have is None else wanted | have
        self._cached_size[node] += float(missing.sum()) * size
        while self._cached_size[node] > self._mesh.page_cache_bytes and len(kept) > 1:
            self._cached_size[node] -= float(kept.popitem(last=False)[1].sum()) * size
        return float(missing.sum() / max(1, wanted.sum()))

    def compute(self, now: float, owners: Integers) -> float:
        """Queue ops of rows (int64[rows]: the node of each) that are sent later; return when all are done."""
        nodes, counts = np.unique(owners, return_counts=True)
        self.computed_rows += owners.size
        return float(self._work(nodes, counts * self._data.cpu_seconds_per_sample, now).max())

    def prepare(self, now: float, owners: Integers) -> float:
        """Queue ops and delivery of rows (int64[rows]: the node of each); return when all have been sent."""
        nodes, counts = np.unique(owners, return_counts=True)
        self.computed_rows += owners.size
        return self._send(
            now, nodes, counts, self._work(nodes, counts * self._data.cpu_seconds_per_sample, now)
        )

    def deliver(self, now: float, owners: Integers, *, again: bool) -> float:
        """Queue the delivery of rows that have been prepared; return when all have been sent. again: they
        have been sent to another job, too."""
        nodes, counts = np.unique(owners, return_counts=True)
        work = counts * (self._data.cpu_seconds_per_sent_sample if again else 0.0)
        return self._send(now, nodes, counts, self._work(nodes, work, now, short=True))

    def _send(self, now: float, nodes: Integers, counts: Integers, ready: Floats) -> float:
        self.sent_rows += int(counts.sum())
        sent = counts * float(self._data.delivered_bytes_per_sample or self._data.sample_bytes)
        ready = np.maximum(self._port_free[nodes], ready) + sent / self._mesh.nic_bytes_per_second
        self._port_free[nodes] = ready
        self.port_bytes[nodes] += sent
        last = float(ready.max())
        if self._mesh.rack_oversubscription > 1:
            racks, of_rack = np.unique(nodes // self._mesh.nodes_per_rack, return_inverse=True)
            uplink = self._mesh.nodes_per_rack * self._mesh.nic_bytes_per_second
            uplink /= self._mesh.rack_oversubscription
            passed = np.maximum(self._uplink_free[racks], now) + np.bincount(of_rack, sent) / uplink
            self._uplink_free[racks] = passed
            last = max(last, float(passed.max()))
        return last
