"""The simulator: the same seed, the same result; queues by hand; faults; failures against the formula."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from meshd.batches.read_ahead.read_cost import SEEK_SECONDS, SHORT_SEEK_SECONDS
from meshsdk.cli import run
from meshsdk.errors import ConfigurationError
from meshtools.simulator.durability import expected_losses, simulate_failures
from meshtools.simulator.epoch import EpochSimulation
from meshtools.simulator.repairs import plan_copies
from meshtools.simulator.report import epoch_figures
from meshtools.simulator.resources import NodeResources
from meshtools.simulator.scenario import (
    Data,
    Disks,
    Fault,
    Jobs,
    Mesh,
    Origin,
    Writes,
    parse_scenario,
    scenario_text,
    shipped_scenarios,
)
from meshwire.cluster.cluster_map import ClusterMap, Node

if TYPE_CHECKING:
    from meshtools.simulator.scenario import (
        Scenario,
    )

ROOT = Path(__file__).resolve().parents[3]
SAMPLES = 60_000
SMALL = """
[mesh]
nodes = 6
nodes_per_rack = 2
slots = 1024
lost_seconds = 5
[data]
samples = 60_000
cpu_seconds_per_sample = 0.001
[jobs]
batch = 1024
step_seconds = 0.02
block_shards = 32
"""


def read_scenario(name: str) -> Scenario:
    return parse_scenario(scenario_text(name), name)


def figures(text: str, **changes: Any) -> dict[str, Any]:
    found = parse_scenario(text, "test")
    simulated = EpochSimulation(replace(found, **changes))
    simulated.run()
    assert sum(job.samples for job in simulated.jobs) == SAMPLES * found.jobs.count * found.jobs.epochs
    return epoch_figures(simulated)


def test_the_same_seed_gives_the_same_result_and_another_does_not() -> None:
    first = figures(SMALL)
    assert first == figures(SMALL)
    assert first != figures(SMALL, seed=1)


def test_small_windows_read_all_that_is_wanted_and_gaps_once() -> None:
    found = figures(SMALL.replace("[data]", "read_ahead_bytes = 128e6\n[data]"))
    assert found["seeks_per_sample"] > 0.01
    assert 1 <= found["read_bytes"] / (SAMPLES * 70_000) <= 1.1
    assert found["read_over_wanted"] < 1  # the next epoch's first window is in memory by then


def test_one_disk_in_stored_order_by_hand() -> None:
    # 20,000 samples of 70 KB are 1.4 GB in 20 shards: 7 s of media and at least 20 seeks; compute takes 2 s,
    # and overlaps.
    text = """
    [mesh]
    nodes = 1
    copies = 1
    disks_per_node = 1
    [data]
    samples = 20_000
    [jobs]
    batch = 1000
    step_seconds = 0.1
    shuffle = "none"
    """
    simulated = EpochSimulation(parse_scenario(text, "test"))
    simulated.run()
    found = epoch_figures(simulated)
    least = 20_000 * 70_000 / 200e6 + 20 * SEEK_SECONDS
    assert least <= found["seconds"] <= least * 1.1
    assert found["disks_busy_most"] > 0.9
    assert found["read_bytes"] == pytest.approx(1.4e9, rel=0.01)


def test_fast_disks_leave_the_compute_as_the_bound() -> None:
    found = figures(
        SMALL.replace("nodes_per_rack", "seek_scale = 0\ndisk_bytes_per_second = 5e9\nnodes_per_rack")
    )
    assert found["seconds"] == pytest.approx(math.ceil(SAMPLES / 1024) * 0.02, rel=0.1)


def test_jobs_that_share_are_prepared_once() -> None:
    apart = figures(SMALL.replace("[jobs]", "[jobs]\ncount = 4"))
    shared = figures(SMALL.replace("[jobs]", "[jobs]\ncount = 4\nsharing = true"))
    assert shared["cores_busy"] * shared["seconds"] == pytest.approx(
        apart["cores_busy"] * apart["seconds"] / 4, rel=0.01
    )
    assert shared["sent_bytes"] == apart["sent_bytes"] == 4 * SAMPLES * 70_000


def test_a_job_that_shares_waits_until_the_other_job_s_batch_is_made() -> None:
    """Preparing a batch takes a second of the one core; nothing else takes long."""
    text = """
    [mesh]
    nodes = 1
    copies = 1
    cores_per_node = 1
    seek_scale = 0
    disk_bytes_per_second = 1e12
    [data]
    samples = 4000
    cpu_seconds_per_sample = 0.001
    [jobs]
    count = 2
    batch = 1000
    step_seconds = 0.0
    sharing = true
    """
    simulated = EpochSimulation(parse_scenario(text, "test"))
    simulated.run()
    ends = [job.end for job in simulated.jobs]
    assert ends == pytest.approx([4.0, 4.0], rel=0.05)
    assert [job.waits[0] for job in simulated.jobs] == pytest.approx([1.0, 1.0], rel=0.1)


def test_a_disk_rests_between_reads_and_is_not_busy_then() -> None:
    text = """
    [mesh]
    nodes = 1
    copies = 1
    disks_per_node = 1
    disk_rest_seconds = {}
    [data]
    samples = 20_000
    [jobs]
    batch = 1000
    step_seconds = 0.0
    shuffle = "none"
    """
    runs = [EpochSimulation(parse_scenario(text.format(rest), "test")) for rest in ("0.0", "0.005")]
    for each in runs:
        each.run()
    busy = [float(each.nodes.disk_seconds.sum()) for each in runs]
    assert busy[0] == pytest.approx(busy[1])
    # 1.4 GB in reads of 1 MiB
    rest = 1.4e9 / (1 << 20) * 0.005
    assert runs[1].jobs[0].end - runs[0].jobs[0].end == pytest.approx(rest, rel=0.05)


def test_cold_inodes_cost_short_seeks_before_the_bytes_of_a_window() -> None:
    """Four shards of 2 MB, whose inodes are in one block, are read twice, from a cold and a warm table."""
    shards, size = np.arange(4), 2_000_000
    mesh = Mesh(1, 1, disks_per_node=1, page_cache_bytes=1.0)
    data = Data(80, size // 20, 20)
    nodes = NodeResources(mesh, data, 1, np.zeros((4, 1), np.int64))
    rows, ends, owners = np.tile(np.arange(20), 4), np.arange(1, 5) * 20, np.zeros(4, np.int64)
    cold = nodes.read_shards(0.0, shards, rows, ends, owners)
    assert nodes.seeks == 4 + 1
    warm = nodes.read_shards(100.0, shards, rows, ends, owners) - 100.0
    assert nodes.seeks == 5 + 4  # no shard is in memory any more, but their inodes are
    assert np.diff(cold) == pytest.approx(np.diff(warm)[0], rel=0.01)
    assert cold[0] - warm[0] == pytest.approx(SHORT_SEEK_SECONDS)


def test_a_map_that_exists_places_the_data_and_each_node_has_windows_of_its_share() -> None:
    nodes = tuple(
        Node(name, f"http://{name}:9000", weight=weight, complete=1)
        for name, weight in (("large", 4), ("small", 1), ("tiny", 1))
    )
    text = SMALL.replace("nodes = 6", "nodes = 3\ncopies = 1\nread_ahead_bytes = 200e6")
    simulated = EpochSimulation(parse_scenario(text, "test"), cluster=ClusterMap(1, nodes, 1024, 1))
    simulated.run()
    busy = simulated.nodes.disk_seconds
    assert busy[0] > 2.5 * busy[1:].max()
    windows = [
        [span for span in simulated.spans if span.track == f"disks of {node.node_id}"] for node in nodes
    ]
    assert len(windows[0]) > 2 * max(len(windows[1]), len(windows[2]))
    for track in windows:
        assert all(a.start + a.seconds <= b.start + 1e-9 for a, b in pairwise(track))


def test_rows_for_a_builder_come_from_nodes_that_were_not_asked_for_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One copy on three nodes: two thirds of a whole batch are on others, where no window may be planned."""
    text = SMALL.replace("nodes = 6", "nodes = 3\ncopies = 1\nread_ahead_bytes = 200e6")
    text = text.replace("[data]", "[data]\nsamples_per_shard = 64") + "sharing = true\n"
    simulated = EpochSimulation(parse_scenario(text, "test"))
    read_shards, alone = simulated.nodes.read_shards, []

    def noted(*args: Any, **options: Any) -> Any:
        if options.get("between"):
            alone.append(args)
        return read_shards(*args, **options)

    monkeypatch.setattr(simulated.nodes, "read_shards", noted)
    simulated.run()
    assert 0 < len(alone) < SAMPLES / 64
    assert simulated.nodes.read_bytes == pytest.approx(SAMPLES * 70_000, rel=0.1)


