"""The log level of a running node: changed for all its processes, for a while, by root alone."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests.support.daemons import Daemon
from tests.support.fork_server import outcome_of

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "audit.jsonl"


@pytest.fixture(scope="module")
def node(audit: Path) -> Iterator[Daemon]:
    args = ("--audit-log", str(audit), "--log-format", "json", "--node-id", "n1")
    with Daemon.start(args=args, workers=2) as running:
        yield running
        assert running.stop() == 0
        assert "Traceback" not in running.output()


@pytest.fixture(autouse=True)
def as_configured(node: Daemon) -> Iterator[None]:
    yield
    node.request("DELETE", "/-/admin/log-level")


def eventually(condition: Callable[[], Any]) -> Any:
    pause = threading.Event()
    for _ in range(1500):
        if result := condition():
            return result
        pause.wait(0.02)
    raise AssertionError("it did not happen")


def call(node: Daemon, method: str, path: str = "log-level", body: bytes = b"") -> Any:
    answer = node.request(method, f"/-/admin/{path}", body)
    return answer.status, json.loads(answer.body)


def test_a_log_of_json_has_no_other_line(node: Daemon) -> None:
    """On standard output, too: a container's log has both."""
    found = [json.loads(line) for line in whole_lines(node) if not line.startswith("--- meshd std")]
    assert any(each["message"].startswith(f"meshd ready endpoint={node.endpoint}") for each in found)
    assert all({"time", "level", "process", "logger"} <= each.keys() for each in found)


def whole_lines(node: Daemon) -> list[str]:
    """The lines of its output, but not one that it is just writing."""
    return [line for line in node.output().splitlines(keepends=True) if line.endswith("\n")]


def lines(node: Daemon) -> list[dict[str, Any]]:
    return [json.loads(line) for line in whole_lines(node) if line.startswith('{"time"')]


def answered(node: Daemon) -> set[str]:
    """Which processes told of requests."""
    return {line["process"] for line in lines(node) if line["logger"] == "meshd.requests"}


def changes(node: Daemon) -> list[tuple[str, str]]:
    found = [line for line in lines(node) if line["message"] == "the log level was changed"]
    return [(line["now"], str(line["seconds"])) for line in found]


def told(node: Daemon) -> int:
    """How many changes there were, once all are told of: the supervisor does so in its own time. No test asks
    for `warning`."""
    before = len(changes(node))
    call(node, "PUT", "log-level/warning")
    eventually(lambda: "warning" in [level for level, _ in changes(node)[before:]])
    call(node, "DELETE")
    eventually(lambda: changes(node)[-1] == ("info", "for good"))
    return len(changes(node))


def ask_anybody(node: Daemon) -> None:
    for _ in range(8):
        node.request("GET", "/-/whoami")  # a new connection each: either worker's


def test_all_processes_follow_and_requests_are_told_of(node: Daemon, audit: Path) -> None:
    assert call(node, "GET") == (
        200,
        {"node": "n1", "level": "info", "configured": "info", "seconds_left": 0},
    )
    ask_anybody(node)
    assert not answered(node)
    began = time.monotonic()
    status, shown = call(node, "PUT", "log-level/debug", b'{"seconds": 600}')
    assert (status, shown["level"], shown["configured"]) == (200, "debug", "info")
    assert 599 - (time.monotonic() - began) <= shown["seconds_left"] <= 600

    def both() -> bool:
        ask_anybody(node)
        return answered(node) == {"worker-0", "worker-1"}

    eventually(both)
    line = next(line for line in lines(node) if line["logger"] == "meshd.requests")
    assert line["level"] == "debug"
    assert {"operation", "status", "ms", "request_id"} <= set(line)
    assert node.secret_key not in node.output()
    (wrote,) = eventually(lambda: [line for line in audit.read_text().splitlines() if "PUT" in line])
    assert (json.loads(wrote)["path"], json.loads(wrote)["user"]) == ("/-/admin/log-level/debug", "root")


