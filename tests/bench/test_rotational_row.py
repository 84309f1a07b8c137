"""The row of the rotational disk at toy size, and what its report holds against its bars."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from bench import __main__ as command
from bench import headlines, machine, rotational_drive, rotational_report
from bench import rotational_row as row
from bench.photo_dataset import make_album
from bench.presigned_requests import Account
from bench.results import Figure, RowResult, load
from bench.rows import QUICK
from bench.servers import Server
from tests.support.daemons import Daemon
from tests.support.rotational_disk import rotational_disk

if TYPE_CHECKING:
    from pathlib import Path

    from bench.drive_model import DriveStats
    from tests.support.rotational_disk import RotationalDisk

pytestmark = pytest.mark.timeout(300)
SCALE = replace(QUICK, rotational=48, rotational_long=90, batch=8, rotational_reads=16, warmed=False)


class Counted:
    """The disk of the tests as the row's drive: it counts from where it is told to, and delays nothing."""

    def __init__(self, disk: RotationalDisk) -> None:
        self.path, self._disk = disk.path, disk

    def delay(self, on: bool) -> None:
        """Nothing: all reads are counted."""

    def drop_caches(self) -> None:
        self._disk.drop_caches()

    def stats(self) -> DriveStats:
        return self._disk.stats()

    def cpu_s(self) -> float:
        return 0.0


@pytest.mark.bench
@pytest.mark.sampled(3)
def test_our_epochs_at_toy_size(tmp_path: Path) -> None:
    """Reads that the disk sees: all bytes once when cold, none from memory, one pass for jobs that share."""
    album = make_album(tmp_path, SCALE.rotational)
    with (
        rotational_disk(tmp_path / "drive") as disk,
        Daemon.start(disk.path / "meshd", workers=2) as daemon,
    ):
        account = Account(daemon.access_key, daemon.secret_key)
        port = int(daemon.endpoint.rpartition(":")[2])
        child = SimpleNamespace(process=SimpleNamespace(pid=daemon.pid))
        server = Server("meshd", port, account, child)  # type: ignore[arg-type]
        site = row.Site(Counted(disk), {"meshd": server}, SCALE, tmp_path, album)
        row.fill(site, lambda _: None)
        site.warm_up(row.TARS)  # all shards are indexed, for which the node would read them beside an epoch
        stored = sum(file.stat().st_size for file in album.files())
        tars = site.ours(row.TARS, 0)
        kept = site.ours(row.KEPT, 0)
        shared = site.ours(replace(row.FOUR, jobs=2, foreign=True), 0)
        in_order, at_random = (site.plain(name, 0) for name in (row.IN_ORDER, row.AT_RANDOM))
        longer, beside = site.ours(row.LONG, 0), site.ours(row.BESIDE, 0)
    for figure in (tars, kept, shared, in_order, at_random, longer, beside):
        assert not figure.problem, figure
        assert figure.metrics["rate"] > 0
    assert tars.metrics["read_bytes"] >= stored
    assert longer.metrics["read_bytes"] >= 2 * stored
    assert tars.metrics["memory_mib"] > 10
    assert tars.metrics["warm_reads"] < tars.metrics["reads"]
    assert shared.metrics["foreign"] >= 2  # of the six that are asked for
    assert shared.metrics["longest_ms"] >= shared.metrics["p99_ms"] >= shared.metrics["p50_ms"]
    assert beside.metrics["read_bytes"] >= 2 * stored
    foreign = shared.metrics["foreign"] * (4 * row.FOREIGN_BYTES)  # with read-ahead
    assert shared.metrics["read_bytes"] - foreign < 1.5 * tars.metrics["read_bytes"]
    assert in_order.metrics["read_bytes"] >= stored
    assert in_order.metrics["seeks"] <= 4
    assert at_random.metrics["read_bytes"] < in_order.metrics["read_bytes"]


def result(**rates: float) -> RowResult:
    drive = {"disk_s": 2.5, "media_s": 2.0, "seeks_sample": 0.01, "read_bytes": 4e8}
    figures = [
        Figure(row.TARS.name, 0, {**drive, "rate": 900.0, "warm_rate": 1000.0}),
        Figure(row.LOOSE.name, 0, {**drive, "disk_s": 3.0, "rate": 700.0, "warm_rate": 1000.0}),
        Figure(row.FULL_SHUFFLE.name, 0, {**drive, "rate": 450.0, "warm_rate": 1000.0}),
        Figure(row.FOUR.name, 0, {**drive, "rate": 1000.0}),
        Figure(row.KEPT.name, 0, {**drive, "rate": 686.0}),
        Figure(row.BESIDE.name, 0, {**drive, "rate": 800.0, "p99_ms": 60.0, "p50_ms": 9.0, "foreign": 80.0}),
        *(Figure(name, 0, {**drive, "rate": rate}) for name, rate in rates.items()),
    ]
    setup = {"rotational": 6000, "rotational_long": 36_000, "rotational_reads": 1000, "batch": 256}
    return RowResult(row.NAME, "A disk", "2026-01-01T00:00:00+00:00", "abc", setup, tuple(figures), {})


