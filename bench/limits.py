"""What this machine allows: bytes through a loopback socket, and the daemon's ops with nothing around them.

Law: no server, no HTTP, no store. A contender cannot be faster than these; how close it comes is in the
report.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.queues import SimpleQueue
    from pathlib import Path
    from threading import Barrier

FILE_BYTES = 64 << 20
SIDE = 224


def _send_until_closed(peer: socket.socket, fd: int) -> None:
    try:
        while True:
            sent = 0
            while sent < FILE_BYTES:
                sent += os.sendfile(peer.fileno(), fd, sent, FILE_BYTES - sent)
    except (BrokenPipeError, ConnectionResetError):
        return


def _serve(listener: socket.socket, connections: int) -> None:
    """In a process of its own: sendfile one file in page memory to each connection until it closes."""
    fd = os.memfd_create("limit")
    os.truncate(fd, FILE_BYTES)
    peers = [listener.accept()[0] for _ in range(connections)]
    threads = [threading.Thread(target=_send_until_closed, args=(peer, fd)) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _receive(port: int, deadline: float, totals: list[int]) -> None:
    buffer, total = bytearray(1 << 20), 0
    with socket.create_connection(("127.0.0.1", port)) as source:
        while time.monotonic() < deadline:
            total += source.recv_into(buffer)
    totals.append(total)


def socket_rate(seconds: float, connections: int = 4) -> float:
    """Bytes a second that one process can `recv_into` from another's sendfile, over TCP on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        child = os.fork()
        if child == 0:
            try:
                _serve(listener, connections)
            finally:
                os._exit(0)
        totals: list[int] = []
        deadline = time.monotonic() + seconds
        port = int(listener.getsockname()[1])
        threads = [
            threading.Thread(target=_receive, args=(port, deadline, totals)) for _ in range(connections)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    os.waitpid(child, 0)
    return sum(totals) / seconds


def _render(files: Sequence[Path]) -> None:
    """Read, decode, crop, flip and write rows, as a transform process does."""
    import cv2

    from meshd.transform.op_chain import compile_chain
    from meshsdk import ops
    from meshwire.plan.keyed_random import KeyedRandom

    cv2.setNumThreads(1)
    wanted = (
        ops.decode("image"),
        ops.random_resized_crop("image", SIDE),
        ops.hflip("image"),
        ops.to_chw("image"),
    )
    chain = compile_chain(list(enumerate(wanted)))
    row = np.empty((3, SIDE, SIDE), np.uint8)
    for position, file in enumerate(files):
        chain.render_into(file.read_bytes(), partial(KeyedRandom, 7, 0, position), row)


def _render_share(files: Sequence[Path], together: Barrier, seconds: SimpleQueue[float]) -> None:
    """In a process of its own: imports first, then the share, timed from when all processes are ready."""
    _render(files[:2])
    together.wait(60)
    start = time.perf_counter()
    _render(files)
    seconds.put(time.perf_counter() - start)


def transform_rate(files: Sequence[Path], processes: int = 2) -> float:
    """Samples a second of the daemon's own ops on `processes` cores, with no server, store or network."""
    context = get_context("spawn")
    together, seconds = context.Barrier(processes), context.SimpleQueue()
    shares = [files[number::processes] for number in range(processes)]
    workers = [context.Process(target=_render_share, args=(share, together, seconds)) for share in shares]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise RuntimeError("a process that renders photographs failed; its traceback is above")
    return len(files) / float(max(seconds.get() for _ in workers))
