"""A thousand million samples without their data: `python -m bench.page_lookups`.

A snapshot of files of lines is built from the facts of their pages, written and read back; then batches of a
full shuffle ask for the place of each of their samples: the order, the pages, and the columns of the pages,
each opened when a sample of it is asked for the first time, and kept as nodes keep them. All of it is in one
process.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from bench.tables import verdict
from meshd.datasets.snapshot_pages import KEPT_PAGES
from meshwire.dataset.build_paged_snapshot import build_from_pages
from meshwire.dataset.fields import parse_fields
from meshwire.dataset.paged_snapshot import read_snapshot
from meshwire.dataset.sample_columns import BytesColumn
from meshwire.formats.json_lines import index_lines, line_page_facts
from meshwire.formats.page_formats import open_page
from meshwire.plan.epoch_order import snapshot_order
from meshwire.plan.plan_spec import parse_spec

if TYPE_CHECKING:
    from meshwire.dataset.paged_columns import Page
    from meshwire.dataset.paged_snapshot import PagedSnapshot

BUILD_SECONDS, BATCH_MS, MEMORY_GB = 10.0, 5.0, 1.0
"""The bars: at most so much."""
_ROWS: Final = 1024
_SHOWN: Final = 20  # batches at the beginning and at the end
_SOURCE: Final = "s3://many"


def main() -> None:
    """Print what the snapshot and its look-ups cost, with the bar of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=100_000)
    parser.add_argument("--lines", type=int, default=10_000, help="of each page")
    parser.add_argument("--batches", type=int, default=700)
    given = parser.parse_args()
    lines = b"".join(b"%09d\n" % number for number in range(given.lines))
    document = index_lines([lines]).to_bytes()
    facts = line_page_facts(document, len(lines))
    fields = parse_fields({"text": {"ext": ["txt"]}})
    opened = lru_cache(KEPT_PAGES)(lambda _number: open_page(document, "lines", facts))

    def page_of(_snapshot: PagedSnapshot, number: int) -> Page:
        return opened(number)

    began = time.process_time()
    shards = [(f"{number:09}.txt", f"{number:032x}", facts) for number in range(given.pages)]
    built = build_from_pages(shards, kind="lines", source=_SOURCE, fields=fields, open_page=page_of)
    written = built.snapshot.to_bytes()
    snapshot = read_snapshot(written, page_of)
    cost = time.process_time() - began
    size = f"{snapshot.samples:,} samples, a document of {len(written) / 1e6:.1f} MB"
    print(
        f"built, written and read: {cost:.2f} s of CPU, {size}; {verdict(cost, BUILD_SECONDS, at_most=True)}",
        flush=True,
    )

    order = snapshot_order(parse_spec({"seed": 1}), snapshot, 0)
    column = snapshot.fields["text"]
    assert isinstance(column, BytesColumn)
    steps = np.random.default_rng(1).integers(0, snapshot.samples // _ROWS, given.batches)
    costs, misses = list[float](), list[int]()
    for step in steps.tolist():
        before, began = opened.cache_info().misses, time.process_time()
        wanted = order.samples_at(np.arange(step * _ROWS, (step + 1) * _ROWS))
        column.objects_at(wanted), column.offsets_at(wanted), column.lengths_at(wanted)
        costs.append(1e3 * (time.process_time() - began))
        misses.append(opened.cache_info().misses - before)
    for which, some in (("first", slice(_SHOWN)), ("last", slice(-_SHOWN, None))):
        each, new = statistics.median(costs[some]), statistics.median(misses[some])
        note = f"the {which} {len(costs[some])} of {len(costs)} batches of {_ROWS:,} samples"
        bar = verdict(each, BATCH_MS, at_most=True)
        print(f"{note}, {new:.0f} pages opened for each: {each:.2f} ms of CPU; {bar}", flush=True)
    pages, total = sum(misses), sum(costs) / 1e3
    print(f"all batches: {total:.1f} s of CPU, {pages:,} pages opened, each once")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    bar = verdict(memory, MEMORY_GB, at_most=True)
    print(f"memory: {memory:.2f} GB at most meanwhile; {bar}")


if __name__ == "__main__":
    main()
