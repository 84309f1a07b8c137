"""What two processes read and write at once in shared memory is never seen half written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from meshd.util.shared_counters import MAX_VERSION, TICK, VersionTimes

if TYPE_CHECKING:
    from pathlib import Path

# `write` for ever in one process, `look` in another; `look` raises AssertionError of what it may not see.
_SCENE = """
import itertools, os, signal, sys, time
{setup}
child = os.fork()
if not child:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for turn in itertools.count():
        write(turn % 2)
try:
    seen, end = set(), time.monotonic() + 60
    while len(seen) < 2:  # until the other process has had its turn, too
        seen |= {{look() for _ in range({rounds})}}
        assert time.monotonic() < end, "the other process wrote nothing meanwhile"
finally:
    os.kill(child, signal.SIGTERM)
    os.waitpid(child, 0)
"""

_LEASE = """
from meshd.util import shared_counters
shared_counters.set_lease(1000.0, 1)

def write(turn):
    shared_counters.set_lease(*((1000.0, 1), (2000.0, 1 << 24))[turn])

def look():
    pair = shared_counters.get_lease()
    assert pair in ((1, 1000.0), (1 << 24, 2000.0)), pair
    return pair
"""

_MAP_IN_USE = """
from meshd.util import shared_counters
shared_counters.set_map_version(0, 7, 1000.0)

def write(turn):
    shared_counters.set_map_version(0, *((7, 1000.0), (9, 2000.0))[turn])

def look():  # at 1500 s version 7 is long in use, and 9 has yet to be: 8 at the most
    version = shared_counters.oldest_map_version(1500.0, 2.0)
    assert version in (7, 8), version
    return version
"""


def _run(setup: str, rounds: int = 100_000) -> None:
    script = _SCENE.format(setup=setup, rounds=rounds)
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True) as process:
        try:
            _, printed = process.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            raise
    assert process.returncode == 0, printed


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor runs one of the two at a time")
@pytest.mark.parametrize(("setup", "rounds"), [(_LEASE, 100_000), (_MAP_IN_USE, 5_000)], ids=["lease", "map"])
def test_no_reader_sees_one_number_with_the_other_of_before(setup: str, rounds: int) -> None:
    _run(setup, rounds)


def test_marks_of_origins_are_written_whole(tmp_path: Path) -> None:
    _run(
        f"""
import secrets
from pathlib import Path
from meshd.util.clock import SystemClock
from meshd.origins.cache.cache_store import FreshnessTable

table, turns = FreshnessTable(Path({str(tmp_path / "table")!r}), SystemClock()), []
secrets.randbits = lambda bits: (0x0123456789ABCDEF, 0xFEDCBA9876543210)[turns[0]]
turns.append(0)
table.bump_write_mark("b")

def write(turn):
    turns[0] = turn
    table.bump_write_mark("b")

def look():
    mark = table.write_mark("b").partition("-")[2]
    assert mark in ("123456789abcdef", "fedcba9876543210"), mark
    return mark
"""
    )


def test_a_pair_is_rounded_down_and_refused_when_it_does_not_fit() -> None:
    pairs = VersionTimes(2)
    assert [pairs[0], pairs[1]] == [(0, 0.0)] * 2
    pairs[1] = MAX_VERSION, 3.999 * TICK
    assert [pairs[0], pairs[1]] == [(0, 0.0), (MAX_VERSION, 3 * TICK)]
    for version, seconds in ((MAX_VERSION + 1, 1.0), (-1, 1.0), (1, -1.0), (1, 1e12)):
        with pytest.raises(OverflowError, match="does not fit into a 64-bit word"):
            pairs[1] = version, seconds
    assert pairs[1] == (MAX_VERSION, 3 * TICK)
