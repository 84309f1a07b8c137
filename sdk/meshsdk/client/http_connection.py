"""Keep-alive HTTP/1.1 connections over blocking sockets, plain or TLS.

Law: this module moves bytes and knows nothing of S3, signing or retries. A body of megabytes is one system
call (MSG_WAITALL) into the caller's buffer, except over TLS.
Invariant: every failure raises ConnectError and leaves the connection closed; a failure that no retry can
cure (unknown authority, wrong host name, no TLS) raises ConfigurationError.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import select
import socket
import time
from typing import TYPE_CHECKING, Any

from meshsdk.client.endpoint_socket import is_incomplete_record, open_socket
from meshsdk.errors import ConnectError
from meshwire.phrases import open_files_message

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from meshsdk.client.settings import Endpoint


Buffer = bytes | bytearray | memoryview
MAX_HEAD = 64 * 1024
_READ_AHEAD = 16 * 1024
_COPIED = 64 * 1024  # bytes: a smaller body is copied once more, which costs less than a stream
_SLOWEST = 1024  # bytes per second: a body that comes more slowly is given up
_TOO_SLOW = f"received less than {_SLOWEST} bytes per second"
_KEEPALIVE = 64  # bytes: what S3 stores send while they work on a request is a short blank chunk
_MAX_DIGITS = 18
_STATUS = re.compile(r"[0-9]{3}")
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,16}")
_SCHEME = " without an answer; if it speaks TLS, use https://"


class Connection:
    """A connected socket, with the bytes that were read ahead of the last response head.

    `send` a request, `receive` its response, and read the body to its end before the next `send`. Not
    thread-safe, except that any thread may `abort` it to wake a blocked reader.
    """

    def __init__(self, endpoint: Endpoint, timeout: float, connect_timeout: float) -> None:
        """Connect; timeouts are in seconds. Raises ConnectError, or ConfigurationError for TLS."""
        self.endpoint = endpoint
        self._cut = self._answered = False
        self._pid = os.getpid()
        self._tls = endpoint.scheme == "https"
        self._timeout = timeout
        self._flags = 0 if self._tls else socket.MSG_WAITALL
        self._ahead = bytearray(_READ_AHEAD)
        self._start = self._end = 0
        try:
            self._socket = open_socket(endpoint, timeout, min(timeout, connect_timeout))
        except OSError as error:
            if why := open_files_message(error):
                raise ConnectError(f"cannot connect to {endpoint}: {why}") from error
            raise ConnectError(
                f"cannot reach {endpoint}: {error.strerror or error}. "
                "Check that the server is up and MESH_ENDPOINT is right."
            ) from error

    def fileno(self) -> int:
        """Return the socket's descriptor, for polling.

        It is readable once the response has begun or the server has closed the connection. Over TLS it may
        also be readable for protocol messages alone, so check `began`.
        """
        return self._socket.fileno()

    def began(self) -> bool:
        """Return whether a readable connection has data to `receive`.

        Protocol messages of TLS itself are consumed and do not count.
        """
        if not self._tls or self._start != self._end:
            return True
        self._socket.settimeout(0)
        try:
            self._start, self._end = 0, self._socket.recv_into(self._ahead)
        except BlockingIOError:
            return False
        except OSError as error:
            return not is_incomplete_record(error)
        finally:
            self._socket.settimeout(self._timeout)
        return True

    def begins(self, seconds: float) -> bool:
        """Wait up to `seconds` for a response to begin; return whether it has."""
        poll, until = select.poll(), time.monotonic() + seconds
        poll.register(self._socket, select.POLLIN)
        while self._start == self._end:
            if not poll.poll(max(until - time.monotonic(), 0.0) * 1000):
                return False
            if self.began():
                break
        return True

    def send(self, pieces: Iterable[Buffer]) -> None:
        """Send one whole request. Raises ConnectError.

        A server may reject a request early: it answers and closes the connection while the body is still
        being sent. This is not an error here, because `receive` can still read that answer.
        """
        try:
            for piece in pieces:
                if len(piece):
                    self._socket.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            self._cut = True
        except OSError as error:
            raise self._close_with_error("while sending", error) from error

    def receive(self, *, bodiless: bool = False) -> Response:
        """Read the head of the next response; `bodiless` for the answer to a HEAD. Raises ConnectError."""
        until = math.inf
        while True:
            status, headers = parse_head(self._read_head(until))
            self._answered = True
            if status < 200:
                until = min(until, time.monotonic() + self._timeout)
            else:
                return Response(self, status, headers, bodiless=bodiless, last=self._cut)

    def _read_head(self, until: float) -> bytes:
        """Read a head: its end comes within the timeout after its first byte, and before `until`."""
        head = bytearray()
        if self._start == self._end:
            self._refill()
        until = min(until, time.monotonic() + self._timeout)
        while True:
            if self._start == self._end:
                self._refill()
            found = self._ahead.find(b"\r\n\r\n", self._start, self._end)
            if found < 0 and not head:
                found = self._slide()
            if found >= 0:
                head += self._ahead[self._start : found + 4]
                self._start = found + 4
                return bytes(head)
            if time.monotonic() > until:
                raise self._close_with_error("the response head came too slowly")
            if self._end - self._start >= _READ_AHEAD:
                raise self._close_with_error("the response head is larger than 16 KiB")

    def _slide(self) -> int:
        """Make room in the buffer, read more, and return where the head ends, or -1."""
        if self._start:
            self._ahead[: self._end - self._start] = self._ahead[self._start : self._end]
            self._end -= self._start
            self._start = 0
        if self._end < _READ_AHEAD:
            self._end += self._recv(memoryview(self._ahead)[self._end :], 0)
        return self._ahead.find(b"\r\n\r\n", 0, self._end)

    def _refill(self) -> None:
        self._start = 0
        self._end = self._recv(memoryview(self._ahead), 0)

    def _recv(self, view: memoryview, flags: int) -> int:
        try:
            count = self._socket.recv_into(view, 0, flags) if not self._tls else self._socket.recv_into(view)
        except (BlockingIOError, TimeoutError) as error:
            raise self._close_with_error("received nothing within the timeout") from error
        except OSError as error:
            raise self._close_with_error("while receiving", error) from error
        if count == 0:
            scheme = "" if self._answered or self._tls else _SCHEME
            raise self._close_with_error(f"the server closed the connection{scheme}")
        return count

    def read_exact(self, view: memoryview) -> None:
        """Fill `view`: copy what was read ahead (at most 16 KiB), then receive the rest directly into it.

        Raises ConnectError if a timeout passes with less than 1 KiB per second: a node that sends a byte now
        and then would never be silent.
        """
        filled = min(len(view), self._end - self._start)
        view[:filled] = memoryview(self._ahead)[self._start : self._start + filled]
        self._start += filled
        until, least = time.monotonic() + self._timeout, filled + _SLOWEST * self._timeout
        while filled < len(view):
            filled += self._recv(view[filled:], self._flags)
            if filled < len(view) and (now := time.monotonic()) >= until:
                if filled < least:
                    raise self._close_with_error(_TOO_SLOW)
                until, least = now + self._timeout, filled + _SLOWEST * self._timeout

    def read_line(self) -> bytes:
        """Read one line of chunked framing; the result is without CRLF."""
        line, until = bytearray(), time.monotonic() + self._timeout
        while not line.endswith(b"\r\n"):
            if line and time.monotonic() > until:
                raise self._close_with_error("a line of the chunked body came too slowly")
            if self._start == self._end:
                self._refill()
            stop = self._ahead.find(b"\n", self._start, self._end)
            stop = self._end if stop < 0 else stop + 1
            line += self._ahead[self._start : stop]
            self._start = stop
            if len(line) > MAX_HEAD:
                raise self._close_with_error(f"a line of the chunked body is longer than {MAX_HEAD} bytes")
        return bytes(line[:-2])

    def read_rest(self) -> Iterator[bytes]:
        """Yield the body of a response that ends when the server closes the connection."""
        pace = _Pace(self)
        while True:
            began = time.monotonic()
            if self._start == self._end:
                try:
                    self._refill()
                except ConnectError as error:
                    if error.__cause__ is not None:
                        raise
                    return
            piece = bytes(self._ahead[self._start : self._end])
            self._start = self._end
            pace.count(began, len(piece))
            yield piece

    def idle(self) -> bool:
        """Return whether the connection can carry another request: it is open and has no unread data."""
        if self._socket.fileno() < 0 or self._start != self._end or self._pid != os.getpid():
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0) or (self._tls and not self.began())

    def abort(self) -> None:
        """Wake a thread that blocks on this connection, with a ConnectError; for use from another thread."""
        if self._pid == os.getpid():  # a forked child must not shut down its parent's connection
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()

    def _close_with_error(self, what: str, cause: BaseException | None = None) -> ConnectError:
        self.close()
        reason = f" ({cause.strerror or cause})" if isinstance(cause, OSError) else ""
        return ConnectError(f"{self.endpoint}: {what}{reason}")

    def __repr__(self) -> str:
        state = "closed" if self._socket.fileno() < 0 else "open"
        return f"Connection({self.endpoint}, {state})"


class _Pace:
    """How fast a body of unknown size arrives. The time that its reader spends on it does not count."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._waited, self._size = connection, 0.0, 0

    def count(self, began: float, size: int) -> None:
        """Count `size` bytes, waited for since `began`. Raises ConnectError after a timeout of waiting with
        less than 1 KiB per second."""
        timeout = self._connection._timeout
        self._waited, self._size = self._waited + time.monotonic() - began, self._size + size
        if self._waited >= timeout:
            if self._size < _SLOWEST * timeout:
                raise self._connection._close_with_error(_TOO_SLOW)
            self._waited, self._size = 0.0, 0


