"""A coordinator's decoded cache and a transform process's renderer, in one thread, by a made-up clock."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from meshd.transform.compiler import load_program
from meshd.transform.decoded_cache.cache import DecodedCache
from meshd.transform.decoded_cache.messages import MEASURED, REFUSED
from meshd.transform.decoded_cache.prefix_builder import PrefixBuilder
from meshd.transform.decoded_cache.sample_set import OwnRows, SampleSet
from meshd.transform.decoded_cache.segment_files import SegmentFiles
from meshd.transform.decoded_cache.segment_store import SegmentStore
from meshd.transform.decoded_cache.slice_recorder import SliceRecorder
from meshd.transform.messages import OpStats, RenderReply, RenderRequest
from meshd.transform.render_queue import RenderCall, RenderSpec, RowSlice
from meshd.transform.renderer import RenderResult, RowWork, program_digest
from meshd.transform.source_files import SourceFiles
from meshd.transform.worker import SliceRenderer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SLICE = 8
TICK = 1e-3


class TickingClock:
    """Seconds that pass only when somebody looks: each step of a chain takes some, whatever the machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += TICK
        return self.now

    def mark(self) -> tuple[float, ...]:
        return (self(),)

    def since(self, mark: tuple[float, ...]) -> float:
        return self() - mark[0]


