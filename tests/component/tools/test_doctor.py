"""`mesh doctor` finds what a job waits for: delays put into every stage, by a script, a proxy, an op and an
origin, come out again."""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

import meshsdk as mesh
from bench.page_cache import drop_pages
from meshsdk import ops
from meshsdk.admin import op_catalog, views
from meshsdk.cli import run
from meshsdk.client.native_api import register_plan
from meshsdk.errors import ConfigurationError, MeshError
from meshtools.doctor.examine_plan import examine, plan_subject, view_subject
from meshtools.doctor.measurement_runs import MeasurementRuns
from meshtools.doctor.script_hook import ScriptHook, examine_script
from meshtools.doctor.stage_times import measure_pace
from tests.component.sdk.test_sdk_training import picture
from tests.support.daemons import Daemon
from tests.support.origin_fixtures import bucket, put, sdk, small_daemon
from tests.support.origin_places import Proxy
from tests.support.priority import preferred

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from meshsdk.loader_stats import LoaderStats
    from tests.support.origin_places import Place

pytestmark = pytest.mark.timeout(600)
COMPUTE, NETWORK, PREPROCESSING, FETCH = 0.06, 0.22, 0.2, 0.3
"""Seconds a step, each well above what the stages take by themselves here."""
STEPS = 3
PHOTOS = 16
SLOW = b'''
import time
from meshsdk.userops import BYTES, op

@op(input=BYTES, output=BYTES, memory=128 << 20)
def wait(data, *, seconds: float = 0.0):
    """The same, later."""
    time.sleep(seconds)
    return data
'''
SCRIPT = """
import sys, time
import meshsdk as mesh
from meshsdk import ops

ds = mesh.open("s3://slow/train", fields={"image": "jpg"})
ds = ds.map(ops.user("slow/wait", "image", seconds=float(sys.argv[2])), ops.decode("image"))
ds = ds.map(ops.resize("image", [8, 8]))
for epoch in range(40):
    for batch in mesh.Loader(ds, 2, output="numpy", connections=1):
        time.sleep(float(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def node(_origin: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    off = ("--decoded-cache", "off")  # what is measured again must be prepared again
    scratch = tmp_path_factory.mktemp("slow")
    with small_daemon(_origin, scratch, cache="64MiB", workers=1, more=off) as daemon:
        yield daemon


@pytest.fixture
def signed(node: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands ask the node, as root; there is an op that sleeps."""
    monkeypatch.setenv("MESH_ENDPOINT", node.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", node.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", node.secret_key)
    with sdk(node) as client:
        op_catalog.push_module(client.transport, "slow", SLOW)


