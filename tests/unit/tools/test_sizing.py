"""Sizes of meshes: the worked examples of docs/sizing.md by hand, what bounds a design, and the command."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest

from meshd.batches.read_ahead import extents, read_cost
from meshsdk.cli import run
from meshsdk.errors import ConfigurationError
from meshtools.cli.hardware_estimate import compare
from meshtools.sizing.assumptions import parse_values, shipped_assumptions
from meshtools.sizing.estimate import Design, drives_usd, estimate, rotational_seconds
from meshtools.sizing.workload import Workload, workload_of

if TYPE_CHECKING:
    from pathlib import Path

    from meshtools.sizing.estimate import Estimate

ASSUMED = shipped_assumptions()
SIXTEEN = Workload(100e12, 100e12 / 70e3, gpus=16, bytes_per_gpu_second=200e6)
ROTATIONAL = Design("rotational", "rotational")
NVME = Design("NVMe", "nvme")


def load(found: Estimate, resource: str) -> float:
    return next(each.utilization for each in found.loads if each.resource == resource)


def test_sixteen_gpus_by_hand() -> None:
    # 16 × 200 MB/s = 3.2 GB/s; a disk gives 200 / 1.3 = 153.8 MB/s, of which 80 % are planned for: 123.1.
    # 3,200 / 123.1 = 26.0 disks. Two copies need 200 / (20 × 0.85) = 11.8. 100 TB / 3.2 GB/s = 8.68 h.
    found = estimate(SIXTEEN, ROTATIONAL, ASSUMED)
    assert found.hardware.rotational_drives == pytest.approx(26, rel=0.05)
    assert found.hardware.nodes == 3  # of 12 disks
    assert found.epoch_seconds == pytest.approx(8.68 * 3600, rel=0.05)
    assert load(found, "disk") == pytest.approx(3200 / 153.8 / 26, rel=0.05)
    assert load(found, "network") == pytest.approx(3.2 / (3 * 3.125), rel=0.05)
    # 3 × (2,500 + 8 × 60 + 32 × 5 + 450) + 26 × 320
    assert found.hardware_usd == pytest.approx(19_090, rel=0.05)


def test_a_petabyte_in_ten_days_by_hand() -> None:
    # 1 PB / 864,000 s = 1.157 GB/s: 7.5 disks busy. Two copies fill 2,000 / 17 = 117.6 disks, in 10 nodes.
    found = estimate(Workload(1e15, 1e10, deadline_seconds=864_000), ROTATIONAL, ASSUMED)
    assert found.bytes_per_second == pytest.approx(1.157e9, rel=0.05)
    assert (found.hardware.rotational_drives, found.hardware.nodes) == (118, 10)
    assert load(found, "disk") == pytest.approx(7.52 / 118, rel=0.05)
    assert found.bound.resource == "space"
    assert found.total_seconds == pytest.approx(864_000)
    assert not found.problems


def test_nvme_against_disks_by_hand() -> None:
    # One copy of 100 TB on NVMe: 100 / (7.68 × 0.85) = 15.3, so 16 drives of $2,688; on full drives, 13.02
    # of them are $35,000, and 14 whole ones $37,632. Disks for the same 3.2 GB/s: 26 × $320 = $8,320.
    nvme = estimate(SIXTEEN, replace(NVME, copies=1), ASSUMED)
    disks = estimate(SIXTEEN, replace(ROTATIONAL, copies=1), ASSUMED)
    assert drives_usd(nvme.hardware, ASSUMED) == pytest.approx(16 * 2688, rel=0.05)
    assert drives_usd(disks.hardware, ASSUMED) == pytest.approx(26 * 320, rel=0.05)
    full = estimate(SIXTEEN, replace(NVME, copies=1), ASSUMED.changed({"limits.fill": 1.0}, "test"))
    assert drives_usd(full.hardware, ASSUMED) == pytest.approx(14 * 2688, rel=0.05)
    assert 100e12 / ASSUMED["nvme.bytes_per_drive"] * 2688 == pytest.approx(35_000, rel=0.05)
    assert load(nvme, "NVMe") < 0.05  # its rate is not needed


def test_rates_are_those_that_the_nodes_compute_with() -> None:
    assert ASSUMED["rotational.gap_bytes"] == extents.GAP_BYTES
    assert ASSUMED["rotational.bytes_per_second"] == read_cost.MEDIA_RATE
    assert ASSUMED["rotational.short_seek_seconds"] == read_cost.SHORT_SEEK_SECONDS


@pytest.mark.parametrize(("share", "milliseconds"), [(0.2, 3.5), (0.1, 5.35), (0.05, 5.35)])
def test_a_full_shuffle_costs_the_gap_or_a_short_seek(share: float, milliseconds: float) -> None:
    full = replace(SIXTEEN, order="full", read_ahead_share=share)
    assert rotational_seconds(full, 70e3, ASSUMED)[0] * 1000 == pytest.approx(milliseconds, rel=0.05)


def test_what_bounds_moves_with_the_workload() -> None:
    photo = replace(SIXTEEN, cpu_seconds_per_sample=0.00111, delivered_bytes_per_sample=150_528, epochs=90)
    kept = replace(photo, kept_bytes_per_sample=562_500, kept_cpu_seconds_per_sample=0.0003)
    cores = {name: estimate(photo, design, ASSUMED).hardware for name, design in (("d", ROTATIONAL),)}["d"]
    # 45,714 samples/s × (1.11 ms + 150,528 B × 1.79 ns/B) = 63 cores busy
    assert cores.nodes * cores.cores_per_node * 0.8 >= 63
    view = estimate(photo, Design("v", "nvme", form="view"), ASSUMED)
    assert view.prepare_seconds > 0
    assert view.total_seconds == pytest.approx(view.prepare_seconds + 90 * view.epoch_seconds)
    decoded = estimate(kept, Design("k", "nvme", form="decoded"), ASSUMED)
    assert decoded.first_epoch_seconds >= decoded.epoch_seconds
    full = estimate(replace(SIXTEEN, order="full"), ROTATIONAL, ASSUMED)
    assert "seeks" in {each.resource for each in full.loads}
    slow = replace(SIXTEEN, deadline_seconds=3600.0, budget_usd=1000.0)  # the GPUs need 8.7 h
    assert estimate(slow, ROTATIONAL, ASSUMED).problems == ("misses the deadline", "exceeds the budget")


def test_hardware_carries_its_workload_and_more_jobs_need_more() -> None:
    before = 0.0
    for jobs in (1, 2, 4, 8, 16):
        found = {each.design.name: each for each in compare(replace(SIXTEEN, jobs=jobs), ASSUMED)}
        for each in found.values():
            assert all(one.utilization <= 1 for one in each.loads), each
            assert each.runs >= jobs
            assert each.sharing_runs >= each.runs
        assert found["rotational"].hardware_usd > before
        before = found["rotational"].hardware_usd
    sharing = estimate(replace(SIXTEEN, jobs=16, sharing=True), ROTATIONAL, ASSUMED)
    assert sharing.hardware.rotational_drives == 26
    assert sharing.hardware_usd < before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data_bytes": 1.0}, "samples missing"),
        ({"data_bytes": 1e9, "samples": 10.0}, "give the number of GPUs"),
        ({"data_bytes": 1e9, "samples": 10.0, "epocs": 3}, "did you mean 'epochs'"),
        ({"data_bytes": 1e9, "samples": 0, "deadline_seconds": 9}, "samples is 0"),
        ({"data_bytes": 1e9, "samples": 9, "jobs": 1.5}, "jobs is 1.5"),
        ({"data_bytes": 1e9, "samples": 9, "deadline_seconds": 9, "budget_usd": -1}, "budget_usd is -1"),
        (
            {"data_bytes": 1e9, "samples": 9, "deadline_seconds": 9, "delivered_bytes_per_sample": -1},
            "delivered_bytes_per_sample is -1",
        ),
        (
            {"data_bytes": 1e9, "samples": 9, "deadline_seconds": 9, "cpu_seconds_per_sample": float("nan")},
            "cpu_seconds_per_sample is nan",
        ),
        ({"data_bytes": 1e9, "samples": 9, "gpus": 1, "bytes_per_gpu_second": float("inf")}, "is inf"),
        ({"data_bytes": 1e9, "samples": 9, "order": "none", "deadline_seconds": 9}, "order is 'none'"),
    ],
)
def test_a_wrong_description_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        workload_of(values)


def test_assumptions_have_sources_and_are_changed_by_name() -> None:
    assert all(figure.source and figure.date for _, figure in ASSUMED.items())
    changed = ASSUMED.changed(parse_values("[rotational]\nusd_per_drive = 280", "mine.toml"), "mine.toml")
    assert (changed["rotational.usd_per_drive"], ASSUMED["rotational.usd_per_drive"]) == (280, 320)
    with pytest.raises(ConfigurationError, match=r"no assumption 'nvme\.prize'"):
        ASSUMED.changed({"nvme.prize": 1.0}, "")
    with pytest.raises(ConfigurationError, match="from 0 up"):
        ASSUMED.changed({"nvme.usd_per_drive": -1.0}, "")
    for name in ("limits.fill", "node.most_cores", "rotational.bytes_per_second", "nvme.drives_per_node"):
        with pytest.raises(ConfigurationError, match=re.escape(f"{name} is 0.0; it must be above 0")):
            ASSUMED.changed({name: 0.0}, "")
    with pytest.raises(ConfigurationError, match=r"limits\.fill is 2\.0; it must be at most 1"):
        ASSUMED.changed({"limits.fill": 2.0}, "")


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('data_bytes = 100e12\nsamples = 1_428_571_429\nepochs = 2\nops = "photo"\n')
    options = ["--gpus", "16", "--gpu-rate", "200MB/s", "--plot", str(tmp_path / "job.svg")]
    assert run(["sizing", str(job), *options, "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(records) == 8
    first = next(record for record in records if record["design"] == "rotational")
    assert first["rotational_drives"] == 26
    labels = {text.text for text in ET.parse(tmp_path / "job.svg").iter("{http://www.w3.org/2000/svg}text")}
    assert {"rotational", "NVMe, decoded kept", "Hardware, USD"} <= labels
    assert run(["sizing", str(job), *options[:-1], str(tmp_path / "job.png")]) == 2
    assert "charts are SVG, which browsers show: job.svg" in capsys.readouterr().err
    assert run(["sizing", str(job), *options[:4], "--set", "node.nic_bytes_per_second=12.5e9"]) == 0
    assert "100 GbE" in capsys.readouterr().out
    assert run(["sizing", "--assumptions", "--set", "rotational.usd_per_drive=99"]) == 0
    assert re.search(r"rotational.usd_per_drive +99 +--set", capsys.readouterr().out)
    assert run(["sizing", str(job), "--ops", "photos", "--gpus", "1", "--gpu-rate", "1GB/s"]) == 2
    assert "known are photo, raw, sound, video" in capsys.readouterr().err
    assert run(["sizing", str(job), "--set", "nvme.prize=1"]) == 2
    assert "there is no assumption 'nvme.prize'" in capsys.readouterr().err