class DecodedCacheNode:
    """Renders epochs of `samples`, each a tuple of the bytes of its fields in order of name. `quota`: bytes
    that their bucket may take; `own`: those of which it builds the rows, None for any."""

    def __init__(
        self, folder: Path, samples: Sequence[tuple[bytes, ...]], budget: int, quota: int | None = None
    ) -> None:
        self.samples, self.folder, self.quota = samples, folder, quota
        self.own: OwnRows | None = None
        self.looked_at = 0
        self.clock = TickingClock()
        self.store = SegmentStore(folder / "decoded", budget)
        self.store.clear()
        self.cache = DecodedCache(self.store, folder / "decoded", self.clock, quota=lambda bucket: self.quota)
        self.files, self.segments = SourceFiles(), SegmentFiles()
        self.hits = self.made = self.stored = self.damaged = 0
        self.source_reads = 0
        self.writer = "writer"
        self.places: list[tuple[tuple[tuple[str, int, int], ...], ...]] = []
        at, data = 0, folder / "samples"
        with data.open("wb") as file:
            for fields in samples:
                places = []
                for value in fields:
                    file.write(value)
                    places.append(((str(data), at, len(value)),))
                    at += len(value)
                self.places.append(tuple(places))

    def ask_for(self, samples: Sequence[int]) -> None:
        """From now on the node builds the rows of these samples. Counts those it asks about."""

        def include(some: Any) -> Any:
            self.looked_at += len(some)
            return np.isin(some, list(samples))

        self.own = OwnRows(len(samples), include)

    def fit(self, total: int, free: int) -> int:
        """Adapt to a file system, without a pause between the steps; return how many they were."""
        return sum(1 for _ in self.cache.fit(total, free))

    def find_moved(self) -> None:
        """What the node does every few seconds."""
        asyncio.run(self.cache.find_moved())

    def close(self) -> None:
        self.files.close()
        self.segments.close()

    def epoch(
        self, text: str, epoch: int, order: Sequence[int], *, cached: bool = True, limit: int | None = None
    ) -> tuple[bytes, list[tuple[int, int, str, str]]]:
        """Return (the frame or the ragged data, the failures) of samples in this order."""
        return asyncio.run(self._epoch(text, epoch, order, cached=cached, limit=limit))

    async def _epoch(
        self, text: str, epoch: int, order: Sequence[int], *, cached: bool, limit: int | None
    ) -> tuple[bytes, list[tuple[int, int, str, str]]]:
        program = load_program(text)
        added = program.pairing.outputs if program.pairing is not None else {}
        size, targets = 0, list[Any]()
        for output in (*program.outputs.values(), *added.values()):
            targets.append(None if output.fixed is None else (size, len(order)))
            size += output.row_bytes * len(order)
        rows = []
        for position, sample in enumerate(order):
            other = order[position ^ 1] if (position ^ 1) < len(order) and program.pairing else -1
            partner = self.places[other] if other >= 0 else ()
            rows.append(RowWork(position, position, self.places[sample], partner, sample, other))
        samples = SampleSet("snapshot", len(self.samples), limit, "photos", self.own)
        spec = RenderSpec(
            0.0, "", "job", text, program_digest(text), epoch, size, tuple(targets), (), samples
        )
        fd = os.memfd_create("frame")
        os.ftruncate(fd, max(1, size))
        ragged: dict[int, bytes] = {}
        failures: list[tuple[int, int, str, str]] = []
        try:
            call = RenderCall(spec, fd, len(rows))
            for start in range(0, len(rows), SLICE):
                left = rows[start : start + SLICE]
                while left:
                    reply, scratch = self._slice(program, call, left, fd, cached=cached)
                    told = {*reply.rendered, *(failure.row for failure in reply.failures)}
                    left = [row for row in left if row.row not in told]
                    failures += [(one.row, one.field, one.kind, one.op) for one in reply.failures]
                    if scratch is not None:
                        ragged |= _ragged_rows(reply, scratch)
                        os.close(scratch)
            call.release_slice()
            whole = os.pread(fd, size, 0) + b"".join(ragged[row] for row in sorted(ragged))
        finally:
            os.close(fd)
        return whole, failures

    def warm(self, text: str, epoch: int, order: Sequence[int]) -> dict[int, int]:
        """Make the prefixes of the samples of an epoch in this order; returns the last verdict on each."""
        return asyncio.run(self._warm(text, epoch, order))

    async def _warm(self, text: str, epoch: int, order: Sequence[int]) -> dict[int, int]:
        program, found = load_program(text), dict[int, int]()
        samples = SampleSet("snapshot", len(self.samples), None, "photos", self.own)
        spec = RenderSpec(
            0.0, "", "job", text, program_digest(text), epoch, 0, (), (), samples, prefixes_only=True
        )
        fd = os.memfd_create("frame")
        call = RenderCall(spec, fd, len(order))
        try:
            rows = [
                RowWork(position, position, self.places[sample], (), sample)
                for position, sample in enumerate(order)
            ]
            for start in range(0, len(rows), SLICE):
                left, tries = rows[start : start + SLICE], 8
                while left and tries:
                    tries -= 1
                    item = RowSlice(call, left)
                    item.prefixes = self.cache.order(
                        spec.program, samples, len(left), len(left[0].sources), "writer", in_advance=True
                    )
                    sent = msgspec.json.encode(item.to_request(1, with_text=True))
                    request = msgspec.json.decode(sent, type=RenderRequest)
                    recorder = SliceRecorder(self.segments, request, OpStats(self.clock), self.clock)
                    builder = PrefixBuilder(self.files, program, request, recorder)
                    reply = builder.run(lambda row: None, lambda: False)
                    result = RenderResult()
                    result.add_kept(item.rows, item.prefixes, reply)
                    if item.prefixes is not None and reply.prefixes is not None:
                        self.cache.on_reply(item.prefixes, reply.prefixes, in_advance=True)
                    for row, (verdict, _) in result.kept.items():
                        found[order[row]] = verdict
                    failed = {failure.row for failure in reply.failures}
                    again = {
                        row
                        for row, (verdict, why) in result.kept.items()
                        if verdict == MEASURED or (verdict == REFUSED and not why)
                    }
                    told = (failed | result.kept.keys()) - again
                    left = [row for row in left if row.row not in told]
        finally:
            os.close(call.frame_fd)
            os.close(fd)
        return found

    def _slice(
        self, program: Any, call: RenderCall, rows: list[RowWork], fd: int, *, cached: bool
    ) -> tuple[RenderReply, int | None]:
        item = RowSlice(call, rows)
        if cached:
            spec = call.spec
            item.prefixes = self.cache.order(
                spec.program, spec.samples, len(rows), len(rows[0].sources), self.writer
            )
        sent = msgspec.json.encode(item.to_request(1, with_text=True))
        request = msgspec.json.decode(sent, type=RenderRequest)
        renderer = SliceRenderer(self.files, program, request, fd, self.clock, self.segments, self.clock)
        made, scratch = renderer.render(lambda row: None, lambda: False)
        reply = msgspec.json.decode(msgspec.json.encode(made), type=RenderReply)
        if item.prefixes is not None and reply.prefixes is not None:
            for use in reply.prefixes.uses:
                self.hits += use.hits
                self.made += use.made
                self.stored += use.stores
            self.damaged += len(reply.prefixes.damaged)
            self.cache.on_reply(item.prefixes, reply.prefixes)
        return reply, scratch


def _ragged_rows(reply: RenderReply, scratch: int) -> dict[int, bytes]:
    found: dict[int, bytes] = dict.fromkeys(reply.rendered, b"")
    at = 0
    for column in reply.ragged:
        for row, length, shape in zip(reply.rendered, column.lengths, column.shapes, strict=True):
            found[row] += repr((column.field, shape)).encode() + os.pread(scratch, length, at)
            at += length
    return found
