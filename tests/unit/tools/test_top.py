"""What `mesh top` gathers: the kernel's counters, NVML's answers, pages of loaders, nodes' scrapes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from meshsdk.admin.cluster_admin import parse_metrics
from meshsdk.loader import stats_page
from meshsdk.loader.stats_page import Figures, Job
from meshsdk.loader_stats import Meter, Stall, Step
from meshtools.cli.top_tables import render_screen
from meshtools.top import gpus, hosts, loader_pages, snapshot_diff
from meshtools.top.nodes import NodeSnapshot
from tests.support.required import required_module

if TYPE_CHECKING:
    from pathlib import Path

    from meshtools.top.gpus import Gpus

GIB = 1 << 30
# ruff: noqa: E501
STAT = """cpu  100 5 20 800 40 0 5 30 10 0
cpu0 50 0 10 400 20 0 0 0 0 0
intr 1 2 3
"""
DISKSTATS = """   7       0 loop0 10 0 20 1 0 0 0 0 0 5 5 0 0 0 0 0 0
 259       0 nvme0n1 100 0 2048 50 10 0 4096 20 0 700 70 0 0 0 0 0 0
 259       1 nvme0n1p1 90 0 2000 50 10 0 4096 20 0 690 70 0 0 0 0 0 0
   8       0 sda 1 0 8 1 1 0 16 1 0 10 10 0 0 0 0 0 0
   8       1 sda1 1 0 8 1 1 0 16 1 0 10 10 0 0 0 0 0 0
"""
NET = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop
    lo:  500     5    0    0    0     0          0         0     500       5    0    0    0     0       0          0
  eth0: 1000    10    0    0    0     0          0         0    2000      20    0    0    0     0       0          0
"""


def test_the_kernels_counters() -> None:
    assert hosts.processors(STAT) == (160, 1000)
    assert hosts.memories("MemTotal: 4 kB\nMemFree: 1 kB\nMemAvailable: 2 kB\n") == (4096, 2048)
    found = hosts.disks(DISKSTATS)
    assert set(found) == {"nvme0n1", "sda"}
    assert found["nvme0n1"] == hosts.Disk(2048 * 512, 4096 * 512, 700)
    assert hosts.links(NET) == {"lo": hosts.Link(500, 500), "eth0": hosts.Link(1000, 2000)}


def test_rates_are_differences() -> None:
    def at(now: float, busy: int, jiffies: int, read: int, received: int) -> hosts.HostSnapshot:
        disks, links = {"sda": hosts.Disk(read, 0, read)}, {"eth0": hosts.Link(received, 0)}
        return hosts.HostSnapshot(now, 2, busy, jiffies, 4 * GIB, GIB, 1.5, disks, links)

    found = hosts.rates(at(10.0, 100, 1000, 0, 50), at(12.0, 150, 1200, 1000, 40))
    assert found.cpu == pytest.approx(0.25)
    assert found.used == 3 * GIB
    assert found.disks["sda"] == {"read": 500.0, "written": 0.0, "busy": 0.5}
    assert found.links["eth0"]["received"] == 0.0  # the counter began anew


def test_this_machine_can_be_looked_at() -> None:
    found = hosts.read_host()
    assert found.memory > found.available > 0
    assert found.jiffies > found.busy >= 0


# --- GPUs -------------------------------------------------------------------------------------------------


class RecordedError(Exception):
    pass


class Recorded:
    """NVML on a machine with a whole GPU and one that is cut in two of seven places: what it answers is of
    the form that nvidia-ml-py gives; a question that is not here is not supported."""

    NVMLError = RecordedError

    def __init__(self, answers: dict[tuple[Any, ...], Any]) -> None:
        self._answers, self.opened = answers, 0

    def __getattr__(self, name: str) -> Any:
        def answer(*arguments: Any) -> Any:
            self.opened += {"nvmlInit": 1, "nvmlShutdown": -1}.get(name, 0)
            if name in ("nvmlInit", "nvmlShutdown"):
                return None
            if (name, *arguments) not in self._answers:
                raise RecordedError("Not Supported")
            return self._answers[(name, *arguments)]

        return answer