def test_a_lost_rack_stalls_jobs_for_a_lease_and_is_repaired() -> None:
    fault = '[[fault]]\nkind = "lose"\nat_seconds = 0.3\nfirst = 2\ncount = 2\n'
    before, found = figures(SMALL), figures(SMALL + fault)
    assert before["wait_longest_seconds"] < 5
    assert 9 <= found["wait_longest_seconds"] <= 13  # a lease of 10 s
    assert found["seconds"] > before["seconds"] + 8
    assert found["map_changes"] == 1  # both nodes are marked in one version


def test_data_that_is_lost_for_good_is_said_to_be() -> None:
    one_rack = SMALL.replace("nodes_per_rack = 2", "nodes_per_rack = 6\ncopies = 1")
    fault = '[[fault]]\nkind = "lose"\nat_seconds = 0.1\nfirst = 2\n'
    with pytest.raises(ConfigurationError, match="all copies are lost"):
        figures(one_rack + fault)


def test_repair_copies_what_a_node_had() -> None:
    # Two copies on six nodes: a node has a third of the data.
    fault = '[[fault]]\nkind = "lose"\nat_seconds = 0\nfirst = 2\ncount = 1\n'
    slow = SMALL.replace("step_seconds = 0.02", "step_seconds = 1")
    found = figures(slow + fault)
    assert found["repairs"][0]["bytes"] == pytest.approx(SAMPLES * 70_000 * 2 / 6, rel=0.15)


