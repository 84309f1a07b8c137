"""A daemon's life: start, stop, restart, refusal, and what happens when its processes are killed."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import stat
import sys
import threading
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.support.daemons import Daemon, DaemonFailedError
from tests.support.fork_server import forked_from, outcome_of

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator


@pytest.fixture
def executed() -> Iterator[None]:
    """Nodes begin as those of users do, and are not forked from a process that has loaded everything."""
    with forked_from(None):
        yield


def get(daemon: Daemon, path: str) -> tuple[int, str]:
    """(status, text) of an unsigned GET over a connection of its own."""
    where = urllib.parse.urlsplit(daemon.endpoint)
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def wait_until(condition: Callable[[], Any], timeout: float = 60.0) -> None:
    """Ask again and again: what is awaited happens in another process."""
    pause = threading.Event()
    for _ in range(int(timeout / 0.02)):
        if condition():
            return
        pause.wait(0.02)
    raise AssertionError("what was awaited did not happen")


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def refused(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The outcome of a `meshd serve` that is expected to end by itself."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MESHD_")}
    return outcome_of("serve", "--listen", "127.0.0.1:0", *arguments, env=inherited | (env or {}))


@pytest.fixture(scope="module")
def pair() -> Iterator[Daemon]:
    """A daemon with two workers, a coordinator and two transforms, whose children may be killed; executed."""
    with forked_from(None):  # its memory and threads are looked at
        started = Daemon.start(workers=2, args=("--transform-workers", "2"))
    with started as daemon:
        client = daemon.client()
        client.create_bucket(Bucket="kept")
        client.put_object(Bucket="kept", Key="a", Body=b"value")
        yield daemon
        client.close()


def test_operators_endpoints_need_no_signature(daemon: Daemon) -> None:
    assert get(daemon, "/-/healthy") == (200, "healthy\n")
    assert get(daemon, "/-/ready") == (200, "ready\n")
    status, text = get(daemon, "/metrics")
    assert status == 200
    assert "# TYPE meshd_http_requests_total counter" in text
    assert get(daemon, "/-/nothing")[0] in (403, 404)
    assert get(daemon, "/")[0] == 403


@pytest.mark.usefixtures("executed")
def test_data_outlives_a_restart_and_the_port_stays() -> None:
    with Daemon.start() as daemon:
        with contextlib.closing(daemon.client()) as client:
            client.create_bucket(Bucket="kept")
            client.put_object(Bucket="kept", Key="a", Body=b"value")
        endpoint = daemon.endpoint
        assert daemon.stop() == 0
        daemon.up()
        assert daemon.endpoint == endpoint
        with contextlib.closing(daemon.client()) as client:
            assert client.get_object(Bucket="kept", Key="a")["Body"].read() == b"value"
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.output()


def test_root_keys_are_made_once_printed_once_and_kept_private(tmp_path: Path) -> None:
    nothing = {"MESHD_ROOT_ACCESS_KEY": "", "MESHD_ROOT_SECRET_KEY": ""}
    with Daemon.start(tmp_path / "data", env=nothing) as daemon:
        shown = re.search(r"meshd root access_key=(\S+) secret_key=(\S+)", daemon.output())
        assert shown
        line = f"  export AWS_ENDPOINT_URL={daemon.endpoint} AWS_ACCESS_KEY_ID={shown[1]} "
        assert f"{line}AWS_SECRET_ACCESS_KEY={shown[2]}\n" in daemon.output()
        kept = tmp_path / "data" / "root-credentials.json"
        assert json.loads(kept.read_text()) == {"access_key": shown[1], "secret_key": shown[2]}
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
        assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
        daemon.restart()
        assert daemon.output().count("meshd root") == 1
        assert shown[2] not in daemon.stderr_path.read_text()
        with contextlib.closing(
            daemon.client(aws_access_key_id=shown[1], aws_secret_access_key=shown[2])
        ) as client:
            assert client.list_buckets()["Buckets"] == []


def test_a_second_daemon_on_the_directory_is_refused(daemon: Daemon) -> None:
    outcome = refused("--data-dir", str(daemon.data_dir))
    assert outcome.returncode == 2
    assert outcome.stdout == ""
    assert len(outcome.stderr.splitlines()) == 1
    assert f"process {daemon.pid}" in outcome.stderr
    assert "in use by another meshd" in outcome.stderr


def test_an_empty_disk_is_not_given_to_two_daemons(tmp_path: Path) -> None:
    """Its marker says nothing to the second as long as no file is on it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with Daemon.start(tmp_path / "one", args=("--disk", str(disk))) as daemon:
        marker = (disk / "extents" / "DISK").read_bytes()
        outcome = refused("--data-dir", str(tmp_path / "two"), "--disk", str(disk))
        assert outcome.returncode == 2
        assert f"the disk {disk} is in use by another meshd" in outcome.stderr
        assert (disk / "extents" / "DISK").read_bytes() == marker
        daemon.kill()
        daemon.restart()  # the lock ends with its processes