@pytest.fixture
def slow(node: Daemon, origin: Place, signed: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A bucket with an origin, and a way to the node that can be slow."""
    bucket(node, origin, "slow", immutable=True)
    proxy = Proxy(int(node.endpoint.rpartition(":")[2]))
    monkeypatch.setenv("MESH_ENDPOINT", proxy.endpoint)
    yield proxy
    proxy.close()


T = TypeVar("T")


def settled(measure: Callable[[], T], agrees: Callable[[T], bool], patience: float = 240.0) -> T:
    """What was measured; if it does not agree, again and again before all others: a busy machine has delays
    of its own."""
    until, found = time.monotonic() + patience, measure()
    if agrees(found):
        return found
    with preferred():
        while not agrees(found) and time.monotonic() < until:
            found = measure()
    return found


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["doctor", "--json", "--steps", str(STEPS), *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_delays_in_every_stage_are_found(
    slow: Proxy, origin: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, tries = tmp_path / "train.py", itertools.count()
    slow.faults.delay, origin.faults.delay = NETWORK, FETCH
    expected = {
        "compute": COMPUTE,
        "network": NETWORK - COMPUTE,  # the job computes meanwhile
        "preprocessing": PREPROCESSING,
        "fetch": FETCH,
    }
    wanted = {stage: pytest.approx(value, rel=0.1) for stage, value in expected.items()}

    def measured() -> dict[str, Any]:
        """Of photographs that no try before has brought into the cache."""
        folder = f"train{next(tries)}"
        for number in range(PHOTOS):
            put(origin, "slow", f"{folder}/{number:03}.jpg", picture(number))
        script.write_text(SCRIPT.replace("slow/train", f"slow/{folder}"))
        command = [sys.executable, str(script), str(COMPUTE), str(PREPROCESSING / 2)]
        return doctor(capsys, "--", *command)

    found = settled(measured, lambda found: found["seconds"] == wanted, 480.0)
    assert found["seconds"] == wanted
    assert found["dominant"] == "fetch"
    assert found["fix"].startswith("mesh prefetch s3://slow/train")
    assert found["au"] == pytest.approx(COMPUTE / sum(expected.values()), rel=0.1)


@pytest.fixture(scope="module")
def plain(node: Daemon) -> str:
    """The hash of a plan over a dataset on the node, with an op that sleeps."""
    with sdk(node) as client:
        client.create_bucket("plain")
        for number in range(PHOTOS):
            client.put("plain", f"train/{number:03}.jpg", picture(number))
        op_catalog.push_module(client.transport, "slow", SLOW)
        ds = mesh.open("s3://plain/train", fields={"image": "jpg"}, client=client)
        ds = ds.map(ops.user("slow/wait", "image", seconds=0.03), ops.decode("image"))
        ds = ds.map(ops.resize("image", [8, 8]))
        plan = mesh.Loader(ds, 2, output="numpy").plan.hash
        views.create_view(client.transport, "plain", "two", views.batches_view(plan, 2))
        return plan


def test_a_view_without_a_script(plain: str, signed: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps of 5 ms, on a node whose op takes 60 for a batch."""

    def measured() -> tuple[dict[str, Any], float]:
        return doctor(capsys, "plain--two", "--step-time", "0.005"), slept(0.005)

    wanted = pytest.approx(0.055, rel=0.15)

    def agrees(both: tuple[dict[str, Any], float]) -> bool:
        found, step = both[0]["seconds"], both[1]
        return bool(found["preprocessing"] == wanted and found["compute"] == pytest.approx(step, rel=0.1))

    both = settled(measured, agrees)
    assert agrees(both), both
    assert both[0]["dominant"] == "preprocessing"
    assert "store the result of slow/wait, decode, resize" in both[0]["fix"]
    assert both[0]["gain"] > 1.5


def slept(seconds: float) -> float:
    """What a sleep takes on this machine, now."""
    marks = [time.monotonic()]
    for _ in range(24):
        time.sleep(seconds)
        marks.append(time.monotonic())
    return measure_pace(marks, 1).step


def test_a_plan_by_the_digits_that_a_listing_shows(
    plain: str, signed: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", "--steps", "2", "-b", "2", plain[:16]]) == 0
    assert "preprocessing" in capsys.readouterr().out


def test_a_dataset_without_a_script(plain: str, signed: None, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["s3://plain/train", "--op", "decode:image", "--op", "center_crop:image:8", "-b", "4"]
    assert run(["doctor", "--steps", "2", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "+ fetch of the sources" in shown
    assert "note: no step computes anything" in shown


def test_more_bad_samples_than_a_plan_allows(
    node: Daemon, signed: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are named and the rest is measured; if all are bad, the error says what they are."""
    with sdk(node) as client:
        client.create_bucket("broken")
        for number in range(PHOTOS):
            damaged = number % 2 == 0
            client.put("broken", f"half/{number:03}.jpg", b"no picture" if damaged else picture(number))
            client.put("broken", f"all/{number:03}.jpg", b'{"no": "picture"}')
    arguments = ["--op", "decode:image", "--op", "center_crop:image:8", "-b", "4"]
    found = doctor(capsys, "s3://broken/half", "--field", "image=jpg", *arguments)
    assert "preprocessing" in found["seconds"]
    told = found["notes"][0]
    assert re.match(r"[1-8] of the samples read are bad: half/0\d\d: decode", told)
    assert "max_bad=0.01" in told
    assert "raise" not in told
    assert run(["doctor", "s3://broken/all", "--field", "image=jpg", *arguments]) == 1
    assert "none of 8 samples from across it can be prepared" in capsys.readouterr().err


def test_seeks_of_rotational_disks_are_told() -> None:
    """The disk only counts as rotational; what is read ahead and sought is the same."""
    args = ("--disk-type", "rotational", "--read-ahead", "64MiB")
    with Daemon.start(args=args) as daemon, sdk(daemon) as client:
        client.create_bucket("disk")
        for number in range(400):
            client.put("disk", f"{number:04}.bin", bytes(50_000))
        ds = mesh.open("s3://disk/", fields={"data": "bin"}, client=client)
        plan = register_plan(client.transport, ds.snapshot.hash, ds.spec(shuffle=True)).hash
        drop_pages(daemon.data_dir)
        found = examine(plan_subject(client.transport, plan, 4), steps=2)
    [told] = [note for note in found.notes if note.startswith("rotational disks of the nodes: ")]
    assert re.search(r": 0\.\d+ seeks per sample$", told)


@pytest.mark.parametrize(
    ("rate", "delay", "fix"),
    [(400e3, 0.0, "a faster link: this one is full"), (0.0, 0.1, "Loader(…, connections=8)")],
)
def test_a_full_link_is_told_from_answers_that_begin_late(
    plain: str, slow: Proxy, capsys: pytest.CaptureFixture[str], rate: float, delay: float, fix: str
) -> None:
    """Of frames of 96 KiB; four are asked for at once in both."""
    slow.faults.rate, slow.faults.delay = rate, delay
    sized = ["s3://plain/train", "--op", "decode:image", "--op", "resize:image:128", "-b", "2"]
    found = settled(lambda: doctor(capsys, *sized), lambda found: fix in found["fix"])
    assert found["dominant"] == "network"
    assert fix in found["fix"]


def test_what_can_be_looked_into(plain: str, node: Daemon) -> None:
    with sdk(node) as client:
        for subject in (
            plan_subject(client.transport, plain, 2),
            view_subject(client.transport, "plain--two", None, None),
        ):
            assert (subject.plan.hash, subject.batch) == (plain, 2)
        views.create_view(client.transport, "plain", "packed", views.shards_view(count=4))
        with pytest.raises(ConfigurationError, match="view of shards"):
            view_subject(client.transport, "plain--packed", None, None)
        with pytest.raises(ConfigurationError, match="is not two batches of 16"):
            MeasurementRuns(plan_subject(client.transport, plain, PHOTOS), 2)


def test_a_dataset_and_a_command_are_not_measured_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "s3://plain/train", "--", "python", "train.py"]) == 2
    assert "give one dataset, or a command" in capsys.readouterr().err


def test_a_script_that_ends_too_early(plain: str, signed: None, tmp_path: Path) -> None:
    script = tmp_path / "short.py"
    script.write_text(SCRIPT.replace("slow/train", "plain/train").replace("range(40)", "()"))
    with pytest.raises(MeshError, match="before the measurement was complete"):
        examine_script([sys.executable, str(script), "0", "0"], steps=2)
    with pytest.raises(MeshError, match=r"exit code 3.*see its output"):
        examine_script([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(ConfigurationError, match="cannot be run"):
        examine_script(["/no/such/program"])
    with pytest.raises(ConfigurationError, match=r"mesh doctor -- python train\.py"):
        examine_script(["train.py"])


def test_top_tells_what_a_node_does(
    plain: str, node: Daemon, signed: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with sdk(node) as client, ThreadPoolExecutor(1) as pool:
        ds = mesh.open("s3://plain/train", fields={"image": "jpg"}, client=client)
        ds = ds.map(ops.user("slow/wait", "image", seconds=0.02), ops.decode("image"))
        with mesh.Loader(ds.map(ops.resize("image", [8, 8])), 2, output="numpy", report="reports") as loader:
            ended = threading.Event()
            done = pool.submit(lambda: [batch.rows for _ in iter(ended.is_set, True) for batch in loader])

            def measured() -> dict[str, Any]:
                assert run(["top", "--json", "-i", "2.5"]) == 0
                found: dict[str, Any] = json.loads(capsys.readouterr().out)
                return found

            def has_reported(found: dict[str, Any]) -> bool:
                """A loader that has only just begun has not, nor one whose machine stood still."""
                rates = {(job["name"], job["pid"]): job["rate"] for job in found["jobs"]}
                return bool(found["nodes"][0]["rows"] and rates.get(("reports", os.getpid())))

            try:
                found = settled(measured, has_reported, 60.0)
            finally:
                ended.set()
            assert sum(done.result(60)) > 0
    [seen] = found["nodes"]
    assert seen["why"] == ""
    assert seen["rows"] > 0
    assert seen["prepared"] > 0
    assert seen["hits"] is not None
    assert "reports" in [job["name"] for job in found["reported"]]
    [job] = [job for job in found["jobs"] if (job["name"], job["pid"]) == ("reports", os.getpid())]
    assert job["rate"] > 0


RANKS = """
import os, subprocess, sys
own = [{**os.environ, "RANK": str(rank)} for rank in (0, 1)]
ranks = [subprocess.Popen([sys.executable, *sys.argv[1:]], env=env) for env in own]
print("a line of the script's")
sys.exit(max(rank.wait() for rank in ranks))
"""


def test_every_rank_takes_part_and_the_script_is_ended(
    plain: str,
    signed: None,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second loader that each rank iterates; one of them computes for longer."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    script, launcher = tmp_path / "train.py", tmp_path / "launch.py"
    script.write_text(
        "import os\n"
        + SCRIPT.replace("slow/train", "plain/train")
        .replace("for epoch", "[batch.rows for batch in mesh.Loader(ds, 8, output='numpy')]\nfor epoch")
        .replace("float(sys.argv[1])", "0.02 + 0.03 * int(os.environ['RANK'])")
    )
    launcher.write_text(RANKS)
    command = [sys.executable, str(launcher), str(script), "0", "0.0"]
    wanted = pytest.approx(0.05, rel=0.15)

    def measured() -> dict[str, Any]:
        assert run(["doctor", "--json", "--steps", "4", "--loader", "2", "--", *command]) == 0
        printed = capfd.readouterr()
        assert "a line of the script's" in printed.err
        found: dict[str, Any] = json.loads(printed.out)
        return found

    found = settled(measured, lambda found: found["seconds"]["compute"] == wanted)
    assert found["ranks"] == 2
    assert found["seconds"]["compute"] == wanted
    for pid in (path.name for path in Path("/proc").iterdir() if path.name.isdigit()):
        with suppress(OSError):
            assert str(launcher) not in Path(f"/proc/{pid}/cmdline").read_text()


def test_a_rank_that_has_measured_does_not_outlive_the_doctor(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(60)
    (tmp_path / "directive.json").write_text(json.dumps({"steps": 2, "loader": 1, "pid": gone.pid}))
    with pytest.raises(SystemExit, match="has finished its measurement"):
        ScriptHook(tmp_path).wait_for_doctor()


def test_live_stats_tell_the_same(plain: str, node: Daemon) -> None:
    """The op's sleep is most of what the loop waits for, and is told as such."""
    with sdk(node) as client:
        ds = mesh.open("s3://plain/train", fields={"image": "jpg"}, client=client)
        ds = ds.map(ops.user("slow/wait", "image", seconds=0.05), ops.decode("image"))
        ds = ds.map(ops.resize("image", [8, 8]))

        seeds = itertools.count(secrets.randbelow(1 << 30))  # another order is other frames

        def looped() -> LoaderStats:
            with mesh.Loader(ds, 2, seed=next(seeds), output="numpy", connections=1) as loader:
                for _ in loader:
                    time.sleep(0.02)
                return loader.stats()

        wanted = pytest.approx([8 * 0.1 - 7 * 0.02, 8 * 0.02, 0.2], rel=0.15)
        stats = settled(looped, lambda found: [found.preprocessing, found.compute, found.au] == wanted, 480.0)
    assert [stats.preprocessing, stats.compute, stats.au] == wanted
    assert stats.fetch < 0.1 * stats.waited
    parts = stats.compute + stats.network + stats.preprocessing + stats.fetch
    assert parts == pytest.approx(stats.seconds)