def test_how_long_copies_are_missing() -> None:
    """Two copies on six nodes: a node has a third of the data, of which a copy is missing for a lease of
    10 s, the 7 s until it is given up, and the repair."""
    text = SMALL.replace("nodes = 6", "nodes = 6\nstored_bytes = 1e12")
    text = text.replace("lost_seconds = 5", "lost_seconds = 7")
    fault = '[[fault]]\nkind = "lose"\nat_seconds = 0.5\nfirst = 2\ncount = 1\n'
    found = figures(text.replace("step_seconds = 0.02", "step_seconds = 1000") + fault)
    [repair], whole = found["repairs"], SAMPLES * 70_000 + 1e12
    assert repair["short_bytes"] == pytest.approx(whole / 3, rel=0.12)  # within a tenth, by whole slots
    assert repair["short_bytes"] <= repair["bytes"] <= 2 * repair["short_bytes"]
    assert repair["bytes"] == pytest.approx(repair["slots"] * whole / 1024, rel=1e-6)
    slowest = repair["most"] * whole / 1024 / 50e6
    assert slowest <= repair["seconds"] + 0.1 <= 3 * slowest
    assert repair["short_seconds"] == pytest.approx(10 + 7 + repair["seconds"], abs=0.2)


def test_a_repair_is_as_slow_as_its_slowest_sender_and_uplink() -> None:
    mesh = parse_scenario(SMALL.replace("nodes_per_rack = 2", "nodes_per_rack = 1"), "test").mesh
    before = np.array([[0, 1], [0, 1], [0, 2], [3, 1]])
    after = np.array([[0, 4], [0, 5], [0, 4], [3, -1]])
    gone = np.zeros(7, np.bool_)
    gone[[1, 2, 6]] = True  # and 6 for nobody
    plan = plan_copies(before, after, gone)
    assert (plan.receivers.tolist(), plan.senders.tolist()) == ([4, 5, 4], [0, 0, 0])
    # Node 0 sends three slots, of 100 MB at 50 MB/s.
    assert plan.seconds(mesh, 100e6).tolist() == [0, 0, 0, 0, 6, 6]
    narrow = replace(mesh, rack_oversubscription=125.0)  # 25 MB/s
    assert plan.seconds(narrow, 100e6).tolist() == [0, 0, 0, 0, 12, 12]
    nothing = plan_copies(before, after, np.array([1, 1, 1, 0, 0, 0, 1], np.bool_))
    assert nothing.receivers.size == 0  # all copies of these are lost


def test_nodes_that_join_get_their_share() -> None:
    fault = '[[fault]]\nkind = "join"\nat_seconds = 0.3\ncount = 3\n'
    found = figures(SMALL.replace("step_seconds = 0.02", "step_seconds = 1") + fault)
    assert found["repairs"][0]["bytes"] == pytest.approx(SAMPLES * 70_000 * 2 / 3, rel=0.15)
    assert found["map_changes"] >= 3 + 9


