"""`python -m bench.rotational_device IMAGE PLACE CONTROL`: a file as slow as a rotational drive.

Started by `bench.rotational_drive`, and ends with it. PLACE becomes a file with the bytes of IMAGE. CONTROL
is a socket on which `on`, `off` and `stats`, one a line, are each answered with the statistics as a line of
JSON. Requests are delayed and counted while it is on.

Law: what a request costs is `bench.drive_model`'s; this module is the threads, the clock and the bytes. The
standard library alone: it starts in a moment, and takes little of the processors that others are measured on.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import socketserver
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.drive_model import Drive, Geometry, Request
from bench.fuse_file import FuseFile

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.fuse_file import Call

_PR_SET_PDEATHSIG: Final = 1


class Platter:
    """The drive's own thread, which takes one request after another, and the requests that wait for it."""

    def __init__(self, geometry: Geometry) -> None:
        self._drive, self._on = Drive.idle(geometry), False
        self._changed = threading.Condition()
        self._finish: dict[int, Callable[[], None]] = {}
        threading.Thread(target=self._spin, daemon=True).start()

    def command(self, words: str) -> str:
        """Carry out a line of the control socket; the statistics as JSON."""
        with self._changed:
            if words in ("on", "off"):
                self._on = words == "on"
            return json.dumps(asdict(self._drive.arm.stats))

    def submit(self, offset: int, length: int, finish: Callable[[], None], *, write: bool) -> None:
        """Ask for bytes; `finish` is called when the drive has moved them, at once while it is off."""
        if not self._on:
            finish()
            return
        with self._changed:
            request = Request(offset, length, time.monotonic(), write=write)
            self._finish[id(request)] = finish
            self._drive.submit(request)
            self._changed.notify()

    def _spin(self) -> None:
        while True:
            with self._changed:
                while (taken := self._drive.start_next(time.monotonic())) is None:
                    decides = self._drive.decides_at()
                    # A little late is late: the drive's own time goes on from when it should have begun.
                    self._changed.wait(None if decides is None else max(0.0, decides - time.monotonic()))
                request, ends = taken
                finish = self._finish.pop(id(request))
            time.sleep(max(0.0, ends - time.monotonic()))
            finish()


class Image:
    """The bytes of the drive, in a file elsewhere; what that file's own disk takes is not counted."""

    def __init__(self, path: Path, platter: Platter) -> None:
        self._platter = platter
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size
        self._bytes = memoryview(mmap.mmap(self._fd, self.size, prot=mmap.PROT_READ))

    def __repr__(self) -> str:
        return f"<Image of {self.size} bytes>"

    def read(self, call: Call, offset: int, length: int) -> None:
        """Answer with these bytes when they have passed under the head."""
        data = self._bytes[offset : offset + length]
        self._platter.submit(offset, length, lambda: call.answer_read(data), write=False)

    def write(self, call: Call, offset: int, data: memoryview) -> None:
        """Write, and answer when the drive would have."""
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], offset + done)
        self._platter.submit(offset, done, lambda: call.answer_write(done), write=True)


def _end_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the process that started the drive has ended")


def _listen(path: str, platter: Platter) -> None:
    class Control(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                self.wfile.write(platter.command(line.decode().strip()).encode() + b"\n")

    server = socketserver.ThreadingUnixStreamServer(path, Control)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()


def main() -> None:
    """`python -m bench.rotational_device IMAGE PLACE CONTROL`."""
    image, place, control = sys.argv[1:]
    _end_with_parent()
    platter = Platter(Geometry(Path(image).stat().st_size))
    served = Image(Path(image), platter)
    _listen(control, platter)
    FuseFile(Path(place), served.size, served).serve()


if __name__ == "__main__":
    main()
