"""Load from wrk: pre-signed requests in a ring, one reading out.

Invariant: every contender gets the same heads but for host and signature, and the same body file.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.presigned_requests import head

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.presigned_requests import Account, Request

SCRIPT = Path(__file__).with_name("wrk.lua")
THREADS = 2


class GeneratorError(RuntimeError):
    """wrk could not run; the message has its output."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What wrk saw: latencies in milliseconds, `bytes` as received with heads."""

    requests: int
    seconds: float
    bytes: int
    errors: int
    p50_ms: float
    p99_ms: float
    max_ms: float

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.requests / self.seconds


@dataclass(frozen=True, slots=True)
class Load:
    """What to send: `requests` over `connections` for `seconds`; `body` follows every head."""

    requests: tuple[Request, ...]
    connections: int
    seconds: int
    body: Path | None = None


def available() -> bool:
    """Whether wrk is on the path."""
    return shutil.which("wrk") is not None


def write_heads(requests: Sequence[Request], host: str, account: Account | None, out: Path) -> None:
    """Sign now (a signature is good for 15 minutes) and write the ring wrk replays."""
    with out.open("wb") as file:
        for request in requests:
            raw = head(request, host, account)
            file.write(b"%d\n%s" % (len(raw), raw))


def run(load: Load, host: str, account: Account | None, scratch: Path) -> Reading:
    """Send the load to `host`; raises GeneratorError when wrk fails."""
    heads = scratch / "heads.bin"
    write_heads(load.requests, host, account, heads)
    threads = min(THREADS, load.connections)
    big = load.body is not None and load.body.stat().st_size > 1 << 20
    argv = ["wrk", f"-t{threads}", f"-c{load.connections}", f"-d{load.seconds}s", "--timeout", "60s"]
    argv += ["-s", str(SCRIPT), f"http://{host}/", "--", str(heads), str(load.body or "")]
    argv += [str(threads if big else 1)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=load.seconds + 120)
    lines = [line for line in done.stdout.splitlines() if line.startswith("@ ")]
    if done.returncode or not lines:
        raise GeneratorError(f"wrk exited {done.returncode}: {done.stdout[-800:]}{done.stderr[-800:]}")
    return Reading(**json.loads(lines[-1][2:]))