@pytest.mark.parametrize("role", ["worker-0", "worker-1", "coordinator-0", "transform-0"])
def test_each_process_of_the_node_has_the_level(node: Daemon, role: str) -> None:
    """Where /proc says that it heeds the signal, it is sent one and lives; what it logs then is its own."""
    pid = child(node, role)
    heeded = next(line for line in status_of(pid) if line.startswith("SigCgt"))
    assert int(heeded.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1
    call(node, "PUT", "log-level/debug")
    call(node, "DELETE")
    assert child(node, role) == pid


def status_of(pid: int) -> list[str]:
    with open(f"/proc/{pid}/status") as file:
        return file.read().splitlines()


def child(node: Daemon, name: str) -> int:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                found = status_of(int(entry))
            except (FileNotFoundError, ProcessLookupError):
                continue
            named = found[0] == f"Name:\t{name}"
            if named and f"PPid:\t{node.pid}" in found:
                return int(entry)
    raise AssertionError(f"there is no {name}")


def test_it_ends_by_itself(node: Daemon) -> None:
    before = told(node)

    def ends() -> list[str]:
        """The levels of which was told: none where the supervisor came by when all was over."""
        call(node, "PUT", "log-level/error", b'{"seconds": 1}')
        eventually(lambda: call(node, "GET")[1]["level"] == "info")
        return [level for level, _ in changes(node)[before:]]

    eventually(ends)
    eventually(lambda: [level for level, _ in changes(node)[before:]][:2] == ["error", "info"])
    assert changes(node)[before + 1] == ("info", "for good")


def test_a_process_that_is_started_anew_has_it_too(node: Daemon) -> None:
    call(node, "PUT", "log-level/debug")
    pid = child(node, "worker-1")
    os.kill(pid, signal.SIGKILL)
    started = len(lines(node))

    def tells() -> bool:
        ask_anybody(node)
        later = [line for line in lines(node)[started:] if line["logger"] == "meshd.requests"]
        return "worker-1" in {line["process"] for line in later}

    eventually(tells)


def test_a_signal_asks_for_debug_and_once_more_for_its_end(node: Daemon) -> None:
    before = told(node)
    os.kill(node.pid, signal.SIGUSR2)
    eventually(lambda: changes(node)[before:] == [("debug", "900")])
    os.kill(node.pid, signal.SIGUSR2)
    eventually(lambda: changes(node)[before + 1 :] == [("info", "for good")])


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "told"),
    [
        ("PUT", "log-level/verbose", b"", 400, "one of debug, info, warning, error"),
        ("PUT", "log-level/debug", b'{"seconds": 0}', 400, "from 1 to 86400"),
        ("PUT", "log-level/debug", b'{"seconds": 86401}', 400, "from 1 to 86400"),
        ("PUT", "log-level/debug", b'{"minutes": 5}', 400, "the body is not valid"),
        ("PUT", "log-level/debug?seconds=5", b"", 400, "unknown query parameter"),
        ("POST", "log-level/debug", b"", 405, "supports PUT"),
    ],
)
def test_what_is_refused_says_what_is_taken(
    node: Daemon, method: str, path: str, body: bytes, status: int, told: str
) -> None:
    found, document = call(node, method, path, body)
    assert found == status
    assert told in document["error"]["message"]
    assert call(node, "GET")[1]["seconds_left"] == 0


def test_it_is_roots_alone(node: Daemon) -> None:
    node.request("POST", "/-/admin/users", b'{"user_id": "ann"}')
    made = json.loads(node.request("POST", "/-/admin/keys", b'{"user_id": "ann"}').body)
    session = json.loads(node.request("POST", "/-/sts").body)
    of_root = (session["AccessKeyId"], session["SecretAccessKey"], session["SessionToken"])
    for own in ((made["access_key"], made["secret_key"], ""), of_root):
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
        done = command(
            node, "debug", env={"MESHD_ENDPOINT": node.endpoint, **dict(zip(names, own, strict=True))}
        )
        assert done.returncode == 1
        assert "use the admin API (AccessDenied)" in done.stderr
    with pytest.raises(HTTPError) as refused:
        urlopen(node.endpoint + "/-/admin/log-level")
    assert refused.value.code == 403
    refused.value.close()
    assert call(node, "GET")[1]["seconds_left"] == 0


def command(node: Daemon, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    root = {
        "MESHD_ENDPOINT": node.endpoint,
        "MESHD_ROOT_ACCESS_KEY": node.access_key,
        "MESHD_ROOT_SECRET_KEY": node.secret_key,
    }
    environment = os.environ | (root if env is None else env)
    return outcome_of("admin", "log-level", *words, env=environment)


def test_the_command_shows_and_changes_it(node: Daemon) -> None:
    began = time.monotonic()
    done = command(node, "debug", "--for", "30m", "--json")
    (shown,) = json.loads(done.stdout)["nodes"]
    assert (shown["node"], shown["level"]) == ("n1", "debug")
    assert shown["seconds_left"] > 1799 - (time.monotonic() - began)
    assert "debug" in command(node).stdout
    assert json.loads(command(node, "--reset", "--json").stdout)["nodes"][0]["seconds_left"] == 0
    for wrong in (("debug", "--reset"), ("--for", "5m"), ("loud",), ("debug", "--for", "25h")):
        done = command(node, *wrong)
        assert done.returncode != 0
        assert "Traceback" not in done.stderr