def test_a_taken_port_is_refused_though_ports_are_shared(daemon: Daemon, tmp_path: Path) -> None:
    outcome = refused("--data-dir", str(tmp_path), "--listen", daemon.endpoint.removeprefix("http://"))
    assert outcome.returncode == 2
    assert "Address already in use; choose another --listen" in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "data-dir is required"),
        (("--data-dir", "{tmp}", "--workers", "none"), "workers: "),
        (("--data-dir", "{tmp}", "--listen", "9000"), "expected HOST:PORT"),
        (("--data-dir", "{tmp}", "--frame-cache", "lots"), "expected a size such as 64MiB"),
        (("--data-dir", "/proc/nothing/here"), "cannot create the directory"),
        (("--data-dir", "{tmp}", "--config", "{tmp}/none.yaml"), "cannot read the configuration file"),
        (("--data-dir", "{tmp}", "--users", "{tmp}/none.yaml"), "cannot read the users file"),
        (("--data-dir", "{tmp}", "--listen", "203.0.113.1:80"), "cannot listen on 203.0.113.1:80"),
    ],
)
def test_bad_settings_end_with_code_2_and_one_line(
    arguments: tuple[str, ...], complaint: str, tmp_path: Path
) -> None:
    outcome = refused(*(argument.replace("{tmp}", str(tmp_path)) for argument in arguments))
    assert outcome.returncode == 2, outcome.stderr
    assert complaint in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1


def test_a_setting_without_a_flag_says_where_it_is_set(tmp_path: Path) -> None:
    outcome = refused("--data-dir", str(tmp_path), "--index-map", "1GiB")
    assert outcome.returncode == 2
    assert "set MESHD_INDEX_MAP, or `index-map: …` in the --config file" in outcome.stderr


def test_one_root_key_alone_is_refused(tmp_path: Path) -> None:
    outcome = refused("--data-dir", str(tmp_path), env={"MESHD_ROOT_SECRET_KEY": "onlythesecret"})
    assert outcome.returncode == 2
    assert "must both be set" in outcome.stderr
    assert "onlythesecret" not in outcome.stderr


def test_help_teaches_with_an_example() -> None:
    outcome = refused("--help")
    assert outcome.returncode == 0
    assert "meshd serve --data-dir ./data" in outcome.stdout
    assert "SIGTERM" in outcome.stdout


@pytest.mark.parametrize("child", ["worker-0", "worker-1", "coordinator-0", "transform-0"])
def test_a_killed_child_is_replaced_and_the_service_goes_on(pair: Daemon, child: str) -> None:
    before = pair.children()[child]
    pair.signal_child(child)
    for _ in range(20):  # connections of the dead worker's share of the port wait for its successor
        status, text = get(pair, "/-/healthy")
        assert (status, text) == (200, "healthy\n")
    wait_until(lambda: pair.children().get(child, before) != before)
    wait_until(lambda: get(pair, "/-/ready")[0] == 200)
    with contextlib.closing(pair.client()) as client:
        assert client.get_object(Bucket="kept", Key="a")["Body"].read() == b"value"


