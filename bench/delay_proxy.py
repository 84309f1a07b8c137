"""A proxy before an origin: later, slower, and counted. `python -m bench.delay_proxy` runs it.

Law: a thread a connection; bodies of answers go from socket to socket by splice(2), so that it takes next to
no processor time from those who are measured. Every request is a line of the log: method, target, range.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from io import IOBase, RawIOBase
    from typing import BinaryIO

_PIECE: Final = 256 << 10
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_RANGE: Final = re.compile(rb"\r\nrange: *([^\r]*)", re.IGNORECASE)
_BARE: Final = (b" 204 ", b" 304 ")


@dataclass(frozen=True, slots=True)
class Slowing:
    """`delay` seconds before an answer; `rate` bytes a second of a connection, 0 for no limit."""

    target: int
    delay: float
    rate: float
    log: BinaryIO


def serve(listener: socket.socket, slowing: Slowing) -> None:
    """Until the process ends."""
    while True:
        client, _ = listener.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_converse, args=(client, slowing), daemon=True).start()


def _converse(client: socket.socket, slowing: Slowing) -> None:
    with suppress(OSError), client, socket.create_connection(("127.0.0.1", slowing.target)) as origin:
        origin.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with client.makefile("rb") as asked, origin.makefile("rb", buffering=0) as answered:
            while head := _head(asked):
                _note(slowing, head)
                origin.sendall(head)
                _copy(asked, origin, _length(head))
                answer = _head(answered)
                while answer.startswith(b"HTTP/1.1 100"):
                    answer = _head(answered)
                time.sleep(slowing.delay)
                client.sendall(answer)
                if head.startswith(b"HEAD ") or any(code in answer[:16] for code in _BARE):
                    continue
                if _LENGTH.search(answer) is None:
                    _chunks(answered, client)
                else:
                    _splice(origin, client, _length(answer), slowing.rate)


def _head(file: IOBase) -> bytes:
    """Up to and with the empty line; nothing at the end."""
    lines = []
    while line := file.readline():
        lines.append(line)
        if line == b"\r\n":
            return b"".join(lines)
    return b""


def _length(head: bytes) -> int:
    found = _LENGTH.search(head)
    return int(found[1]) if found else 0


def _note(slowing: Slowing, head: bytes) -> None:
    ranged = _RANGE.search(head)
    line = head.split(b" HTTP", 1)[0] + (b" " + ranged[1] if ranged else b"")
    slowing.log.write(line + b"\n")


def _copy(source: BinaryIO, to: socket.socket, left: int) -> None:
    while left:
        data = source.read(min(left, _PIECE))
        if not data:
            raise ConnectionError
        left -= len(data)
        to.sendall(data)


def _chunks(source: RawIOBase, to: socket.socket) -> None:
    while line := source.readline():
        size = int(line.split(b";")[0], 16)
        body = b""
        while len(body) < size + 2 and (more := source.read(size + 2 - len(body))):
            body += more
        to.sendall(line + body)
        if not size:
            return


def _splice(source: socket.socket, to: socket.socket, left: int, rate: float) -> None:
    """A piece goes out when its last byte is due, so that no connection is ever ahead of its rate."""
    reading, writing = os.pipe()
    began, sent = time.monotonic(), 0
    try:
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIECE)
        while left:
            held = os.splice(source.fileno(), writing, min(left, _PIECE))
            if not held:
                raise ConnectionError
            left -= held
            sent += held
            if rate:
                time.sleep(max(0.0, sent / rate - (time.monotonic() - began)))
            while held:
                held -= os.splice(reading, to.fileno(), held)
    finally:
        os.close(reading)
        os.close(writing)


def main() -> None:
    """`PORT TARGET DELAY_S BYTES_A_SECOND LOG`."""
    port, target, delay, rate, log = sys.argv[1:]
    with socket.create_server(("127.0.0.1", int(port)), backlog=256) as listener, open(log, "ab", 0) as file:
        serve(listener, Slowing(int(target), float(delay), float(rate), file))


if __name__ == "__main__":
    main()
