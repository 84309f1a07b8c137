"""Files of metrics of processes that are gone: bounded, and nothing of what they counted is lost."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING
from urllib.request import urlopen

from tests.support.bounded_wait import await_true
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

# Twenty processes, one after the other, each of which counts; after each the supervisor's part is done.
SCRIPT = """
import os, sys
from meshd.telemetry import metric_registry, metrics
before = ""
for number in range(20):
    child = os.fork()
    if child == 0:
        metrics.http_requests.labels("Get", "200").inc(number)
        metrics.http_connections.inc(5)
        metrics.http_seconds.labels("Get").observe(0.2)
        metrics.cache_bytes.set(1000 + number)
        os._exit(0)
    os.waitpid(child, 0)
    metric_registry.drop_dead_processes()
    if number == 9:
        metrics.http_requests.labels("Get", "200").inc(1000)
        metrics.cache_bytes.set(7)
print(metric_registry.render_metrics().decode())
"""


def rendered(directory: Path, script: str = SCRIPT) -> str:
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(directory)}
    run = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return run.stdout


def test_counts_stay_and_files_do_not(tmp_path: Path) -> None:
    text = rendered(tmp_path)
    assert 'meshd_http_requests_total{operation="Get",status="200"} 1190.0' in text  # 0 + … + 19, and 1000
    assert 'meshd_http_request_seconds_count{operation="Get"} 20.0' in text
    assert 'meshd_http_request_seconds_bucket{le="0.1",operation="Get"} 0.0' in text
    assert 'meshd_http_request_seconds_bucket{le="0.25",operation="Get"} 20.0' in text
    assert 'meshd_http_request_seconds_sum{operation="Get"} 4.0' in text
    assert "meshd_cache_bytes 1019.0" in text  # the latest, of whoever
    assert "meshd_http_connections 0.0" in text
    assert {path.name for path in tmp_path.glob("*_gone.db")} == {
        "counter_gone.db",
        "gauge_mostrecent_gone.db",
        "histogram_gone.db",
    }
    assert len(list(tmp_path.glob("*.db"))) <= 7  # those, and the one process's own


def test_a_clock_that_is_set_back_keeps_no_earlier_value(tmp_path: Path) -> None:
    """A process whose clock was an hour ahead has said something, and ended; another one says what is now."""
    script = "import time\nahead, now = lambda then=time.time: then() + 3600, time.time\n" + SCRIPT.replace(
        "range(20)", "range(2)"
    ).replace("    child = os.fork()", "    time.time = now if number else ahead\n    child = os.fork()")
    assert "meshd_cache_bytes 1001.0" in rendered(tmp_path, script)


def test_a_scrape_is_waited_for_by_doing_it_the_next_time(tmp_path: Path) -> None:
    from meshd.telemetry.metric_registry import merge_dead_processes, scrape_lock

    script = "import os; from meshd.telemetry import metrics; metrics.http_bytes.labels('in').inc(3)"
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=60)
    (own,) = tmp_path.glob("counter_*.db")
    with scrape_lock(tmp_path):
        merge_dead_processes(tmp_path)
        assert own.exists()
    merge_dead_processes(tmp_path)
    assert not own.exists()
    assert (tmp_path / "counter_gone.db").exists()


def test_what_cannot_be_written_stays(tmp_path: Path) -> None:
    """Here a file that is cut; a full disk is the same. Nothing is lost, and the supervisor goes on."""
    from meshd.telemetry.metric_registry import merge_dead_processes

    (tmp_path / "counter_999999999.db").write_bytes(b"\x00\x10\x00\x00" + bytes(60))
    merge_dead_processes(tmp_path)
    assert [path.name for path in tmp_path.glob("*.db")] == ["counter_999999999.db"]


def counted(node: Daemon) -> float:
    with urlopen(node.endpoint + "/metrics") as answer:
        text = answer.read().decode()
    found = re.search(r'meshd_http_requests_total\{operation="GET /-/whoami",status="200"\} (\S+)', text)
    return float(found[1]) if found else 0.0


def has_counted(node: Daemon, requests: int) -> bool:
    return counted(node) == requests


def child(node: Daemon, name: str) -> int:
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/status") as file:
                found = file.read().splitlines()
        except OSError:
            continue
        if found[0] == f"Name:\t{name}" and f"PPid:\t{node.pid}" in found:
            return int(entry)
    raise AssertionError(f"there is no {name}")


def test_a_node_whose_workers_die_keeps_its_counts_and_a_bounded_number_of_files() -> None:
    with Daemon.start(workers=2) as node:
        directory = node.data_dir / "run" / "metrics"
        asked, pause = 0, threading.Event()
        for _ in range(6):
            for _ in range(5):
                assert node.request("GET", "/-/whoami").status == 200
                asked += 1
            await_true(partial(has_counted, node, asked))  # after the answer, by one that is about to die
            victim = child(node, "worker-1")
            os.kill(victim, signal.SIGKILL)
            while not replaced(node, "worker-1", victim):
                pause.wait(0.02)
        assert counted(node) == asked
        owners = {path.stem.rpartition("_")[2] for path in directory.glob("*.db")} - {"gone"}
        assert [pid for pid in owners if not os.path.exists(f"/proc/{pid}")] == []
        assert "could not be merged" not in node.output()


def replaced(node: Daemon, name: str, victim: int) -> bool:
    try:
        return child(node, name) != victim and node.request("GET", "/-/ready").status == 200
    except AssertionError:
        return False


def test_a_full_disk_ends_nobody_and_what_was_counted_is_told_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshd.telemetry.metric_registry import PreallocatedMmapDict

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "counter_1.db"
    with monkeypatch.context() as disk:
        disk.setattr(os, "posix_fallocate", full)
        values = PreallocatedMmapDict(str(path))
        assert values.read_value("early") == (0.0, 0.0)
        values.write_value("early", 3.0, 0.0)
        assert not list(tmp_path.iterdir())
    values.write_value("early", 4.0, 0.0)
    assert path.stat().st_blocks * 512 >= path.stat().st_size > 0  # nothing is left to be found by writing
    with monkeypatch.context() as disk:
        disk.setattr(os, "posix_fallocate", full)
        for number in range(2000):
            values.write_value(f"a longer name {number}", 1.0, 0.0)
    values.write_value("a longer name 1999", 2.0, 0.0)
    assert path.stat().st_blocks * 512 >= path.stat().st_size
    told = {
        key.strip(): value for key, value, _, _ in PreallocatedMmapDict.read_all_values_from_file(str(path))
    }
    assert (told["early"], told["a longer name 0"], told["a longer name 1999"]) == (4.0, 1.0, 2.0)
    assert "a longer name 1998" not in told  # it is told with its next change
    values.close()


HISTORY_SCRIPT = """
import os
from meshd.telemetry import metric_registry, metrics
from meshd.telemetry.activity import collect_activity, collect_history
for number in range(1, 4):
    child = os.fork()
    if child == 0:
        metrics.http_requests.labels("Get", "200").inc(number)
        metrics.http_requests.labels("Put", "503").inc(10 * number)
        metrics.http_bytes.labels("in").inc(number)
        metrics.http_bytes.labels("out").inc(100 * number)
        metrics.frames.labels("hit").inc(2 * number)
        metrics.frames.labels("miss").inc(3 * number)
        os._exit(0)
    os.waitpid(child, 0)
    if number == 1:
        metric_registry.drop_dead_processes()
history, totals = collect_history(), collect_activity()["totals"]
print(sorted(history.items()) == sorted((name, totals[name]) for name in history), history)
"""


def test_the_history_has_the_totals_of_all_processes(tmp_path: Path) -> None:
    same, _, history = rendered(tmp_path, HISTORY_SCRIPT).partition(" ")
    assert same == "True", history
    assert "'requests': 66.0, 'bytes_in': 6.0, 'bytes_out': 600.0" in history
    assert "'frames_hit': 12.0, 'frames_joined': 0.0, 'frames_miss': 18.0" in history