class Response:
    """The head of a response, and access to its body.

    `headers` have lower-case names. `length` is the body's size in bytes, or None if only the framing
    (chunks, or the end of the connection) determines it.
    """

    def __init__(
        self,
        connection: Connection,
        status: int,
        headers: Mapping[str, str],
        *,
        bodiless: bool = False,
        last: bool = False,
    ) -> None:
        self.status = status
        self.headers = headers
        self._connection = connection
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        self.length = 0 if bodiless or status in (204, 304) else self._declared_length()
        self.done = self.length == 0
        self._taken = 0
        self._closing = last or headers.get("connection", "").lower() == "close"
        if bodiless:
            self._chunked = False

    def _declared_length(self) -> int | None:
        text = self.headers.get("content-length")
        if self._chunked or text is None:
            return None
        if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
            raise self._connection._close_with_error(
                f"the response has an invalid content-length: {text[:40]!r}"
            )
        return int(text)

    @property
    def reusable(self) -> bool:
        """Whether the connection may carry another request: the body was read to its end, and neither side
        closes the connection."""
        return self.done and not self._closing

    def readinto(self, view: memoryview) -> None:
        """Read the whole body into `view`, whose size must equal `length`. Raises ConnectError."""
        self._connection.read_exact(view)
        self.done = True

    def fill(self, view: memoryview) -> None:
        """Read the next `len(view)` bytes of a body of known length into `view`. Raises ConnectError."""
        self._connection.read_exact(view)
        self._taken += len(view)
        self.done = self._taken == self.length

    def read(self, limit: int = 256 << 20) -> bytes:
        """Read and return the whole body. Raises ConnectError if it is larger than `limit` bytes."""
        if self.length is not None and _COPIED <= self.length <= limit:
            return io.BufferedReader(_RawBody(self), 1).read(self.length)  # receives into what it returns
        if self.length is not None and self.length <= limit:
            body = bytearray(self.length)
            self.readinto(memoryview(body))
            return bytes(body)
        body = bytearray()
        for piece in self.pieces():
            body += piece
            if len(body) > limit:
                raise self._connection._close_with_error(f"the response body is larger than {limit} bytes")
        return bytes(body)

    def pieces(self, size: int = 1 << 20) -> Iterator[Buffer]:
        """Yield the body in pieces of at most `size` bytes; each is valid until the next one is requested."""
        if self._chunked:
            yield from self._chunks(size)
        elif self.length is None:
            self._closing = True
            yield from self._connection.read_rest()
        else:
            yield from self._read_sized(self.length, size)
        self.done = True

    def _read_sized(self, length: int, size: int) -> Iterator[Buffer]:
        buffer = memoryview(bytearray(min(size, length)))
        while length:
            piece = buffer[: min(size, length)]
            self._connection.read_exact(piece)
            length -= len(piece)
            yield piece

    def _chunks(self, size: int) -> Iterator[Buffer]:
        """Yield the body of a chunked response (RFC 9112 §7.1); trailers are read and discarded."""
        pace, began = _Pace(self._connection), time.monotonic()
        while length := self._chunk_size():
            for piece in self._read_sized(length, size):
                if len(piece) <= _KEEPALIVE and bytes(piece).isspace():
                    pace = _Pace(self._connection)
                pace.count(began, len(piece))
                yield piece
                began = time.monotonic()
            self._connection.read_line()
        while self._connection.read_line():
            pass

    def _chunk_size(self) -> int:
        line = self._connection.read_line().partition(b";")[0].strip()
        if not _CHUNK_SIZE.fullmatch(line):
            raise self._connection._close_with_error(f"the response has an invalid chunk size: {line[:40]!r}")
        return int(line, 16)


class _RawBody(io.RawIOBase):
    """The body of a response, of known length, as a raw stream."""

    def __init__(self, response: Response) -> None:
        self._response = response

    def readable(self) -> bool:
        return True

    def readinto(self, view: Any) -> int:
        self._response.fill(memoryview(view))
        return len(view)


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Parse a response head into (status, headers). Raises ConnectError if it is not HTTP/1.x."""
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ", 2)
    if not words[0].startswith("HTTP/1.") or len(words) < 2 or not _STATUS.fullmatch(words[1]):
        raise ConnectError(f"not an HTTP response: {lines[0][:80]!r}. Check the endpoint's scheme and port.")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if colon:
            name, value = name.lower(), value.strip()
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
    if words[0] == "HTTP/1.0":
        headers.setdefault("connection", "close")  # the default of HTTP/1.0 (RFC 9112 §9.3)
    return int(words[1]), headers