MACHINE: dict[tuple[Any, ...], Any] = {
    ("nvmlDeviceGetCount",): 2,
    ("nvmlDeviceGetHandleByIndex", 0): "a",
    ("nvmlDeviceGetHandleByIndex", 1): "b",
    ("nvmlDeviceGetName", "a"): "NVIDIA H200",
    ("nvmlDeviceGetUUID", "a"): "GPU-a",
    ("nvmlDeviceGetUtilizationRates", "a"): SimpleNamespace(gpu=87, memory=40),
    ("nvmlDeviceGetMemoryInfo", "a"): SimpleNamespace(total=140 * GIB, used=70 * GIB, free=70 * GIB),
    ("nvmlDeviceGetPowerUsage", "a"): 512_300,
    ("nvmlDeviceGetTemperature", "a", 0): 61,
    ("nvmlDeviceGetMigMode", "a"): [0, 0],
    ("nvmlDeviceGetComputeRunningProcesses", "a"): [SimpleNamespace(pid=4711, usedGpuMemory=GIB)],
    ("nvmlDeviceGetName", "b"): b"NVIDIA A100-SXM4-40GB",
    ("nvmlDeviceGetUUID", "b"): b"GPU-b",
    ("nvmlDeviceGetMemoryInfo", "b"): SimpleNamespace(total=40 * GIB, used=GIB, free=39 * GIB),
    ("nvmlDeviceGetMigMode", "b"): [1, 1],
    ("nvmlDeviceGetMaxMigDeviceCount", "b"): 7,
    ("nvmlDeviceGetMigDeviceHandleByIndex", "b", 0): "b0",
    ("nvmlDeviceGetMigDeviceHandleByIndex", "b", 2): "b2",
    ("nvmlDeviceGetName", "b0"): "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
    ("nvmlDeviceGetMemoryInfo", "b0"): SimpleNamespace(total=20 * GIB, used=5 * GIB, free=15 * GIB),
    ("nvmlDeviceGetComputeRunningProcesses", "b0"): [SimpleNamespace(pid=4712, usedGpuMemory=GIB)],
    ("nvmlDeviceGetName", "b2"): "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
}


def recorded(answers: dict[tuple[Any, ...], Any] = MACHINE) -> tuple[Any, Gpus]:
    nvml: Any = Recorded(answers)
    return nvml, gpus.read_gpus(nvml)