def kill(daemon: Daemon, child: str) -> None:
    """Once it is there: it may have been killed before, and be on its way."""
    wait_until(lambda: child in daemon.children())
    daemon.signal_child(child)


def test_writes_go_on_while_workers_are_killed(pair: Daemon) -> None:
    """Every acknowledged write is there afterwards; a client that retries notices nothing else."""
    from botocore.config import Config

    retrying = Config(retries={"total_max_attempts": 10, "mode": "standard"}, s3={"addressing_style": "path"})
    with contextlib.closing(pair.client(config=retrying)) as client:
        for number in range(60):
            if number % 20 == 10:
                kill(pair, f"worker-{number // 20 % 2}")
            client.put_object(Bucket="kept", Key=f"k/{number}", Body=b"%d" % number)
        listed = client.list_objects_v2(Bucket="kept", Prefix="k/")["KeyCount"]
        assert listed == 60
        assert client.get_object(Bucket="kept", Key="k/59")["Body"].read() == b"59"


def test_metrics_count_every_worker_also_dead_ones(pair: Daemon) -> None:
    pattern = r'^meshd_http_requests_total\{operation="GET /-/healthy",status="200"\} (\S+)$'

    def healthy() -> float:
        found = re.search(pattern, get(pair, "/metrics")[1], re.MULTILINE)
        return float(found[1]) if found else 0.0

    before = healthy()
    for _ in range(10):
        get(pair, "/-/healthy")
    wait_until(lambda: healthy() == before + 10)  # a worker counts after it has answered
    kill(pair, "worker-0")
    restarts = r'meshd_process_restarts_total\{role="worker"\} [1-9]'
    wait_until(lambda: re.search(restarts, get(pair, "/metrics")[1]))
    wait_until(lambda: 'meshd_processes_up{role="worker"} 1.0' not in get(pair, "/metrics")[1])
    assert healthy() == before + 10


@pytest.mark.usefixtures("executed")
def test_no_child_outlives_a_killed_supervisor_and_the_directory_opens_again() -> None:
    with Daemon.start(workers=2) as daemon:
        with contextlib.closing(daemon.client()) as client:
            client.create_bucket(Bucket="kept")
            client.put_object(Bucket="kept", Key="a", Body=b"value")
        children = daemon.children()
        assert set(children) == {"worker-0", "worker-1", "coordinator-0", "transform-0"}
        daemon.kill()
        wait_until(lambda: all(gone(pid) for pid in children.values()))
        daemon.up()
        with contextlib.closing(daemon.client()) as client:
            assert client.get_object(Bucket="kept", Key="a")["Body"].read() == b"value"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_slow_download_is_finished_after_sigterm(workers: int) -> None:
    size = 24 << 20
    with Daemon.start(workers=workers) as daemon:
        with contextlib.closing(daemon.client()) as client:
            client.create_bucket(Bucket="big")
            client.put_object(Bucket="big", Key="a", Body=b"x" * size)
            url = client.generate_presigned_url("get_object", {"Bucket": "big", "Key": "a"})
        where = urllib.parse.urlsplit(url)
        slow = socket.create_connection((str(where.hostname), where.port or 0), timeout=60)
        idle = socket.create_connection((str(where.hostname), where.port or 0), timeout=60)
        with slow, idle:
            slow.sendall(f"GET {where.path}?{where.query} HTTP/1.1\r\nHost: {where.netloc}\r\n\r\n".encode())
            idle.sendall(f"GET /-/healthy HTTP/1.1\r\nHost: {where.netloc}\r\n\r\n".encode())
            head = slow.recv(4096)
            assert head.startswith(b"HTTP/1.1 200")
            os.kill(daemon.pid, signal.SIGTERM)
            wait_until(lambda: _closed_to_newcomers(where.hostname, where.port))
            received = len(head) - head.index(b"\r\n\r\n") - 4
            while chunk := slow.recv(1 << 20):
                received += len(chunk)
            assert received == size
            while idle.recv(65536):  # the idle connection is closed, not left hanging
                pass
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.output()