def test_the_bars_are_of_the_best_peer_and_of_the_drive() -> None:
    peers = {"webdataset from seaweedfs": 400.0, "litdata from seaweedfs": 600.0}
    found = result(**peers, **{row.AT_RANDOM: 150.0})
    plain = Figure(row.IN_ORDER, 0, {"read_bytes": 3.8e8, "rate": 2500.0})
    found = replace(found, figures=(*found.figures, plain))
    bars = {title: told for title, *told in rotational_report.bars(found)}
    assert bars[f"{row.TARS.name}: seconds of disk ÷ media"] == ["1.25×", "≤ 1.3 met"]
    assert bars[f"{row.LOOSE.name}: seconds of disk ÷ media"] == ["1.50×", "≤ 1.3 **missed**"]
    assert bars[f"{row.TARS.name}: bytes read ÷ those of the photographs"] == ["1.05×", "≤ 1.1 met"]
    assert bars[f"{row.TARS.name} ÷ best peer (litdata from seaweedfs)"] == ["1.50×", "≥ 2 **missed**"]
    assert bars[f"{row.LOOSE.name} ÷ best peer (litdata from seaweedfs)"][0] == "1.17×"
    assert bars[f"{row.FULL_SHUFFLE.name} ÷ what a seek for each photograph allows"] == [
        "3.00×",
        "≥ 3 met",
    ]
    assert bars[f"{row.KEPT.name} ÷ without"] == ["0.98×", "≥ 0.97 met"]
    assert bars["bytes read for four sharing jobs ÷ for one"] == ["1.00×", "≤ 1.05 met"]
    waits = "p99 of 80 foreign GETs of 64 KiB, one at a time, during an epoch"
    assert bars[waits] == ["60.0 ms", "≤ 50 **missed**"]
    assert not any("longest" in title for title in bars)
    text = "\n".join(rotational_report.section({row.NAME: found}))
    assert "| Blocks over tar shards | 900 | 1,000 | 0.010 | 2.5 | 2.0 | 1.25× | 400 | – |" in text
    assert "| First epoch over 6,000 photographs on a rotational disk | 1.50× | litdata |" in (
        headlines.headlines({row.NAME: found})
    )


def test_a_longer_epoch_is_compared_by_its_own_samples() -> None:
    metrics = {"disk_s": 14.0, "media_s": 12.0, "rate": 1800.0, "warm_rate": 1900.0}
    figure = Figure(row.LONG.name, 0, {**metrics, "first_wait": 1.0, "warm_wait": 0.3})
    found = result()
    assert "longer epoch" not in "\n".join(rotational_report.section({row.NAME: found}))
    found = replace(found, figures=(*found.figures, figure))
    assert rotational_report.warm_ratio(found, row.LONG.name) == pytest.approx(1800 / 1900)
    running = (36_000 / 1900 - 0.3) / (36_000 / 1800 - 1.0)
    assert rotational_report.running_ratio(found, row.LONG.name) == pytest.approx(running)
    text = "\n".join(rotational_report.section({row.NAME: found}))
    assert "*A longer epoch* has 36,000 photographs" in text
    assert f"{row.LONG.name}: first epoch ÷ from memory" in text


def test_gets_beside_the_longer_epoch_are_told_with_their_median_and_the_longest() -> None:
    """Figures of before are of a short epoch, and say nothing of a longer one."""
    found = result()
    assert "during the longer epoch" not in "\n".join(rotational_report.section({row.NAME: found}))
    metrics = {"p99_ms": 40.0, "p50_ms": 15.0, "longest_ms": 70.0, "foreign": 400.0}
    figures = [each for each in found.figures if each.contender != row.BESIDE.name]
    found = replace(found, figures=(*figures, Figure(row.BESIDE.name, 0, metrics)))
    assert "during the longer epoch" in "\n".join(rotational_report.section({row.NAME: found}))
    bars = {title: told for title, *told in rotational_report.bars(found)}
    waits = "p99 of 400 foreign GETs of 64 KiB, one at a time, during an epoch"
    assert bars[waits] == ["40.0 ms", "≤ 50 met"]
    assert bars["the longest of them (half of them: up to 15.0 ms)"] == ["70.0 ms", ""]


def test_from_memory_is_bounded_by_the_media_rate() -> None:
    """6,000 photographs pass under the head in 2 s: nobody reads more than 3,000 a second."""
    found = result()
    assert rotational_report.warm_ratio(found, row.TARS.name) == 0.9
    fast = [replace(each, metrics={**each.metrics, "warm_rate": 6000.0}) for each in found.figures]
    assert rotational_report.warm_ratio(replace(found, figures=tuple(fast)), row.TARS.name) == 0.3
    assert rotational_report.warm_ratio(found, row.FOUR.name) is None
    waited = [replace(each, metrics={**each.metrics, "first_wait": 1.0, "warm_wait": 0.5}) for each in fast]
    running = rotational_report.running_ratio(replace(found, figures=tuple(waited)), row.TARS.name)
    assert running == pytest.approx((1.0 - 0.5) / (6000 / 900 - 1.0))
    assert rotational_report.running_ratio(found, row.TARS.name) is None
    assert rotational_report.unemulated_ratio(found, row.TARS.name) is None
    emulated = [replace(each, metrics={**each.metrics, "drive_cpu": 2.0}) for each in found.figures]
    seconds = 6000 / 900 - 2.0 / 2
    unemulated = rotational_report.unemulated_ratio(replace(found, figures=tuple(emulated)), row.TARS.name)
    assert unemulated == pytest.approx(6000 / seconds / 1000)
    assert rotational_report.ratio_to_best_peer(found) is None


def test_a_row_without_its_drive_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotational_drive, "missing", lambda: "`apt-get install e2fsprogs`")
    monkeypatch.setenv("BENCH_INSTALL", "0")
    monkeypatch.setattr(machine, "pin", lambda: [0])
    done = CliRunner().invoke(command.main, ["--quick", "--only", row.NAME, "--scratch", str(tmp_path)])
    assert done.exit_code == 0, done.output
    [kept] = load(tmp_path / "quick").values()
    assert kept.skipped == {row.NAME: "`apt-get install e2fsprogs`"}
    assert "- rotational: `apt-get install e2fsprogs`" in (tmp_path / "quick.md").read_text()