def test_renewals_of_leases_keep_etcd_busy() -> None:
    """Four renewals in each lease, 1.3 ms of etcd each; half as many with a lease of twice the time."""
    found = figures(SMALL)
    assert found["lease_renewals_per_second"] == pytest.approx(4 / 10 * 6)
    assert found["etcd_cores"] == pytest.approx(4 / 10 * 6 * 1.26e-3, rel=0.1)
    longer = figures(SMALL.replace("[data]", "lease_seconds = 20\n[data]"))
    assert longer["etcd_cores"] == pytest.approx(found["etcd_cores"] / 2, abs=1e-3)


def test_a_restart_of_all_racks_loses_no_batch() -> None:
    fault = '[[fault]]\nkind = "restart"\nat_seconds = 0.5\ncount = 6\nat_once = 2\nseconds = 1\n'
    found = figures(SMALL + fault)
    assert found["wait_longest_seconds"] < 10  # no lease has to expire
    assert found["map_changes"] == 3 + 6 + 6  # groups away; returning, complete


def test_caches_of_an_origin_by_hand() -> None:
    """Three epochs of 4.2 GB. With room for all, each byte comes once; with room for half, and the order of
    the plan known, the other half comes in every epoch, but for what lies between the watermarks."""
    text = SMALL.replace("[jobs]", "[origin]\nbytes_per_second = 1e9\ncache_bytes = {}\n[jobs]\nepochs = 3")
    text = text.replace(
        "[data]", "page_cache_bytes = 1e6\nread_ahead_bytes = 1e9\n[data]\nsamples_per_shard = 128"
    )
    data = SAMPLES * 70_000
    every = figures(text.format(2e9))
    assert every["origin_bytes"] == pytest.approx(data, rel=0.01)
    assert every["seconds"] > data / 1e9
    half = figures(text.format(data / 2 / 6))
    assert 2.0 * data <= half["origin_bytes"] <= 2.3 * data


WRITES = "[writes]\nbytes_per_second = 64e6\nobject_bytes = 32_000_000\n"


def test_a_write_on_idle_disks_by_hand() -> None:
    found = figures(SMALL.replace("step_seconds = 0.02", "step_seconds = 0.5") + WRITES)
    least = 0.002 + SEEK_SECONDS + 32e6 / 200e6  # and 32 MB to the second node, at 3.125 GB/s
    assert least < found["write_p50_seconds"] < least + 0.05
    assert found["writes"] == pytest.approx(2 * found["seconds"], abs=2)
    assert found["written_bytes"] == pytest.approx(2 * 32e6 * found["writes"], rel=0.1)


def test_a_partition_is_a_lease_long_and_what_was_missed_is_copied() -> None:
    fault = '[[fault]]\nkind = "partition"\nat_seconds = 1\nfirst = 2\ncount = 2\nseconds = {}\n'
    slow = SMALL.replace("step_seconds = 0.02", "step_seconds = 0.5") + WRITES
    found = figures(slow + fault.format(20))
    assert 5 <= found["wait_longest_seconds"] <= 8  # a lease of 10 s, without 8 batches ahead of 0.5 s each
    assert 9 <= found["write_longest_seconds"] <= 12
    assert found["map_changes"] == 1 + 2 + 2  # away together; each returns, and is complete
    # 64 MB/s of ten seconds, and of the lease; two of six nodes have a third of the two copies.
    [copied] = found["repairs"]
    assert 0.8 <= copied["bytes"] / (20 * 64e6 * 2 / 3) <= 1.3
    short = figures(slow + fault.format(4))
    assert short["wait_longest_seconds"] < 2
    assert (short["map_changes"], short["repairs"]) == (0, [])


def test_failures_agree_with_the_formula() -> None:
    scenario = replace(read_scenario("ten-years"), seed=3)
    found = simulate_failures(scenario)
    assert found.expected > 50
    assert abs(found.lost - found.expected) < 5 * math.sqrt(found.expected) + 0.1 * found.expected
    assert found.failures == pytest.approx(100 * 12 * 0.1 * 10, rel=0.15)
    assert expected_losses(3, 0.1, 86_400) < expected_losses(2, 0.1, 86_400) / 1000


def test_scenarios_that_ship_can_be_read() -> None:
    assert {"mission", "epoch-1000", "rack-lost", "join-500", "ten-years"} <= set(shipped_scenarios())
    for name in shipped_scenarios():
        assert read_scenario(name).name == name


