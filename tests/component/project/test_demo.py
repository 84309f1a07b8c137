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

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [str(Path(sys.executable).with_name("mesh")), "demo", "--quick"]


@pytest.mark.timeout(420)
def test_demo_runs_and_keeps_its_claims() -> None:
    done = subprocess.run(COMMAND, cwd=ROOT, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for claim in (
        "held-out accuracy",
        "identical batches after the resume",
        "equal hashes",
        "the same epoch",
    ):
        assert claim in done.stdout
    assert "Warning" not in done.stderr, done.stderr


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