def _closed_to_newcomers(host: str | None, port: int | None) -> bool:
    try:
        socket.create_connection((str(host), port or 0), timeout=5).close()
    except OSError:
        return True
    return False


def test_a_node_that_ends_is_not_ready_before_it_refuses_connections() -> None:
    with Daemon.start(workers=2, args=("--shutdown-delay", "3")) as daemon:
        with contextlib.closing(daemon.client()) as client:
            client.create_bucket(Bucket="kept")
            client.put_object(Bucket="kept", Key="a", Body=b"x")
        assert get(daemon, "/-/ready")[0] == 200
        os.kill(daemon.pid, signal.SIGTERM)
        wait_until(lambda: get(daemon, "/-/ready")[0] == 503)
        assert "the node is draining" in get(daemon, "/-/ready")[1]
        assert get(daemon, "/-/healthy")[0] == 200
        with contextlib.closing(daemon.client()) as client:  # over a connection of its own
            client.put_object(Bucket="kept", Key="b", Body=b"y")
            assert client.get_object(Bucket="kept", Key="a")["Body"].read() == b"x"
        where = urllib.parse.urlsplit(daemon.endpoint)
        wait_until(lambda: _closed_to_newcomers(where.hostname, where.port))
        assert daemon.wait(60) == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_delay(second: signal.Signals) -> None:
    with Daemon.start(args=("--shutdown-delay", "599")) as daemon:
        os.kill(daemon.pid, signal.SIGTERM)
        wait_until(lambda: get(daemon, "/-/ready")[0] == 503)
        os.kill(daemon.pid, second)
        assert daemon.wait(60) == 0


@pytest.mark.usefixtures("executed")
def test_a_second_sigterm_ends_without_waiting() -> None:
    with Daemon.start(args=("--drain-timeout", "600")) as daemon:
        with contextlib.closing(daemon.client()) as client:
            client.create_bucket(Bucket="big")
            client.put_object(Bucket="big", Key="a", Body=b"x" * (24 << 20))
            url = client.generate_presigned_url("get_object", {"Bucket": "big", "Key": "a"})
        where = urllib.parse.urlsplit(url)
        with socket.create_connection((str(where.hostname), where.port or 0), timeout=60) as stuck:
            stuck.sendall(f"GET {where.path}?{where.query} HTTP/1.1\r\nHost: {where.netloc}\r\n\r\n".encode())
            stuck.recv(1024)
            os.kill(daemon.pid, signal.SIGTERM)
            wait_until(lambda: _closed_to_newcomers(where.hostname, where.port))
            assert daemon.stop() == 0


def test_a_child_that_cannot_start_ends_the_daemon_with_its_reason(tmp_path: Path) -> None:
    with Daemon.start(tmp_path / "data"):
        pass
    (tmp_path / "data" / "control" / "data.mdb").write_bytes(b"not a database" * 1000)
    with pytest.raises(DaemonFailedError, match=r"exit code 1(.|\n)*cannot open the control store"):
        Daemon.start(tmp_path / "data")


def test_idle_memory_is_small(pair: Daemon, record_property: Callable[[str, object], None]) -> None:
    """Proportional set size: shared pages are counted once over all processes."""
    pids = [pair.pid, *pair.children().values()]
    total = sum(psutil.Process(pid).memory_full_info().pss for pid in pids)
    record_property("idle_pss_mib", total >> 20)
    assert total < 400 << 20


def test_the_supervisor_has_one_thread(pair: Daemon) -> None:
    assert psutil.Process(pair.pid).num_threads() == 1


