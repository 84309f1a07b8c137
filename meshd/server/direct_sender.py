"""Direct sender: writes a response's head and a file range to the socket at once, past the transport's queue.

It sends only bytes that are in memory, so the event loop does not wait for a disk, and never waits for the
client: bytes that the kernel does not accept at once are returned to the caller.
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
    """The bytes of a body after the first `sent` cannot be read (`why`); those were sent."""

    def __init__(self, sent: int, why: BaseException) -> None:
        super().__init__(f"the bytes after the first {sent} cannot be read: {why}")
        self.sent, self.why = sent, why


def is_encrypted(transport: asyncio.BaseTransport) -> bool:
    """Whether `transport` encrypts its data, so that nothing may be written past it."""
    return transport.get_extra_info("sslcontext") is not None


class DirectSender:
    """Sends responses past a connection's transport; `sock` is a duplicate of its socket. At most `MAX_OPEN`
    exist at a time; further connections take the regular path."""

    MAX_OPEN: ClassVar = 1024
    open_count: ClassVar = 0

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self.sock = transport, duplicate_socket(transport)
        DirectSender.open_count += 1

    def __repr__(self) -> str:
        return f"<DirectSender fd={self.sock.fileno()}>"

    def send_now(self, head: bytes, span: Span) -> tuple[bytes, PartialReadError | None] | None:
        """Send a head and a file range, if the range is in memory and the connection's buffer has room for
        both.

        Returns None if nothing was sent. Otherwise returns the bytes that the kernel did not accept after
        all, which the caller has to send, and an error if the range could not be read to its end. Nothing may
        be queued on the transport, nor be in progress past it.
        """
        if not is_resident(span.fd, span.offset, span.length):
            return None
        try:
            if _room(self.sock) < len(head) + span.length:
                return None
            taken = self.sock.send(head, socket.MSG_MORE)
        except OSError:  # no room after all, or the client is gone: the regular path handles it
            return None
        return self._finish(head[taken:], span)

    def _finish(self, head: bytes, span: Span) -> tuple[bytes, PartialReadError | None]:
        """Send the range of a response whose head was sent except for `head`. Returns as `send_now` does."""
        sent = 0
        try:
            with suppress(BlockingIOError):
                while not head and sent < span.length:
                    count = os.sendfile(self.sock.fileno(), span.fd, span.offset + sent, span.length - sent)
                    if not count:
                        break
                    sent += count
            rest = os.pread(span.fd, span.length - sent, span.offset + sent) if sent < span.length else b""
        except ConnectionError:
            self._transport.abort()
            return b"", None
        except OSError as error:
            return head, PartialReadError(sent, error)
        if sent + len(rest) != span.length:
            return head, PartialReadError(sent, OSError("a data file ends before its extent does"))
        return head + rest, None

    def close(self) -> None:
        """Close the duplicate; the connection itself stays open."""
        DirectSender.open_count -= 1
        self.sock.close()


def _room(sock: socket.socket) -> int:
    """Return the free bytes of a connection's send buffer. Raises OSError."""
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) - _unacknowledged_bytes(sock)


def _unacknowledged_bytes(sock: socket.socket | TransportSocket) -> int:
    """Return the bytes in a connection's send buffer, which the client has not acknowledged. Raises
    OSError."""
    return int(struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0])


def unsent_bytes_of(transport: asyncio.Transport) -> int:
    """Return the bytes that wait for the client, in this process and in the kernel; 0 while none wait in this
    process. The kernel may hold megabytes, and accepts no more until a third of them is gone."""
    unsent, sock = transport.get_write_buffer_size(), transport.get_extra_info("socket")
    if not unsent or sock is None:
        return unsent
    with suppress(OSError, ValueError):  # it is being closed
        unsent += _unacknowledged_bytes(sock)
    return unsent


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
