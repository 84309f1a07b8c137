"""nbdkit plugin: a file that answers as slowly as a rotational drive. Started by `bench.rotational_drive`.

Law: runs in nbdkit's interpreter, which has the standard library and, by PYTHONPATH, this repository. What a
request costs is `bench.drive_model`'s; this module is the threads, the clock and the file.

Parameters: `image` is the file; `control` a socket on which `on`, `off` and `stats`, one a line, are each
answered with the statistics as a line of JSON. Requests are delayed and counted while it is on.
"""

from __future__ import annotations

import json
import os
import socketserver
import threading
import time
from dataclasses import asdict

import nbdkit  # type: ignore[import-not-found]  # nbdkit has it inside

from bench.drive_model import Drive, Geometry, Request

API_VERSION = 2
DEFAULT_RATE = 200e6
_parameters: dict[str, str] = {}


class Platter:
    """The drive's own thread, which takes one request after another, and the requests that wait for it."""

    def __init__(self, geometry: Geometry) -> None:
        self._drive, self._on = Drive.idle(geometry), False
        self._changed = threading.Condition()
        self._finished: dict[int, threading.Event] = {}
        threading.Thread(target=self._spin, daemon=True).start()

    def command(self, words: str) -> str:
        """Carry out a line of the control socket; the statistics as JSON."""
        with self._changed:
            if words in ("on", "off"):
                self._on = words == "on"
            return json.dumps(asdict(self._drive.arm.stats))

    def submit(self, offset: int, length: int, *, write: bool) -> threading.Event | None:
        """Ask for bytes; the event is set when the drive has moved them. None while it is off."""
        if not self._on:
            return None
        finished = threading.Event()
        with self._changed:
            request = Request(offset, length, time.monotonic(), write=write)
            self._drive.submit(request)
            self._finished[id(request)] = finished
            self._changed.notify()
        return finished

    def _spin(self) -> None:
        while True:
            with self._changed:
                while (taken := self._drive.start_next(time.monotonic())) is None:
                    decides = self._drive.decides_at()
                    # A little late is late: the drive's own time goes on from when it should have begun.
                    self._changed.wait(None if decides is None else max(0.0, decides - time.monotonic()))
                request, ends = taken
                finished = self._finished.pop(id(request))
            time.sleep(max(0.0, ends - time.monotonic()))
            finished.set()


class _Control(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        for line in self.rfile:
            self.wfile.write(_platter().command(line.decode().strip()).encode() + b"\n")


_state: list[Platter] = []


def _platter() -> Platter:
    return _state[0]


def config(key: str, value: str) -> None:
    """nbdkit: a parameter of the command line."""
    _parameters[key] = value


def thread_model() -> int:
    """nbdkit: requests wait beside each other."""
    return int(nbdkit.THREAD_MODEL_PARALLEL)


def after_fork() -> None:
    """nbdkit: threads may be started."""
    size = os.stat(_parameters["image"]).st_size
    rate = float(_parameters.get("rate", DEFAULT_RATE))
    _state.append(Platter(Geometry(size, rate)))
    server = socketserver.ThreadingUnixStreamServer(_parameters["control"], _Control)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()


def open(readonly: bool) -> int:
    """nbdkit: a client's connection; the handle is a descriptor of the file."""
    return os.open(_parameters["image"], os.O_RDONLY if readonly else os.O_RDWR)


def close(handle: int) -> None:
    """nbdkit: the connection ends."""
    os.close(handle)


def get_size(handle: int) -> int:
    """nbdkit: bytes of the disk."""
    return os.fstat(handle).st_size


def is_rotational(handle: int) -> bool:
    """nbdkit: yes."""
    return True


def can_multi_conn(handle: int) -> bool:
    """nbdkit: all connections see the same file."""
    return True


def pread(handle: int, buffer: bytearray, offset: int, flags: int) -> None:
    """nbdkit: read into the buffer. What the file's own disk takes is within the drive's time."""
    finished = _platter().submit(offset, len(buffer), write=False)
    view, done = memoryview(buffer), 0
    while done < len(buffer):
        got = os.preadv(handle, [view[done:]], offset + done)
        if not got:
            raise OSError(f"{_parameters['image']} ends at {offset + done}")
        done += got
    if finished:
        finished.wait()


def pwrite(handle: int, buffer: bytearray, offset: int, flags: int) -> None:
    """nbdkit: write the buffer."""
    finished = _platter().submit(offset, len(buffer), write=True)
    view, done = memoryview(buffer), 0
    while done < len(buffer):
        done += os.pwrite(handle, view[done:], offset + done)
    if finished:
        finished.wait()


def flush(handle: int, flags: int) -> None:
    """nbdkit: nothing; the file is thrown away with the drive."""
