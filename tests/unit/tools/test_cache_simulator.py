"""The bars of the cache's policy, what its neighbours make of the same traces, and traces as files."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from meshd.origins.eviction.policy_api import EvictionSettings
from meshsdk.cli import mesh, run
from meshtools.cache_simulator.simulator import (
    POLICIES,
    TraceError,
    TraceRead,
    default_segment,
    epoch_trace,
    footprint,
    mix_traces,
    parse_trace,
    simulate,
    zipf_trace,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshtools.cache_simulator.simulator import Result


def result(name: str, trace: Sequence[TraceRead], share: float) -> Result:
    capacity = int(footprint(trace) * share)
    return simulate(name, trace, EvictionSettings(capacity, segment=default_segment(capacity)))


@pytest.mark.parametrize("shuffled", [False, True])
def test_epochs_keep_their_share_where_lru_keeps_next_to_nothing(shuffled: bool) -> None:
    trace = epoch_trace(8, 1000, 1000, shuffled=shuffled)
    ours, lru = result("segments", trace, 0.3), result("lru", trace, 0.3)
    assert ours.warm_objects >= 0.29
    assert ours.warm_bytes >= 0.29
    assert lru.warm_objects <= (0.06 if shuffled else 0.0)


def test_over_forty_epochs_the_bar_holds_with_the_first_one_counted() -> None:
    assert result("segments", epoch_trace(80, 500, 1000), 0.3).objects >= 0.29


@pytest.mark.parametrize(
    "trace",
    [
        pytest.param(epoch_trace(8, 1000, 1000, shuffled=False), id="sequential"),
        pytest.param(epoch_trace(8, 1000, 1000), id="shuffled"),
    ],
)
def test_with_the_plan_known_it_comes_close_to_belady(trace: Sequence[TraceRead]) -> None:
    assert result("segments+plan", trace, 0.3).bytes >= 0.95 * result("belady", trace, 0.3).bytes


def test_two_jobs_at_once_of_unequal_sizes_come_near_it_too() -> None:
    trace = mix_traces([epoch_trace(3, 1000, 1000), epoch_trace(3, 500, 4000, seed=1, bucket="other")])
    assert result("segments+plan", trace, 0.3).bytes >= 0.9 * result("belady", trace, 0.3).bytes


def test_no_policy_exceeds_the_bound_in_bytes() -> None:
    sizes = [TraceRead(("b", read.item[1]), 1 + len(read.item[1]) * (hash_of(read) % 50)) for read in SKEWED]
    bound = result("belady", sizes, 0.2).bytes
    for name in POLICIES:
        assert result(name, sizes, 0.2).bytes <= bound


SKEWED = zipf_trace(0.9, 4000, 600, 1000)


def hash_of(read: TraceRead) -> int:
    return int(read.item[1].rpartition("-")[2])


def test_popular_objects_are_kept_about_as_well_as_by_those_made_for_them() -> None:
    ours = result("segments", SKEWED, 0.2).objects
    assert ours >= 0.95 * result("lru", SKEWED, 0.2).objects


def test_neighbours_by_hand() -> None:
    """Two slots. LRU: `a` leaves for `c`. SIEVE: `a` was read again, so `b` leaves. Belady: knows."""
    trace = [TraceRead(("", key), 1) for key in "abacab"]
    hits = {name: simulate(name, trace, EvictionSettings(2, high=1, low=1)).objects * 6 for name in POLICIES}
    assert hits["lru"] == pytest.approx(2)
    assert hits["sieve"] == pytest.approx(2)
    assert hits["belady"] == pytest.approx(3)


def test_traces_as_files() -> None:
    lines = '\n{"key": "a", "size": 3, "bucket": "x"}\n{"key": "b", "size": 4}\n'
    assert parse_trace(io.StringIO(lines)) == [TraceRead(("x", "a"), 3), TraceRead(("", "b"), 4)]
    assert parse_trace(io.StringIO("size,key\n3,a\n")) == [TraceRead(("", "a"), 3)]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "key"),
        ("key,size\n", "no reads"),
        ("name,size\na,1\n", "key"),
        ("key,size\na,x\n", "line 2"),
        ("key,size\na,-1\n", "line 2"),
        ("key,size\na\n", "line 2"),
        pytest.param("key,size\na," + "9" * 5000, "line 2", id="digits"),
        pytest.param("key,size\n" + "a" * 200_000 + ",1", "not CSV", id="field"),
        pytest.param('{"key": "a", "size": 1, "x": ' + "[" * 100_000, "line 1", id="depth"),
        ('{"key": "a", "size": 1}\n{"key": "a"', "line 2"),
        ('{"key": "a", "size": 1}\n[]', "line 2"),
        ('{"key": "a", "size": true}', "line 1"),
        ('{"key": "", "size": 1}', "line 1"),
        ('{"key": "a", "size": 1, "bucket": 3}', "line 1"),
    ],
)
def test_a_trace_that_cannot_be_read_names_its_line(text: str, word: str) -> None:
    with pytest.raises(TraceError, match=word):
        parse_trace(io.StringIO(text))


def test_the_command_reads_a_file_and_tells_what_is_wrong_with_it() -> None:
    words = ["cache", "simulate", "-", "--policy", "lru", "--capacity", "1KiB", "--json"]
    done = CliRunner().invoke(mesh, words, input="key,size\na,10\na,10\n")
    assert json.loads(done.stdout)["hit_ratio"] == 0.5
    done = CliRunner().invoke(mesh, words, input="key,size\na,10\na,none\n")
    assert done.exit_code == 2
    assert "line 3" in done.output


def test_the_command_prints_a_line_a_policy() -> None:
    done = CliRunner().invoke(mesh, ["cache", "simulate", "--epochs", "3", "--items", "100", "--json"])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["policy"] for row in rows] == list(POLICIES)
    assert all(0 <= row["hit_ratio"] <= 1 for row in rows)


@pytest.mark.parametrize(
    "words", [[], ["--epochs", "2", "--capacity", "3x"], ["--epochs", "2", "--capacity", "0"]]
)
def test_wrong_usage_is_told(words: list[str]) -> None:
    assert run(["cache", "simulate", *words]) == 2
