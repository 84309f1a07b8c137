"""Laws of pages opened ahead: the frames that come next, each once and in order, and the pages they need."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshd.batches.read_ahead.page_prefetcher import (
    AHEAD_ROWS,
    AHEAD_STEPS,
    coming_frames,
    frames_ahead,
    pages_needed,
)
from meshd.core.frame_address import FrameAddress
from meshd.core.plan_record import FieldOutput, Plan
from meshwire.dataset.fields import parse_fields
from meshwire.dataset.paged_snapshot import PagedSnapshot
from meshwire.plan.plan_spec import parse_spec
from meshwire.plan.rank_slices import step_count
from tests.support.paged_snapshots import MemoryPages

if TYPE_CHECKING:
    from meshwire.plan.rank_slices import Tail


def plan_of(samples: int, tail: str = "pad") -> Plan:
    spec = parse_spec({"tail": tail})
    return Plan("p", "s", "b", samples, spec, {"text": FieldOutput("uint8", None)})


@given(
    samples=st.integers(1, 500),
    batch=st.integers(1, 600),
    tail=st.sampled_from(["pad", "drop", "ragged"]),
    data=st.data(),
)
def test_the_frames_that_come_next_are_those_of_a_loop(
    samples: int, batch: int, tail: Tail, data: st.DataObject
) -> None:
    origin = data.draw(st.integers(0, samples - 1))
    steps = step_count(samples, batch, origin, tail)
    if not steps:
        return
    begin = FrameAddress("p", 3, data.draw(st.integers(0, steps - 1)), 1, 2, batch, origin)
    later = step_count(samples, batch, 0, tail)
    loop = [msgspec.structs.replace(begin, step=step) for step in range(begin.step + 1, steps)]
    loop += [FrameAddress("p", epoch, step, 1, 2, batch, 0) for epoch in (4, 5) for step in range(later)]
    assert list(itertools.islice(coming_frames(plan_of(samples, tail), begin), len(loop))) == loop


@given(
    samples=st.integers(1, 1 << 30),
    batch=st.integers(1, 1 << 20),
    world=st.integers(1, 64),
)
def test_what_is_opened_ahead_is_bounded(samples: int, batch: int, world: int) -> None:
    found = frames_ahead(plan_of(samples), FrameAddress("p", 0, 0, 0, world, batch))
    assert 1 <= len(found) <= AHEAD_STEPS
    assert len(found) == 1 or len(found) * batch <= AHEAD_ROWS * world
    assert len(set(found)) == len(found)


@given(
    files=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    data=st.data(),
)
def test_pages_are_needed_once_in_the_order_of_the_samples(files: list[int], data: st.DataObject) -> None:
    shards = [(f"d/{number:02}.txt", f"{number:032x}", b"x\n" * count) for number, count in enumerate(files)]
    built = MemoryPages().build(shards, "s3://b/d/", parse_fields({"text": "txt"})).snapshot
    assert isinstance(built, PagedSnapshot)
    wanted = data.draw(st.lists(st.integers(0, built.samples - 1), max_size=40))
    owners = np.repeat(np.arange(len(files)), files)
    expected = list(dict.fromkeys(int(owners[sample]) for sample in wanted))
    assert pages_needed(built, np.array(wanted, np.int64)) == expected
