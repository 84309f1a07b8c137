"""Resident memory of the daemon's processes while many large bodies go in and out at once.

Invariant: all connections are streaming before the first sample counts; the figure is the highest RSS any
single process of a role reached, shared pages included, as `ps` shows it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import psutil

from bench import fill_and_check
from bench.presigned_requests import UNSIGNED, Request, head
from bench.processes import family
from bench.results import Figure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.rows import Scale
    from bench.servers import Server

CHUNK = MIB = 1 << 20
Direction = Literal["GET", "PUT", "mixed", "slow readers"]
DIRECTIONS: tuple[Direction, ...] = ("GET", "PUT", "mixed", "slow readers")
_SIP, _PAUSE = 64 << 10, 0.2


@dataclass(slots=True)
class Traffic:
    """Counts what the client threads move, and collects what goes wrong."""

    stop: threading.Event = field(default_factory=threading.Event)
    moved: dict[int, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def _pull(
    server: Server, sock: socket.socket, key: str, traffic: Traffic, number: int, sip: int = CHUNK
) -> None:
    """GET over and over: the kernel drops the bytes (MSG_TRUNC), so that the client costs next to nothing.
    With a smaller `sip` it pauses after each: a slow reader."""
    sink = bytearray(CHUNK)
    while not traffic.stop.is_set():
        sock.sendall(head(Request("GET", fill_and_check.path_of(key)), server.host, server.account))
        first = sock.recv(CHUNK)
        if not first.startswith(b"HTTP/1.1 200"):
            raise fill_and_check.AnswerError(f"GET answered {first[:60]!r}")
        headers, _, rest = first.partition(b"\r\n\r\n")
        length = next(
            int(line[15:]) for line in headers.lower().split(b"\r\n") if line.startswith(b"content-length:")
        )
        left = length - len(rest)
        while left and not traffic.stop.is_set():
            got = sock.recv_into(sink, min(left, sip), socket.MSG_TRUNC)
            if not got:
                raise fill_and_check.AnswerError("the server closed in the middle of a body")
            left -= got
            traffic.moved[number] += got
            if sip < CHUNK:
                traffic.stop.wait(_PAUSE)


def _push(server: Server, sock: socket.socket, key: str, size: int, traffic: Traffic, number: int) -> None:
    """PUT over and over; ends in the middle of a body when told to stop."""
    block = memoryview(fill_and_check.pattern(CHUNK))
    while not traffic.stop.is_set():
        request = Request("PUT", fill_and_check.path_of(key), length=size, payload_hash=UNSIGNED)
        sock.sendall(head(request, server.host, server.account))
        left = size
        with contextlib.suppress(ConnectionError):  # a refusal can be read even then
            while left and not traffic.stop.is_set():
                sent = sock.send(block[: min(left, CHUNK)])
                left -= sent
                traffic.moved[number] += sent
        if traffic.stop.is_set():
            return
        if not (answer := sock.recv(4096)).startswith(b"HTTP/1.1 200"):
            raise fill_and_check.AnswerError(f"PUT answered {answer[:60]!r}")


def _run_client(server: Server, verb: str, size: int, traffic: Traffic, number: int) -> None:
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
            if verb == "GET":
                _pull(server, sock, "memory/source", traffic, number)
            elif verb == "slow":
                _pull(server, sock, "memory/source", traffic, number, _SIP)
            else:
                _push(server, sock, f"memory/target-{number:03d}", size, traffic, number)
    except (OSError, fill_and_check.AnswerError) as error:
        if not traffic.stop.is_set():
            traffic.problems.append(f"{verb}: {error}")


def _verbs(direction: Direction, connections: int) -> list[str]:
    if direction == "mixed":
        return ["GET" if number % 2 else "PUT" for number in range(connections)]
    return ["slow" if direction == "slow readers" else direction] * connections


def name_of(process: psutil.Process) -> str:
    """What the process calls itself (`meshd:worker-0`) and its id."""
    return f"{process.name()} {process.pid}"


def sizes(pid: int) -> Iterator[tuple[str, int]]:
    """(name, RSS in bytes) of the process and its descendants."""
    for process in family(pid):
        with contextlib.suppress(psutil.Error):
            yield name_of(process), int(process.memory_info().rss)


def idle(server: Server) -> Figure:
    """What a node with nothing to do holds: `whole` in MiB, shared pages divided among those that share them
    (proportional set size); `worst` is the largest process as `ps` shows it."""
    shares, largest = 0, 0
    for process in family(server.child.process.pid):
        memory = process.memory_full_info()
        shares, largest = shares + int(memory.pss), max(largest, int(memory.rss))
    return Figure("idle", 0, {"whole": shares / MIB, "worst": largest / MIB})


def _watch(server: Server, traffic: Traffic, connections: int, seconds: float) -> dict[str, int]:
    """Highest RSS of each process from when every connection has moved bytes, for `seconds`."""
    give_up = time.monotonic() + 60
    while len([n for n in traffic.moved.values() if n]) < connections and time.monotonic() < give_up:
        time.sleep(0.05)
        if traffic.problems:
            return {}
    peaks: dict[str, int] = {}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not traffic.problems:
        for name, rss in sizes(server.child.process.pid):
            peaks[name] = max(rss, peaks.get(name, 0))
        time.sleep(0.05)
    return peaks


def measure(server: Server, direction: Direction, scale: Scale) -> Figure:
    """Stream over all connections for the scale's seconds and watch; sizes in MiB, `moved` in GB/s."""
    before = dict(sizes(server.child.process.pid))
    verbs = _verbs(direction, scale.memory_connections)
    traffic = Traffic(moved=dict.fromkeys(range(len(verbs)), 0))
    start = time.monotonic()
    threads = [
        threading.Thread(target=_run_client, args=(server, verb, scale.memory_bytes, traffic, number))
        for number, verb in enumerate(verbs)
    ]
    for thread in threads:
        thread.start()
    peaks = _watch(server, traffic, len(verbs), scale.memory_seconds)
    moved, seconds = sum(traffic.moved.values()), time.monotonic() - start
    traffic.stop.set()
    for thread in threads:
        thread.join()
    problem = traffic.problems[0] if traffic.problems else "" if peaks else "not every connection moved bytes"
    metrics = {"before": max(before.values()) / MIB, "moved": moved / seconds / 1e9}
    metrics |= {"worst": max(peaks.values(), default=0) / MIB}
    metrics |= {f"peak {name}": peak / MIB for name, peak in peaks.items()}
    return Figure(direction, 0, metrics, problem)


def prepare(server: Server, scale: Scale) -> None:
    """One object to read, put in one streamed PUT."""
    fill_and_check.make_bucket(server)
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as sock:
        request = Request(
            "PUT", fill_and_check.path_of("memory/source"), length=scale.memory_bytes, payload_hash=UNSIGNED
        )
        sock.sendall(head(request, server.host, server.account))
        block, left = memoryview(fill_and_check.pattern(CHUNK)), scale.memory_bytes
        while left:
            left -= sock.send(block[: min(left, CHUNK)])
        answer = sock.recv(4096)
    if not answer.startswith(b"HTTP/1.1 200"):
        raise fill_and_check.AnswerError(f"{server.name}: PUT of the source answered {answer[:60]!r}")