@pytest.mark.parametrize("table", [Mesh, Data, Jobs, Fault, Origin, Writes, Disks])
def test_the_page_of_the_simulator_has_every_name(table: type[Any]) -> None:
    page = (ROOT / "docs" / "simulator.md").read_text()
    names = page[page.index("### Names in a scenario") : page.index("## What is simulated")]
    for each in fields(table):
        assert re.search(rf"^\|[^|]*\b{each.name}`", names, re.MULTILINE), each.name


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nodes = 6", "nods = 6", "there is no 'nods'; did you mean 'nodes'?"),
        ("nodes = 6", "nodes = 6.5", "nodes = 6.5: expected a whole number"),
        ("nodes = 6\n", "", "[mesh]: nodes missing"),
        ("[mesh]", "seed = -1\n[mesh]", "seed = -1: expected a whole number"),
        ("[mesh]", "fault = 1\n[mesh]", "write [[fault]]"),
        ("[jobs]", "[fault]\nkind = 'lose'\nat_seconds = 1\n[jobs]", "write [[fault]]"),
        (
            "[jobs]",
            "[[fault]]\nkind = 'lose'\nat_seconds = 1\nfirst = 6\n[jobs]",
            "the mesh has nodes 0 to 5",
        ),
        ("slots = 1024", "slots = 1000", "slots is a power of two"),
        ("[data]", "[dta]", "no table 'dta'"),
        ("batch = 1024", "batch = 0", "[jobs] batch = 0: it must be at least 1"),
        ("nodes = 6", "nodes = 6\ncores_per_node = 0", "[mesh] cores_per_node = 0: it must be above 0"),
        ("nodes = 6", "nodes = 6\nlease_seconds = 0", "[mesh] lease_seconds = 0: it must be above 0"),
        ("nodes = 6", "nodes = 6\nseek_scale = inf", "seek_scale = inf: expected a number"),
        ("nodes = 6", "nodes = 6\ncopies = 7", "copies = 7: at most 8, and at most as many as nodes"),
        ("samples = 60_000", "samples = 0", "[data] samples = 0: it must be at least 1"),
        ("block_shards = 32", "block_shards = 32\nshare = 2.0", "[jobs] share = 2.0: at most 1"),
        ("[jobs]", "[writes]\nbytes_per_second = 1e6\nretry_seconds = 0\n[jobs]", "retry_seconds = 0"),
        (
            "[jobs]",
            "[[fault]]\nkind = 'restart'\nat_seconds = 1\nat_once = 0\n[jobs]",
            "[fault] at_once = 0: it must be at least 1",
        ),
    ],
)
def test_a_wrong_scenario_is_named(old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        parse_scenario(SMALL.replace(old, new), "test")


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    scenario, trace, plot = tmp_path / "mine.toml", tmp_path / "trace.json", tmp_path / "plot.svg"
    scenario.write_text(SMALL)
    assert run(["simulate", str(scenario), "--json", "--trace", str(trace), "--plot", str(plot)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["samples_per_second"] > 0
    events = json.loads(trace.read_text())["traceEvents"]
    computed = [event for event in events if event["name"] == "compute"]
    assert len(computed) == 59
    assert all(event["dur"] == pytest.approx(20_000) for event in computed)
    assert plot.read_text().startswith("<svg ")
    assert run(["simulate", str(tmp_path / "absent.toml")]) == 3
    assert "there is no file" in capsys.readouterr().err
    assert run(["simulate", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == shipped_scenarios()
    assert all(len(line) > 40 for line in listed), "each says what it shows"
    assert run(["simulate", "mission", "--show"]) == 0
    assert parse_scenario(capsys.readouterr().out, "mission") == read_scenario("mission")
    assert run(["simulate", "ten-years"]) == 0
    assert "nines by the formula" in capsys.readouterr().out
    assert run(["simulate", "no-such"]) == 3
    assert capsys.readouterr().err.count("rack-lost") == 1
    for option, wrong in (("--plot", ""), ("--plot", "."), ("--plot", "/"), ("--trace", "")):
        assert run(["simulate", str(scenario), option, wrong]) == 2
        assert {"--plot": "chart.svg", "--trace": "empty"}[option] in capsys.readouterr().err
    (tmp_path / "folder.svg").mkdir()
    assert run(["simulate", str(scenario), "--plot", str(tmp_path / "folder.svg")]) == 2
    assert "folder.svg' is a directory" in capsys.readouterr().err
    assert run(["simulate", str(scenario), "--trace", str(tmp_path / "absent" / "trace.json")]) == 2
    assert "--trace: there is no directory" in capsys.readouterr().err
