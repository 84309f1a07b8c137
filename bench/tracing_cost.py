"""What tracing costs: processor time per request, off, at a share of 1 %, and for every request.

    python -m bench.tracing_cost [--rounds 100] [--base CHECKOUT] [--kinds small] [--names "off,1 %"]

Law: daemons take turns, a thousand requests each, so that what else the machine does meets all alike; the
figure is the processor time of all threads of a daemon, not the time that passes. `--base` adds a daemon that
runs the code of another checkout, as from before tracing.
"""

from __future__ import annotations

import argparse
import socket
import statistics
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tests.support.daemons import Daemon
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.s3_raw import Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

KINDS = {"small": (4 << 10, 1000), "large": (3 << 20, 20)}
"""Sizes of the objects that are read, and requests of a turn: by the fast path, and by `sendfile`."""


@dataclass
class Contender:
    """A daemon, and microseconds of processor time per request in each of its turns, by kind."""

    name: str
    daemon: Daemon
    turns: dict[str, list[float]] = field(default_factory=dict)

    def take_turn(self, kind: str) -> None:
        size, count = KINDS[kind]
        wire = Wire(self.daemon.endpoint, self.daemon.access_key, self.daemon.secret_key)
        request = wire.head("GET", f"/bench/{kind}")
        before = self.processor_time()
        with socket.create_connection((self.daemon.host, urlsplit(self.daemon.endpoint).port)) as sock:
            for _ in range(count):
                sock.sendall(request)
                receive(sock, size)
        self.turns.setdefault(kind, []).append((self.processor_time() - before) / count * 1e6)

    def processor_time(self) -> float:
        """Seconds of all threads of all processes."""
        pids = (self.daemon.pid, *self.daemon.children().values())
        tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def receive(sock: socket.socket, size: int) -> None:
    """One response with a body of `size` bytes."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += sock.recv(1 << 20)
    assert data.startswith(b"HTTP/1.1 200"), data[:300]
    left = size - (len(data) - data.index(b"\r\n\r\n") - 4)
    while left:
        left -= len(sock.recv(min(left, 1 << 20)))


def measure(rounds: int, base: Path | None, kinds: Sequence[str], names: Sequence[str]) -> list[Contender]:
    """Let the daemons take turns."""
    with ExitStack() as stack:
        collector = stack.enter_context(OtlpReceiver())
        traced = ["--trace-endpoint", collector.endpoint, "--trace-ratio"]
        found = [
            Contender(name, stack.enter_context(Daemon.start(args=args)))
            for name, args in (("off", []), ("1 %", [*traced, "0.01"]), ("all", [*traced, "1"]))
            if name in names
        ]
        if base is not None:
            daemon = stack.enter_context(Daemon(None, [], {}, 1))
            daemon.checkout = base
            daemon.up()
            found.insert(0, Contender("base", daemon))
        for contender in found:
            client = contender.daemon.client()
            client.create_bucket(Bucket="bench")
            for kind, (size, _) in KINDS.items():
                client.put_object(Bucket="bench", Key=kind, Body=b"x" * size)
        for number in range(rounds + 1):
            order = found[number % len(found) :] + found[: number % len(found)]
            for kind in kinds:
                for contender in order:
                    contender.take_turn(kind)
        for contender in found:  # the first turn warms up
            contender.turns = {kind: turns[1:] for kind, turns in contender.turns.items()}
        return found


def report(found: Sequence[Contender]) -> None:
    """Print the mean of the quickest quarter of turns: what else runs can only add processor time, by misses
    of caches."""
    for kind in found[0].turns:
        figures = [quickest(contender.turns[kind]) for contender in found]
        for contender, (figure, error) in zip(found, figures, strict=True):
            share = figure / figures[0][0] - 1
            print(f"{kind:6} {contender.name:5} {figure:8.1f} ± {error:.1f} µs per request, {share:+.2%}")


def quickest(turns: Sequence[float]) -> tuple[float, float]:
    """The mean of the quickest quarter, and its standard error."""
    best = sorted(turns)[: max(2, len(turns) // 4)]
    return statistics.mean(best), statistics.stdev(best) / len(best) ** 0.5


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--kinds", default="small,large")
    parser.add_argument("--names", default="off,1 %,all")
    options = parser.parse_args()
    report(measure(options.rounds, options.base, options.kinds.split(","), options.names.split(",")))