def test_an_upload_under_way_is_finished_and_kept_after_sigterm() -> None:
    body = b"y" * (3 << 20)
    with Daemon.start(workers=2) as daemon:
        with contextlib.closing(daemon.client()) as client:
            client.create_bucket(Bucket="kept")
            url = client.generate_presigned_url("put_object", {"Bucket": "kept", "Key": "late"})
        where = urllib.parse.urlsplit(url)
        with socket.create_connection((str(where.hostname), where.port or 0), timeout=60) as slow:
            head = f"PUT {where.path}?{where.query} HTTP/1.1\r\nHost: {where.netloc}\r\n"
            slow.sendall(f"{head}Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n".encode())
            assert slow.recv(4096).startswith(b"HTTP/1.1 100")  # the request is being answered
            slow.sendall(body[:1000])
            os.kill(daemon.pid, signal.SIGTERM)
            wait_until(lambda: _closed_to_newcomers(where.hostname, where.port))
            slow.sendall(body[1000:])
            assert slow.recv(4096).startswith(b"HTTP/1.1 200")
        assert daemon.stop() == 0
        daemon.up()
        with contextlib.closing(daemon.client()) as client:
            assert client.get_object(Bucket="kept", Key="late")["Body"].read() == body


def test_requests_beyond_the_drain_timeout_are_cut() -> None:
    with Daemon.start(args=("--drain-timeout", "0.5")) as daemon:
        with contextlib.closing(daemon.client()) as client:
            client.create_bucket(Bucket="kept")
            url = client.generate_presigned_url("put_object", {"Bucket": "kept", "Key": "never"})
        where = urllib.parse.urlsplit(url)
        with socket.create_connection((str(where.hostname), where.port or 0), timeout=60) as stuck:
            head = f"PUT {where.path}?{where.query} HTTP/1.1\r\nHost: {where.netloc}\r\n"
            stuck.sendall(f"{head}Content-Length: 100000\r\nExpect: 100-continue\r\n\r\n".encode())
            assert stuck.recv(4096).startswith(b"HTTP/1.1 100")
            stuck.sendall(b"not all of it")
            assert daemon.stop() == 0
            with contextlib.suppress(ConnectionError):
                while stuck.recv(4096):
                    pass
        assert "did not end in time" not in daemon.output()
        assert "Traceback" not in daemon.output()


def is_ready(daemon: Daemon) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        return get(daemon, "/-/ready")[0] == 200
    return False


def test_a_worker_whose_loop_stands_still_is_replaced() -> None:
    """On a busy machine another one may stand still for a second, too: clients try again."""
    from botocore.config import Config

    retrying = Config(retries={"total_max_attempts": 10, "mode": "standard"}, s3={"addressing_style": "path"})
    with Daemon.start(workers=2, env={"MESHD_HANG_TIMEOUT": "1"}) as daemon:
        client = daemon.client(config=retrying)
        client.create_bucket(Bucket="still")
        hung = daemon.signal_child("worker-0", signal.SIGSTOP)
        wait_until(lambda: daemon.children().get("worker-0", hung) != hung)
        assert gone(hung)
        wait_until(lambda: is_ready(daemon))
        assert "worker-0 hangs" in daemon.output()
        client.put_object(Bucket="still", Key="k", Body=b"served again")


def test_a_node_that_was_paused_keeps_its_processes() -> None:
    """As by `docker pause`: the supervisor stood still, too, and is the first to go on."""
    with Daemon.start(workers=2, env={"MESHD_HANG_TIMEOUT": "5"}) as daemon:
        before = daemon.children()
        threading.Event().wait(1)  # all have reported by now
        daemon.pause()
        threading.Event().wait(12)
        daemon.resume()
        wait_until(lambda: "stood still" in daemon.output())
        threading.Event().wait(1)
        assert daemon.children() == before
        assert "hangs; killing it" not in daemon.output()
        assert is_ready(daemon)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's order is Linux's")
def test_when_memory_runs_out_the_supervisor_is_the_last_to_go(daemon: Daemon) -> None:
    """With it all others end, and nobody starts them again."""
    own = int(Path(f"/proc/{daemon.pid}/oom_score_adj").read_text())
    scores = {
        name: int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for name, pid in daemon.children().items()
    }
    assert scores["transform-0"] > scores["worker-0"] > own
