"""A thousand million samples without their data: `python -m bench.page_lookups`.

A snapshot of files of lines is built from the facts of their pages, written and read back. Then a loop of a
full shuffle, which takes a while for each step, asks for the place of each sample of its batches: the order,
the pages, and the columns of the pages, which are opened ahead of it as nodes do (`--ahead no`: when a sample
of them is asked for the first time), and kept as nodes keep them. All of it is in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from awscrt.checksums import crc32c

from bench.tables import verdict
from meshd.batches.assembly.frame_rows import RowLookup
from meshd.batches.read_ahead.page_prefetcher import PagePrefetcher
from meshd.batches.read_ahead.read_hints import PlannedFrame
from meshd.core.frame_address import FrameAddress
from meshd.core.plan_record import FieldOutput, Plan
from meshd.datasets.open_pages import OpenPageCache
from meshwire.dataset.build_paged_snapshot import build_from_pages
from meshwire.dataset.fields import parse_fields
from meshwire.dataset.paged_snapshot import read_snapshot
from meshwire.dataset.sample_columns import BytesColumn
from meshwire.formats.json_lines import index_lines, line_page_facts
from meshwire.formats.page_formats import mark_page, open_marked_page
from meshwire.plan.plan_spec import parse_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshwire.dataset.paged_columns import Page
    from meshwire.dataset.paged_snapshot import PagedSnapshot
    from meshwire.dataset.snapshot import Snapshot

BUILD_SECONDS, BATCH_MS, MEMORY_GB = 10.0, 5.0, 1.0
"""The bars: at most so much."""
_ROWS: Final = 1024
_SHOWN: Final = 20  # batches at the beginning and at the end
_SOURCE: Final = "s3://many"


class _OpenPages:
    """The pages of the snapshot that are open, in the cache in which nodes keep them."""

    make: Callable[[], tuple[Page, bytes]]

    def __init__(self) -> None:
        self._open = OpenPageCache()
        self.count = 0

    def open_pages(self, snapshot: PagedSnapshot, numbers: Sequence[int]) -> list[Page]:
        return self._open.pages_of(snapshot, numbers, self._open_page)

    def _open_page(self, snapshot: PagedSnapshot, number: int) -> Page:
        self.count += 1
        page, document = self.make()
        self._open.add(snapshot.table.hash_of(number), page, document)
        return page

    def closed_pages(self, snapshot: PagedSnapshot, numbers: Sequence[int]) -> list[int]:
        return [number for number in numbers if snapshot.table.hash_of(number) not in self._open]


async def _read(snapshot: Snapshot, opened: _OpenPages, given: argparse.Namespace) -> None:
    """Look up the samples of batches, and print what the event loop of a node spends on each."""
    kind, _, shards = given.shuffle.partition(":")
    shuffle = {"kind": kind, "shards": int(shards)} if shards else {"kind": kind}
    spec, rows = parse_spec({"seed": 1, "shuffle": shuffle}), RowLookup()
    plan = Plan("0" * 64, snapshot.hash, "many", snapshot.samples, spec, {"text": FieldOutput("uint8", None)})
    prefetcher = PagePrefetcher(opened, lambda *frame: rows.rows_at(*frame).samples)
    column = snapshot.fields["text"]
    assert isinstance(column, BytesColumn)
    costs, waits, misses, whole = list[float](), list[float](), list[int](), time.process_time()
    for step in range(given.batches):
        address = FrameAddress(plan.hash, 0, step, batch=_ROWS)
        before, used, began = opened.count, time.thread_time(), time.monotonic()
        wanted = rows.rows_at(address, plan, snapshot).samples
        if given.ahead == "yes":
            prefetcher.frame_requested(PlannedFrame(plan, snapshot, address))
            await prefetcher.open_now(snapshot, wanted, address)
        column.objects_at(wanted), column.offsets_at(wanted), column.lengths_at(wanted)
        costs.append(1e3 * (time.thread_time() - used))
        waits.append(1e3 * (time.monotonic() - began))
        misses.append(opened.count - before)
        await asyncio.sleep(given.step)
    whole = time.process_time() - whole
    await prefetcher.aclose()
    for which, some in (("first", slice(_SHOWN)), ("last", slice(-_SHOWN, None))):
        each, wait, new = (statistics.median(values[some]) for values in (costs, waits, misses))
        note = f"the {which} {len(costs[some])} of {len(costs)} batches of {_ROWS:,} samples"
        bar = verdict(each, BATCH_MS, at_most=True)
        told = f"{each:.2f} ms of CPU in the event loop, {wait:.2f} ms by the clock"
        print(f"{note}, {new:.0f} pages opened meanwhile: {told}; {bar}", flush=True)
    print(f"the first batch: {waits[0]:.0f} ms by the clock")
    print(f"all batches: {whole:.1f} s of CPU in all threads, {opened.count:,} pages opened")


def main() -> None:
    """Print what the snapshot and its look-ups cost, with the bar of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=100_000)
    parser.add_argument("--lines", type=int, default=10_000, help="of each page")
    parser.add_argument("--batches", type=int, default=700)
    parser.add_argument("--step", type=float, default=0.1, help="seconds of a step of the loop")
    parser.add_argument("--ahead", choices=("yes", "no"), default="yes", help="open pages ahead")
    parser.add_argument("--shuffle", default="global", help="or blocks:SHARDS")
    given = parser.parse_args()
    lines = b"".join(b"%09d\n" % number for number in range(given.lines))
    document = index_lines([lines]).to_bytes()
    facts = line_page_facts(document, len(lines))
    fields = parse_fields({"text": {"ext": ["txt"]}})
    opened, mark, checksum = _OpenPages(), mark_page(document, "lines", facts), crc32c(document)

    def open_page() -> tuple[Page, bytes]:
        """Open a page as nodes open one that they have checked when they made it."""
        page = open_marked_page(document, "lines", facts, mark)
        assert page is not None
        assert crc32c(document) == checksum
        return page, document

    opened.make = open_page

    began = time.process_time()
    # Equal pages would be open once.
    own = [replace(facts, digest=number.to_bytes(32, "big")) for number in range(given.pages)]
    shards = [(f"{number:09}.txt", f"{number:032x}", each) for number, each in enumerate(own)]
    built = build_from_pages(
        shards, kind="lines", source=_SOURCE, fields=fields, open_pages=opened.open_pages
    )
    written = built.snapshot.to_bytes()
    snapshot = read_snapshot(written, opened.open_pages)
    cost = time.process_time() - began
    size = f"{snapshot.samples:,} samples, a document of {len(written) / 1e6:.1f} MB"
    print(
        f"built, written and read: {cost:.2f} s of CPU, {size}; {verdict(cost, BUILD_SECONDS, at_most=True)}",
        flush=True,
    )

    print(f"{given.shuffle}, {1e3 * given.step:.0f} ms a step", flush=True)
    asyncio.run(_read(snapshot, opened, given))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    bar = verdict(memory, MEMORY_GB, at_most=True)
    print(f"memory: {memory:.2f} GB at most meanwhile; {bar}")


if __name__ == "__main__":
    main()
