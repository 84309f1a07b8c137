"""The demonstration at toy size: every claim in it is checked by itself, so its exit code is the test."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshdemo.__main__ import stay
from meshdemo.daemon import Daemon
from meshdemo.screen import console
from tests.support.console_client import ConsoleClient

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [str(Path(sys.executable).with_name("mesh")), "demo", "--quick"]


@pytest.mark.timeout(420)
def test_demo_runs_and_keeps_its_claims() -> None:
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    demo = subprocess.Popen(
        [*COMMAND, "--stay"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    with demo:
        assert demo.stdout is not None
        said = ""
        for line in demo.stdout:
            said += line
            if "Ctrl-C stops it" in line:
                address = re.search(r"Look at it: (\S+)/console", said)
                assert address is not None
                page = ConsoleClient(address[1], "demo", re.findall(r"secret key +(\S+)", said)[0])
                assert page.sign_in().status == 200
                assert page.json("GET", "/-/activity")["nodes"]
                demo.send_signal(signal.SIGINT)
        assert demo.stderr is not None
        errors = demo.stderr.read()
    assert demo.returncode == 0, said[-3000:] + errors[-3000:]
    for claim in (
        "held-out accuracy",
        "identical batches after the resume",
        "equal hashes",
        "the same epoch",
    ):
        assert claim in said
    assert "Warning" not in errors, errors


def test_ctrl_c_as_soon_as_the_address_is_printed_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    printed = list[str]()

    def interrupted_print(text: str, **_: object) -> None:
        printed.append(text)
        if "Ctrl-C stops it" in text:  # its reader may be faster than the rest of console.print
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(console, "print", interrupted_print)
    stay(Daemon(tmp_path, endpoint="http://127.0.0.1:1"))
    assert len(printed) == 3
    with pytest.raises(KeyboardInterrupt):  # the handler of before is back
        os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_stops_the_daemon_too() -> None:
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(COMMAND, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=env) as demo:
        assert demo.stdout is not None
        ready = next(line for line in demo.stdout if "is ready at" in line)
        demo.send_signal(signal.SIGINT)
        rest = demo.stdout.read()
    assert demo.returncode == 130, rest
    assert "the daemon is stopped too" in rest
    match = re.search(r":(\d+)$", ready.strip())
    assert match is not None
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(match[1]))) != 0
