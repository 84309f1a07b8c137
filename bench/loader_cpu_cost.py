"""`python -m bench.loader_cpu_cost ENDPOINT BUCKET`: CPU time of the loader, and warm batches beside
a bare `recv_into`.

Law: one process, in turns (`bench.interleave`): a pass over frames that the node has ready, and as many bytes
by `recv_into` alone into slots of an arena of the same size, over as many connections of the same loopback,
from a process that does nothing but sendfile. Frames come over TCP, as from another host. CPU seconds are
getrusage's, of all threads.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Final

import numpy as np

from bench import photo_dataset
from bench.interleave import order
from bench.results import Figure
from bench.timing import cpu_seconds
from meshsdk.client.arena import Arena
from tests.support import interpreters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import meshsdk as mesh
    from bench.rows import Scale
    from bench.servers import Server

NAME: Final = "delivery"
COLD, WARM, BARE = "loader, first epoch", "loader, warm", "bare recv_into"
CPU_MOST, RATIO_LEAST = 0.15, 0.7
_CONNECTIONS, _BUDGET = 4, 256 << 20
_PATIENCE: Final = 600.0  # seconds


def title(scale: Scale) -> str:
    """What is delivered."""
    return f"Delivery of {scale.photographs:,} photographs in batches of {scale.batch}"


# --- in a process of its own ------------------------------------------------------------------------------


def _loaded(loader: mesh.Loader) -> tuple[int, int]:
    """(samples, bytes) of a pass over epoch 0."""
    loader.set_epoch(0)
    before, samples = loader.stats().bytes, 0
    for batch in loader:
        samples += batch.rows
    return samples, loader.stats().bytes - before


def _plain(sock: socket.socket) -> socket.socket:
    with contextlib.suppress(OSError, AttributeError):  # a pacing congestion control would be no bound
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    return sock


def _send(peer: socket.socket, fd: int, size: int, count: int) -> None:
    for _ in range(count):
        sent = 0
        while sent < size:
            sent += os.sendfile(peer.fileno(), fd, sent, size - sent)


def _serve(listener: socket.socket, size: int, count: int) -> None:
    """In a process of its own: `count` times `size` bytes of shared memory to each connection."""
    fd = os.memfd_create("bare")
    os.truncate(fd, size)
    os.pwrite(fd, os.urandom(1 << 20) * (size >> 20), 0)
    peers = [_plain(listener.accept()[0]) for _ in range(_CONNECTIONS)]
    threads = [threading.Thread(target=_send, args=(peer, fd, size, count)) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def bare_rate(arena: Arena, size: int, count: int) -> tuple[float, float]:
    """(bytes a second, CPU seconds) of `count` frames a connection into slots of the arena."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _plain(listener)
        child = os.fork()
        if child == 0:
            try:
                _serve(listener, size, count)
            finally:
                os._exit(0)
        place = listener.getsockname()
        peers = [_plain(socket.create_connection(place)) for _ in range(_CONNECTIONS)]
    for peer in peers:
        peer.recv(1, socket.MSG_PEEK)  # the sender is under way
    began, cpu = time.perf_counter(), cpu_seconds()
    for _ in range(count):
        for peer in peers:
            view, filled = arena.acquire_slot(size).view, 0
            while filled < size:
                filled += peer.recv_into(view[filled:], 0, socket.MSG_WAITALL)
            held = np.frombuffer(view, np.uint8)  # as the loader's consumer holds a batch until the next
            del view
    seconds, used = time.perf_counter() - began, cpu_seconds() - cpu
    del held
    os.waitpid(child, 0)
    for peer in peers:
        peer.close()
    return size * count * _CONNECTIONS / seconds, used


def _report(name: str, number: int, samples: int, size: int, seconds: float, cpu: float) -> None:
    metrics = {"rate": samples / seconds, "gigabytes": size / seconds / 1e9, "cpu": 1000 * cpu / samples}
    print(json.dumps({"contender": name, "round": number, "metrics": metrics}), flush=True)


def main() -> None:
    """Parse, run the passes, print figures."""
    from bench.meshsdk_contender import dataset  # brings torch

    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint")
    parser.add_argument("bucket")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    began, cpu = time.perf_counter(), cpu_seconds()
    import meshsdk as mesh

    loader = mesh.Loader(dataset(given.endpoint, given.bucket), given.batch, prefetch_bytes=_BUDGET)
    samples, size = _loaded(loader)
    _report(COLD, 0, samples, size, time.perf_counter() - began, cpu_seconds() - cpu)
    arena, frame = Arena(_BUDGET), size // len(loader)
    count = max(1, -(-len(loader) // _CONNECTIONS))
    _loaded(loader)
    bare_rate(arena, frame, 1)  # both arenas have been touched, and all is imported
    moved = frame * count * _CONNECTIONS
    for number in range(given.rounds):
        for name in order((WARM, BARE), number):
            if name == BARE:
                rate, used = bare_rate(arena, frame, count)
                _report(BARE, number, samples * moved // size, moved, moved / rate, used)
                continue
            began, cpu = time.perf_counter(), cpu_seconds()
            samples, size = _loaded(loader)
            _report(WARM, number, samples, size, time.perf_counter() - began, cpu_seconds() - cpu)
    loader.close()


# --- the row ----------------------------------------------------------------------------------------------


def measure(server: Server, scale: Scale, say: Callable[[str], None]) -> Iterator[Figure]:
    """Run the process; a failure is the figures' problem."""
    say(f"{NAME}: batches and bare bytes, {scale.rounds} rounds")
    argv = [interpreters.python(), "-m", "bench.loader_cpu_cost", server.endpoint, photo_dataset.BUCKET]
    argv += ["--batch", str(scale.batch), "--rounds", str(scale.rounds)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            argv,
            cwd=photo_dataset.ROOT,
            env=photo_dataset.environment(server) | {"MESH_LOCAL": "off"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        patience = threading.Timer(_PATIENCE, process.kill)
        patience.start()
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    figure = Figure(**json.loads(line))
                    say(f"{NAME}: {figure.contender}, a round of {scale.rounds} is done")
                    yield figure
        except BaseException:
            process.kill()
            raise
        finally:
            patience.cancel()
        if process.wait():
            errors.seek(0)
            last = [line for line in errors.read().splitlines() if line.strip()][-1:] or ["no output"]
            yield Figure(WARM, 0, {}, f"exit code {process.returncode}: {last[0][:300]}")


if __name__ == "__main__":
    main()
