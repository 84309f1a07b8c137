"""A real Prometheus that scrapes given nodes every second, asked over its HTTP API."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import yaml

from meshd.util.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_PATIENCE = 60.0
_clock = SystemClock()


class Prometheus:
    """Answers queries."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"

    def __repr__(self) -> str:
        return f"<Prometheus {self._base}>"

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series an expression has now. Raises AssertionError when it is none."""
        url = f"{self._base}/api/v1/query?{urllib.parse.urlencode({'query': expr})}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
                return found
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it is not ready yet
                raise
            raise AssertionError(f"{expr}: {error.read().decode()}") from error

    def wait(self, expr: str) -> list[dict[str, Any]]:
        """The same, once it gives any."""
        end = _clock.monotonic() + _PATIENCE
        while _clock.monotonic() < end:
            with suppress(OSError):
                if found := self.query(expr):
                    return found
            threading.Event().wait(0.2)
        raise AssertionError(f"{expr} gave nothing for {_PATIENCE:.0f} s")


@contextmanager
def prometheus(place: Path, targets: Sequence[str], rules: Path) -> Iterator[Prometheus]:
    """One, for the length of the block, with its data in `place`. Targets are HOST:PORT or URLs."""
    config = place / "prometheus.yaml"
    groups = [_group(each) for each in targets]
    job = {"job_name": "shardmesh", "static_configs": groups, "tls_config": {"insecure_skip_verify": True}}
    config.write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(rules)],
                "scrape_configs": [job],
            }
        )
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={place / 'tsdb'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    with subprocess.Popen(command) as process:
        try:
            yield Prometheus(port)
        finally:
            process.terminate()


def _group(target: str) -> dict[str, Any]:
    scheme, _, where = target.rpartition("://")
    return {"targets": [where], "labels": {"__scheme__": scheme or "http"}}
