"""Contenders in processes of their own: a round each, and none that hangs stops the others."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil

from bench.ready_process import StandingContender

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

GOOD = """
import sys
print("noise" * 100_000, file=sys.stderr)  # more than a pipe holds
print("ready", flush=True)
for _ in sys.stdin:
    print('{"rate": 2.0}', flush=True)
"""
HANGS = """
import subprocess, sys, time
print("a worker has died", file=sys.stderr, flush=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
time.sleep(600)
"""


def _contender(place: Path, monkeypatch: pytest.MonkeyPatch, program: str, limit_s: float) -> Any:
    (place / "contender.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(place))
    server: Any = SimpleNamespace(account=SimpleNamespace(access_key="key", secret_key="secret"))
    return StandingContender("ours", ["contender"], server, sys.executable, limit_s)


def test_a_round_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _contender(tmp_path, monkeypatch, GOOD, 60.0) as contender:
        contender.wait_ready()
        figures = [contender.figure(number) for number in range(2)]
    assert [(figure.round, figure.metrics, figure.problem) for figure in figures] == [
        (0, {"rate": 2.0}, ""),
        (1, {"rate": 2.0}, ""),
    ]


def test_one_that_hangs_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(psutil.Process().children(recursive=True))
    with _contender(tmp_path, monkeypatch, HANGS, 2.0) as contender:
        contender.wait_ready()
        figure = contender.figure(0)
    assert (figure.metrics, figure.problem.startswith("no answer for 2 s")) == ({}, True)
    left = set(psutil.Process().children(recursive=True)) - before
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []
