"""Responses sent at once, past the transport: a head and a file range, as far as the kernel accepts them now.

Only bytes that are in memory are sent, so the event loop does not wait for a disk. What the kernel did not
accept is returned to the caller, and so is the place where a failing disk ended the range.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from meshd.rpc.http_connection import duplicate_socket

if TYPE_CHECKING:
    import asyncio
    from asyncio.trsock import TransportSocket

    from meshd.store.records import Span


class PartialReadError(OSError):
    """`sent` bytes of a body were sent; the following ones cannot be read: `why`."""

    def __init__(self, sent: int, why: BaseException) -> None:
        super().__init__(f"the bytes after the first {sent} cannot be read: {why}")
        self.sent, self.why = sent, why


def is_encrypted(transport: asyncio.BaseTransport) -> bool:
    """Whether `transport` encrypts what is written to it, so that nothing may be written past it."""
    return transport.get_extra_info("sslcontext") is not None


class DirectSender:
    """Sends a response in one turn, past a connection's transport; `sock` is a duplicate of its socket. At
    most `MAX_OPEN` exist at a time; further connections take the regular path."""

    MAX_OPEN: ClassVar = 1024
    open_count: ClassVar = 0

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self.sock = transport, duplicate_socket(transport)
        DirectSender.open_count += 1

    def __repr__(self) -> str:
        return f"<DirectSender fd={self.sock.fileno()}>"

    def send_now(self, head: bytes, span: Span) -> tuple[bytes, PartialReadError | None] | None:
        """Send a head and a range that is in memory, if the connection's buffer has room for both. Returns
        the bytes that were not accepted nevertheless, and the bytes sent of a range that cannot be read to
        its end; None if nothing was sent.

        Nothing may be queued on the transport, nor be in progress past it.
        """
        if not is_resident(span.fd, span.offset, span.length):
            return None
        try:
            if _room(self.sock) < len(head) + span.length:
                return None
            taken = self.sock.send(head, socket.MSG_MORE)
        except OSError:  # no room after all, or the client is gone: the regular path handles it
            return None
        return _finish_at_once(self._transport, self.sock, head[taken:], span)

    def close(self) -> None:
        """Close the duplicate; the connection itself stays open."""
        DirectSender.open_count -= 1
        self.sock.close()


def _room(sock: socket.socket) -> int:
    """Return the bytes that the kernel would accept for a connection: its buffer less what it holds."""
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) - _waiting(sock)


def _waiting(sock: socket.socket | TransportSocket) -> int:
    """Return the bytes that the kernel keeps until the other side has acknowledged them. Raises OSError."""
    return int(struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0])


def unsent_bytes_of(transport: asyncio.Transport) -> int:
    """Return the bytes that wait for the other side, in this process and in the kernel; 0 while none wait in
    this process. The kernel may keep megabytes, and accepts no more until a third of them is gone."""
    waiting, sock = transport.get_write_buffer_size(), transport.get_extra_info("socket")
    if not waiting or sock is None:
        return waiting
    with suppress(OSError, ValueError):  # it is being closed
        waiting += _waiting(sock)
    return waiting


def _finish_at_once(
    transport: asyncio.Transport, sock: socket.socket, head: bytes, span: Span
) -> tuple[bytes, PartialReadError | None]:
    """Finish a started response: return the bytes not accepted, and where a failing disk ended it."""
    moved = 0
    try:
        with suppress(BlockingIOError):
            while not head and moved < span.length:
                sent = os.sendfile(sock.fileno(), span.fd, span.offset + moved, span.length - moved)
                if not sent:
                    break
                moved += sent
        rest = os.pread(span.fd, span.length - moved, span.offset + moved) if moved < span.length else b""
    except ConnectionError:
        transport.abort()
        return b"", None
    except OSError as error:
        return head, PartialReadError(moved, error)
    if moved + len(rest) != span.length:
        return head, PartialReadError(moved, OSError("a data file ends before its extent does"))
    return head + rest, None


def is_resident(fd: int, offset: int, length: int) -> bool:
    """Whether the first and the last page of a range are in memory (preadv2(2), RWF_NOWAIT)."""
    probe = (bytearray(1),)
    try:
        os.preadv(fd, probe, offset, os.RWF_NOWAIT)
        os.preadv(fd, probe, offset + length - 1, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:  # this file system does not support the flag
        return True
    return True
