"""Stalls by differences, how a wait is divided, and what is advised."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshsdk.loader_stats import Arrival, Meter, Stall, attribute_stall
from meshtools.doctor.advice import (
    Diagnosis,
    PlanFacts,
    advice_sentence,
    advise,
    disk_notes,
    render_report,
)
from meshtools.doctor.measurement_runs import Network
from meshtools.doctor.stage_times import RUNS, STALLS, Measured, Split, slowest_rank, split
from meshwire.http_values.mesh_headers import FrameTiming, ServerTiming, parse_timing
from meshwire.plan.plan_spec import parse_spec

seconds = st.floats(0, 100)


def runs(fetch: float, preprocessing: float, network: float, compute: float) -> dict[str, Measured]:
    """Runs of 10 steps of 64 rows, by seconds of a step."""
    given = zip(RUNS, (fetch, preprocessing, network, compute), strict=True)
    return {name: Measured(10, 10 * step, 640) for name, step in given}


def test_stalls_are_differences() -> None:
    found = split(runs(0.5, 0.3, 0.12, 0.1), world=2)
    assert [found.compute, found.network, found.preprocessing, found.fetch] == pytest.approx(
        [0.1, 0.02, 0.18, 0.2]
    )
    assert found.rate == pytest.approx(128 / 0.5)
    assert found.ceiling == pytest.approx(1280)
    assert found.au == pytest.approx(0.2)
    assert found.dominant == "fetch"
    assert found.without("fetch") == pytest.approx(0.5 / 0.3)


@given(st.tuples(seconds, seconds, seconds, seconds), seconds)
def test_the_parts_add_up_to_the_longest_run(times: tuple[float, ...], again: float) -> None:
    made = runs(*times)
    made["preprocessing"] = Measured(10, 10 * times[1], 640, fetch=again)
    found = split(made)
    assert found.step == pytest.approx(max(times))
    assert all(getattr(found, stage) >= -1e-12 for stage in ("compute", *STALLS))


def test_what_nodes_fetch_again_is_fetch() -> None:
    made = runs(0.3, 0.3, 0.1, 0.1)
    made["preprocessing"] = Measured(10, 3.0, 640, fetch=1.5)
    found = split(made)
    assert found.fetch == pytest.approx(0.15)
    assert found.preprocessing == pytest.approx(0.05)


def test_the_slowest_rank_is_the_job() -> None:
    ranks = [split(runs(0.5, 0.3, 0.2, 0.1)), split(runs(0.7, 0.3, 0.2, 0.1))]
    assert slowest_rank(ranks) is ranks[1]


@given(seconds, seconds, seconds, seconds, seconds, st.tuples(seconds, seconds, seconds))
def test_a_wait_is_divided_without_rest(
    since: float, waited: float, asked: float, answering: float, receiving: float, server: tuple[float, ...]
) -> None:
    fetch, prepare, total = server
    timing = ServerTiming(FrameTiming(fetch, prepare), total)
    arrival = Arrival(asked, asked + answering, asked + answering + receiving, timing)
    found = attribute_stall(since, since + waited, arrival)
    assert min(found.network, found.preprocessing, found.fetch) >= 0
    assert found.seconds == pytest.approx(waited, abs=1e-9)


def test_a_wait_is_divided_as_the_node_says() -> None:
    timing = ServerTiming(FrameTiming(0.2, 0.5), 0.8)
    arrival = Arrival(10.0, 11.0, 11.5, timing)
    found = attribute_stall(10.0, 11.5, arrival)
    assert (found.network, found.preprocessing, found.fetch) == pytest.approx((0.7, 0.6, 0.2))
    assert attribute_stall(11.0, 11.5, arrival) == Stall(0.5)


def test_a_frame_that_others_began_is_waited_for_only_so_long() -> None:
    joined = ServerTiming(FrameTiming(3.0, 1.0), 0.4)
    assert joined.fetch == pytest.approx(0.3)
    assert joined.preprocessing == pytest.approx(0.1)


@given(seconds, seconds, seconds)
def test_timings_come_as_they_were_sent(fetch: float, prepare: float, total: float) -> None:
    sent = ServerTiming(FrameTiming(fetch, prepare), total)
    found = parse_timing(sent.to_header())
    assert (found.took.fetch, found.took.prepare, found.total) == pytest.approx(
        (fetch, prepare, total), abs=1e-6
    )


@pytest.mark.parametrize("header", ["", "x", "fetch;dur=nan", "total;dur=-1", "fetch;dur=" + "9" * 300])
def test_what_makes_no_sense_says_nothing(header: str) -> None:
    assert parse_timing(header) == ServerTiming(FrameTiming(), 0.0)


def test_au_leaves_out_the_first_step_of_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("meshsdk.loader_stats.time.monotonic", lambda: now[0])
    meter = Meter()
    for _ in range(2):
        meter.start()
        meter.add_wait(5.0, Stall(1.0, 1.0, 3.0), steady=False)
        now[0] += 6.0  # the first step: 5 s of waiting, 1 s of compute
        meter.mark_steady(now[0])
        for _ in range(3):
            meter.add_wait(0.5, Stall(), steady=True)
            now[0] += 2.0
        meter.stop()
    stats = meter.snapshot(None, 0)
    assert stats.au == pytest.approx(0.75)
    assert stats.compute + stats.network + stats.preprocessing + stats.fetch == pytest.approx(24.0)
    assert (stats.fetch, stats.preprocessing) == (6.0, 2.0)


OPS = [
    {"op": "decode", "field": "image"},
    {"op": "resize", "field": "image", "args": {"size": 256}},
    {"op": "hflip", "field": "image"},
]


@pytest.mark.parametrize(
    ("found", "about", "fix", "gain"),
    [
        (Split(1.0, 0.01, 0.0, 0.0, 1), PlanFacts(), "no stall", 1.0),
        (Split(0.2, 0.8, 0.0, 0.0, 1), PlanFacts(dtypes={"float32": 600}), "narrow types", 2.5),
        (
            Split(0.2, 0.8, 0.0, 0.0, 1),
            PlanFacts(network=Network(9, receiving=1.0, seconds=9.0)),
            "connections=8",
            1 / 0.6,
        ),
        (
            Split(0.2, 0.8, 0.0, 0.0, 1),
            PlanFacts(network=Network(9, receiving=8.0, seconds=9.0)),
            "a faster link",
            5.0,
        ),
        (
            Split(0.2, 0.8, 0.0, 0.0, 1),
            PlanFacts(network=Network(9, cpu=9, seconds=9.0)),
            "verify",
            1.087,
        ),
        (Split(0.2, 0.8, 0.0, 0.0, 1), PlanFacts(), "cache node", 5.0),
        (
            Split(0.2, 0.0, 0.8, 0.0, 1),
            PlanFacts(
                parse_spec({"ops": OPS}),
                ops={"decode": 6.0, "resize": 2.0, "hflip": 2.0},
                random=frozenset({"hflip"}),
            ),
            "decode, resize (80% of the ops' time)",
            1 / 0.36,
        ),
        (
            Split(0.2, 0.0, 0.8, 0.0, 1),
            PlanFacts(ops={"mine/slow": 9.0}, transforms=4),
            "(now 4) up to the number of cores, or add a node with the role compute; mine/slow takes 100%",
            1 / 0.6,
        ),
        (
            Split(0.2, 0.0, 0.8, 0.0, 1),
            PlanFacts(ops={"mine/slow": 9.0}, transforms=3, cores=4),
            "(now 3) up to 4, the number of cores, or add a node with the role compute; mine/slow takes 100%",
            1 / 0.8,
        ),
        (
            Split(0.2, 0.0, 0.8, 0.0, 1),
            PlanFacts(ops={"mine/slow": 9.0}, transforms=2, cores=2),
            "nodes with the role compute: each of the 2 cores has a transform process; mine/slow takes 100%",
            1 / 0.6,
        ),
        (
            Split(0.2, 0.0, 0.0, 0.8, 1),
            PlanFacts(origin=True, source="s3://a/b"),
            "prefetch s3://a/b",
            5.0,
        ),
        (Split(0.2, 0.0, 0.0, 0.8, 1), PlanFacts(parse_spec({})), "Blocks", 1 / 0.6),
        (Split(0.2, 0.0, 0.0, 0.8, 1), PlanFacts(), "faster disks", 5.0),
        (
            Split(0.2, 0.0, 0.0, 0.8, 1),
            PlanFacts(parse_spec({}), source="s3://a/b", seeks=0.9),
            "Blocks(…) as `mesh preflight s3://a/b` proposes",
            1 / 0.6,
        ),
        (
            Split(0.2, 0.0, 0.0, 0.8, 1),
            PlanFacts(parse_spec({"shuffle": {"kind": "none"}}), seeks=0.9),
            "a larger meshd serve --read-ahead",
            1 / 0.6,
        ),
        (Split(0.2, 0.0, 0.0, 0.8, 1), PlanFacts(parse_spec({}), seeks=0.1), "then read in order", 1 / 0.6),
    ],
)
def test_the_cheapest_fix(found: Split, about: PlanFacts, fix: str, gain: float) -> None:
    advice = advise(found, about)
    assert fix in advice.fix
    assert advice.gain == pytest.approx(gain, rel=0.01)
    assert fix in advice_sentence(found, advice)


def test_seeks_of_rotational_disks_are_told_and_many_of_them_with_a_fix() -> None:
    assert disk_notes(PlanFacts()) == []
    few = "rotational disks of the nodes: 0.012 seeks per sample"
    assert disk_notes(PlanFacts(seeks=0.0123)) == [few]
    [many] = disk_notes(PlanFacts(parse_spec({}), seeks=0.31))
    assert many.startswith("rotational disks of the nodes: 0.31 seeks per sample: shuffle=mesh.Blocks(…)")


def test_a_table_for_a_person() -> None:
    ranks = [Split(0.1, 0.02, 0.18, 0.2, 256), Split(0.1, 0.02, 0.18, 0.1, 256)]
    shown = render_report(Diagnosis(ranks, advise(ranks[0], PlanFacts()), 32, ("a note",)))
    assert "+ preprocessing on the nodes" in shown
    assert "300.0 ms" in shown
    assert "AU 20.0%" in shown
    assert "2 ranks" in shown
    assert "note: a note" in shown


def test_a_step_that_computes_nothing_has_no_ceiling() -> None:
    idle = Split(1e-8, 0.01, 0.02, 0.0, 256)
    assert (idle.ceiling, idle.computes) == (0.0, False)
    row = next(
        line
        for line in render_report(Diagnosis([idle], advise(idle, PlanFacts()), 32)).splitlines()
        if "ceiling" in line
    )
    assert row.split()[-2:] == ["–", "0%"]