def test_gpus_and_their_instances_apart() -> None:
    nvml, found = recorded()
    whole, cut, first, second = found.found
    assert (whole.index, whole.busy, whole.used, whole.memory) == ("0", 0.87, 70 * GIB, 140 * GIB)
    assert (whole.watts, whole.celsius, whole.pids) == (512.3, 61, (4711,))
    assert (cut.index, cut.busy, cut.watts, cut.instance, cut.name) == (
        "1", None, None, False, "NVIDIA A100-SXM4-40GB",
    )  # fmt: skip
    assert (first.index, first.instance, first.used, first.pids) == ("1:0", True, 5 * GIB, (4712,))
    assert (second.index, second.used, second.name) == ("1:2", None, "NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    assert nvml.opened == 0


def test_where_nvml_fails_the_reason_is_told() -> None:
    nvml, found = recorded({})
    assert found.found == ()
    assert "the NVIDIA driver fails (Not Supported)" in found.why
    assert nvml.opened == 0


def test_the_real_library_has_what_is_asked_for() -> None:
    """And says why it cannot answer, where there is no driver."""
    pynvml = required_module("pynvml")
    asked = {name for name in vars(gpus.Nvml) if name.startswith("nvml")} | {"NVMLError"}
    assert {name for name in asked if not hasattr(pynvml, name)} == set()
    assert pynvml.NVML_TEMPERATURE_GPU == 0
    found = gpus.read_gpus()
    assert found.found or "no NVIDIA driver answers" in found.why


# --- pages of loaders ---------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESH_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def page(name: str = "resnet") -> stats_page.StatsPage:
    made = stats_page.open_page(stats_page.describe(1, 8, "s3://photos/train/", "ab" * 32, 256, name), 100)
    assert made is not None
    return made


def step(number: int, since: float, until: float) -> Step:
    return Step(2, number, 256, 1000, since, until, Stall(), None, "hit")


def read(place: Path) -> tuple[Job, Figures]:
    [found] = loader_pages.read_pages([place])
    return found


def test_a_page_follows_its_loader(place: Path) -> None:
    made, meter = page(), Meter()
    assert read(place)[1].running == 0
    made.on_wait(10.0)
    meter.samples, meter.batches, meter.waited, meter.fetch = 256, 1, 0.5, 0.2
    made.on_batch(step(7, 10.0, 10.5), meter)
    job, found = read(place)
    assert (job.pid, job.rank, job.world, job.name) == (os.getpid(), 1, 8, "resnet")
    assert (found.epoch, found.step, found.steps, found.samples) == (2, 7, 100, 256)
    assert (found.now, found.running, found.waiting, found.seconds) == (10.5, 10.0, 0.0, 0.5)
    made.on_wait(11.0)
    assert read(place)[1].waiting == 11.0
    made.on_end(12.0, meter)
    assert read(place)[1].running == 0
    made.close()
    assert list(place.iterdir()) == []


def test_what_a_killed_process_left_is_removed(place: Path) -> None:
    script = (
        "import os\nfrom meshsdk.loader import stats_page as pages\n"
        "made = pages.open_page(pages.describe(0, 1, 's', 'p', 1, ''), 1)\nassert made\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script], check=False, timeout=100)
    assert len(list(place.iterdir())) == 1
    assert list(loader_pages.read_pages([place])) == []
    made = page()
    assert [path.name for path in place.iterdir()] == [made.path.name]
    made.close()


def test_a_place_that_is_not_ours_is_not_used(place: Path) -> None:
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    assert stats_page.open_page(stats_page.describe(0, 1, "s", "p", 1, ""), 1) is None
    place.rmdir()
    place.symlink_to("/tmp")
    assert stats_page.open_page(stats_page.describe(0, 1, "s", "p", 1, ""), 1) is None


@pytest.mark.parametrize(
    "content", [b"", b"x" * 4096, b"MESHTOP1" + b"\xff" * 4088, b"MESHTOP1" + b"\0" * 4088, b"MESHTOP1" * 600]
)
def test_a_page_of_nonsense_is_none(place: Path, content: bytes) -> None:
    place.mkdir(mode=0o700)
    (place / f"loader-{os.getpid()}-0").write_bytes(content)
    (place / f"loader-{os.getpid()}-1").symlink_to("/dev/zero")
    os.mkfifo(place / f"loader-{os.getpid()}-2")
    (place / "loader-nobody").write_bytes(content)
    assert list(loader_pages.read_pages([place])) == []


def test_what_a_terminal_would_obey_is_not_shown(place: Path) -> None:
    made = page("\x1b[2J\nevil")
    assert read(place)[0].name == "?[2J?evil"
    made.close()


# --- what happened in between -------------------------------------------------------------------------------


def job(pid: int = 4711, started: float = 1.0) -> Job:
    return Job(pid, 0, 1, "s3://photos/train/", "ab" * 32, 256, "resnet", "here", started)


def figures(now: float, **more: float) -> Figures:
    return Figures(**dict.fromkeys(Figures.__slots__, 0.0) | {"now": now} | more)


def look(now: float, found: Figures, told: str = "") -> snapshot_diff.Snapshot:
    scraped = NodeSnapshot("http://a:9000", now, parse_metrics(told))
    silent = NodeSnapshot("http://b:9000", now, None, "connection refused")
    return snapshot_diff.Snapshot(
        now, hosts.read_host(now=now), recorded()[1], {(4711, 1.0): (job(), found)}, [scraped, silent]
    )


NODE = """# HELP meshd_http_requests_total Requests
meshd_http_requests_total{{operation="GetFrame",status="200"}} {0}
meshd_http_requests_total{{operation="GetFrame",status="503"}} {1}
meshd_http_bytes_total{{direction="out"}} {0}e3
meshd_frames_total{{result="miss"}} {1}
meshd_frames_total{{result="hit"}} {0}
meshd_transform_queue_rows 12.0
meshd_decoded_cache_cpu_seconds_saved_total {1}
meshd_decoded_cache_bytes 3e9
meshd_decoded_cache_limit_bytes 8e9
meshd_decoded_cache_buckets_at_quota 1
meshd_store_disk_bytes{{disk="d"}} 100
meshd_store_disk_free_bytes{{disk="d"}} 25
meshd_loader_samples_total{{loader="far"}} {0}
meshd_loader_seconds_total{{loader="far"}} {0}
meshd_loader_waited_seconds_total{{loader="far"}} {1}
meshd_loader_stall_seconds_total{{loader="far",stage="fetch"}} {1}
meshd_loader_stall_seconds_total{{loader="far",stage="network"}} 0
meshd_loader_epochs{{loader="far"}} 2.5
meshd_loader_epoch_samples{{loader="far"}} 900
"""


def screen() -> snapshot_diff.Screen:
    before = figures(10.0, running=5.0, samples=1000.0, batches=10.0, waited=2.0, seconds=5.0)
    after = figures(
        12.0, running=5.0, samples=1512.0, batches=12.0, waited=3.0, fetch=0.5, seconds=7.0, steady=6.0,
        steady_waited=1.5, epoch=1.0, step=12.0, steps=40.0,
    )  # fmt: skip
    return snapshot_diff.diff_snapshots(
        look(10.0, before, NODE.format(0, 0)), look(12.0, after, NODE.format(90, 10)), ("a note",)
    )


def test_a_jobs_figures_between_two_looks() -> None:
    [found] = screen().jobs
    assert found.rate == pytest.approx(256)
    assert found.stall == pytest.approx(0.5)
    assert found.fetch == pytest.approx(0.25)
    assert found.network == pytest.approx(0.25)
    assert found.au == pytest.approx(0.75)
    assert (found.state, found.gpus) == ("computing", ("0",))


def test_a_job_that_waits_is_stalled_before_its_batch_comes() -> None:
    still = figures(9.0, running=5.0, waiting=9.0, samples=1000.0, batches=10.0, waited=2.0, seconds=4.0)
    [found] = snapshot_diff.diff_snapshots(look(10.0, still), look(12.0, still)).jobs
    assert found.state == "waiting"
    assert found.stall == pytest.approx(1.0)
    assert found.rate == pytest.approx(250)  # of the whole run


def test_nodes_and_the_jobs_that_report_to_them() -> None:
    answers, silent = screen().nodes
    assert answers.requests == pytest.approx(50)
    assert answers.errors == pytest.approx(5)
    assert answers.sent == pytest.approx(45000)
    assert answers.hits == pytest.approx(0.9)
    assert (answers.queue, answers.free) == (12, 0.25)
    assert answers.saved == pytest.approx(5)
    assert (answers.decoded, answers.decoded_limit, answers.at_quota) == (3e9, 8e9, 1)
    assert silent.why == "connection refused"
    [far] = screen().reported
    assert far.name == "far"
    assert [far.rate, far.stall, far.fetch, far.network] == pytest.approx([45, 1 / 9, 1 / 9, 0])
    assert [far.epochs, far.left] == pytest.approx([2.5, 10])


def test_one_screen_and_one_document() -> None:
    out = io.StringIO()
    Console(file=out, width=160).print(render_screen(screen()))
    shown = out.getvalue()
    for text in (
        "resnet",
        "H200",
        "MIG 1:0",
        "50%",
        "no answer",
        "far",
        "2, 50%",
        "0:00:10",
        "a note",
        "CPU",
        "computing",
        "5.0 cores",
    ):
        assert text in shown
    told = json.loads(json.dumps(screen().to_dict()))
    assert told["jobs"][0]["source"] == "s3://photos/train/"
    assert set(told) == {"host", "gpus", "jobs", "nodes", "reported", "notes"}


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_where_there_is_little_room_names_are_kept_and_columns_left_out(width: int) -> None:
    out = io.StringIO()
    Console(file=out, width=width).print(render_screen(screen()))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    [head, *_] = [line.split() for line in lines if line.startswith("job")]
    assert {"job", "pid", "step", "samples/s", "stall", "AU"} <= set(head)
    assert ("GPU" in head, "network" in head) == (width > 80, width > 60)
    assert any(line.startswith("resnet") and "4711" in line for line in lines)
    [head, first, second] = [line.split() for line in lines if line.startswith(("node", "http"))]
    assert {"requests/s", "5xx/s", "queue", "disk"} <= set(head)
    assert (first[0], second[:3]) == ("http://a:9000", ["http://b:9000", "no", "answer"])
