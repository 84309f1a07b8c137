"""Keep-alive HTTP/1.1 connections over blocking sockets, plain or TLS, and their pool.

Law: this module moves bytes and knows no S3, signing or retry. Kernel timeouts keep plain sockets
blocking, so a body of megabytes is one system call (MSG_WAITALL) into the caller's buffer. Certificates
are always verified.
Invariant: every failure is a ConnectError and leaves the connection closed; a failure no retry can cure
(unknown authority, wrong host name, no TLS) is a ConfigurationError.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from meshsdk.errors import ConfigurationError, ConnectError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from meshsdk.client.settings import Endpoint


_EXPIRED: Final = 10  # X509_V_ERR_CERT_HAS_EXPIRED
_RENEW: Final = (
    "It ran out at the node: put a new pair where its --tls-cert and --tls-key point; no restart is needed. "
    "Other nodes answer meanwhile"
)
_BELIEVE: Final = (
    "Give the certificate of the authority that made it with --ca-cert or MESH_CA_BUNDLE, or use the name it "
    "was made for"
)
# `ssl` is imported where it is needed: a plain endpoint does not pay for it.


def wrap_tls(sock: socket.socket, endpoint: Endpoint) -> socket.socket:
    """`sock`, connected already, after the handshake. Raises ConfigurationError, OSError."""
    import ssl

    try:
        wrapped: socket.socket = _context(endpoint.ca_bundle).wrap_socket(sock, server_hostname=endpoint.host)
    except ssl.SSLCertVerificationError as error:
        why = error.verify_message.rstrip(".")
        advice = _RENEW if error.verify_code == _EXPIRED else _BELIEVE
        raise ConfigurationError(f"{endpoint}: its certificate is not believed: {why}. {advice}") from error
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
            raise ConfigurationError(f"{endpoint} does not speak TLS: is it http:// there?") from None
        raise
    return wrapped


def is_incomplete_record(error: OSError) -> bool:
    """Whether a non-blocking read found nothing of the application's."""
    import ssl

    return isinstance(error, ssl.SSLWantReadError)


@cache
def _context(bundle: str) -> Any:
    """One a process and bundle: reading the authorities takes milliseconds."""
    import ssl

    try:
        return ssl.create_default_context(cafile=bundle or None)
    except FileNotFoundError as error:
        raise ConfigurationError(f"the CA bundle {bundle} is not there") from error
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"the CA bundle {bundle} cannot be used: {error}") from error


Buffer = bytes | bytearray | memoryview
MAX_HEAD = 64 * 1024
_READ_AHEAD = 16 * 1024
_WANTED_RCVBUF = 4 << 20


@cache
def _receive_buffer() -> int:
    """Bytes to ask for as SO_RCVBUF; 0 where the kernel's own growth reaches further than it lets us ask.

    Asking switches the kernel's automatic growth off, so it must not make the window smaller.
    """
    try:
        with open("/proc/sys/net/core/rmem_max") as file:
            allowed = int(file.read())
        with open("/proc/sys/net/ipv4/tcp_rmem") as file:
            grown = int(file.read().split()[2])
    except (OSError, ValueError, IndexError):
        return 0
    wanted = min(_WANTED_RCVBUF, allowed)
    return wanted if wanted >= min(grown, _WANTED_RCVBUF) else 0


def _connected(host: str, port: int, timeout: float) -> socket.socket:
    """Over loopback nothing is lost, and the pacing of a congestion control (BBR's) costs more than all the
    copying; a connection that began with it keeps it. Raises OSError."""
    if not (host == "::1" or host.removeprefix("::ffff:").startswith("127.")):
        return socket.create_connection((host, port), timeout=timeout)
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(OSError, AttributeError):  # AttributeError: not on this system
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        sock.settimeout(timeout)
        sock.connect((host, port))
    except BaseException:
        sock.close()
        raise
    return sock


class Connection:
    """A connected socket and what was read of it beyond the last head.

    `send` a request, then `receive` its response and read the body to its end before the next `send`. Not
    thread-safe, except that any thread may `abort` it to wake a blocked reader.
    """

    def __init__(self, endpoint: Endpoint, timeout: float, connect_timeout: float = 5.0) -> None:
        """Connects; raises ConnectError."""
        self.endpoint = endpoint
        self._cut = False
        self._pid = os.getpid()
        self._tls = endpoint.scheme == "https"
        self._timeout = timeout
        self._flags = 0 if self._tls else socket.MSG_WAITALL
        self._ahead = bytearray(_READ_AHEAD)
        self._start = self._end = 0
        try:
            self._socket = self._open(timeout, min(timeout, connect_timeout))
        except OSError as error:
            raise ConnectError(
                f"cannot reach {endpoint}: {error.strerror or error}. "
                "Is the server up, and MESH_ENDPOINT right?"
            ) from error

    def _open(self, timeout: float, connect_timeout: float) -> socket.socket:
        sock = _connected(self.endpoint.host, self.endpoint.port, connect_timeout)
        try:
            sock.settimeout(timeout)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if size := _receive_buffer():
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
            if self._tls:
                return wrap_tls(sock, self.endpoint)
            sock.settimeout(None)
            limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        except BaseException:
            sock.close()
            raise
        return sock

    def fileno(self) -> int:
        """The descriptor, for polling: readable once the response has begun (or the server hung up), and over
        TLS now and then for no reason: ask `began` then."""
        return self._socket.fileno()

    def began(self) -> bool:
        """Whether a readable connection has something to `receive`: what TLS says on its own account is
        taken in and does not count."""
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
        """Whether there is something to `receive` within so many seconds."""
        poll, until = select.poll(), time.monotonic() + seconds
        poll.register(self._socket, select.POLLIN)
        while self._start == self._end:
            if not poll.poll(max(until - time.monotonic(), 0.0) * 1000):
                return False
            if self.began():
                break
        return True

    def send(self, pieces: Iterable[Buffer]) -> None:
        """Sends one whole request; raises ConnectError.

        A server that refuses early answers and hangs up while the body is still on its way: then the
        answer counts.
        """
        try:
            for piece in pieces:
                self._socket.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            self._cut = True
        except OSError as error:
            raise self._broken("while sending", error) from error

    def receive(self, *, bodiless: bool = False) -> Response:
        """The head of the next response; `bodiless` for the answer to a HEAD. Raises ConnectError."""
        while True:
            status, headers = parse_head(self._read_head())
            if status >= 200:
                return Response(self, status, headers, bodiless=bodiless, last=self._cut)

    def _read_head(self) -> bytes:
        head = bytearray()
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
            if self._end - self._start >= _READ_AHEAD:
                raise self._broken("a response head beyond 16 KiB")

    def _slide(self) -> int:
        """Makes room, reads on, and looks again for the end of the head."""
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
            raise self._broken("no byte arrived within the timeout") from error
        except OSError as error:
            raise self._broken("while receiving", error) from error
        if count == 0:
            raise self._broken("the server hung up")
        return count

    def read_exact(self, view: memoryview) -> None:
        """Fills `view`: what was read ahead is copied (at most 16 KiB), the rest goes from the socket into
        it.
        """
        filled = min(len(view), self._end - self._start)
        view[:filled] = memoryview(self._ahead)[self._start : self._start + filled]
        self._start += filled
        while filled < len(view):
            filled += self._recv(view[filled:], self._flags)

    def read_line(self) -> bytes:
        """One line of chunked framing, without its end."""
        line = bytearray()
        while not line.endswith(b"\r\n"):
            if self._start == self._end:
                self._refill()
            stop = self._ahead.find(b"\n", self._start, self._end)
            stop = self._end if stop < 0 else stop + 1
            line += self._ahead[self._start : stop]
            self._start = stop
            if len(line) > MAX_HEAD:
                raise self._broken("a line without end")
        return bytes(line[:-2])

    def read_rest(self) -> Iterator[bytes]:
        """The body of a response that ends with the connection."""
        while True:
            if self._start == self._end:
                try:
                    self._refill()
                except ConnectError as error:
                    if error.__cause__ is not None:
                        raise
                    return
            piece = bytes(self._ahead[self._start : self._end])
            self._start = self._end
            yield piece

    def idle(self) -> bool:
        """Whether it can carry another request: open, and nothing has arrived that nobody asked for."""
        if self._socket.fileno() < 0 or self._start != self._end or self._pid != os.getpid():
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0) or (self._tls and not self.began())

    def abort(self) -> None:
        """Wakes whoever blocks on it, with a ConnectError. For use from another thread."""
        if self._pid == os.getpid():  # a forked child must not hang up on its parent's behalf
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def _broken(self, what: str, cause: BaseException | None = None) -> ConnectError:
        self.close()
        reason = f" ({cause.strerror or cause})" if isinstance(cause, OSError) else ""
        return ConnectError(f"{self.endpoint}: {what}{reason}")

    def __repr__(self) -> str:
        state = "closed" if self._socket.fileno() < 0 else "open"
        return f"Connection({self.endpoint}, {state})"


class Response:
    """The head of a response and the way to its body. `headers` have lower-case names; `length` in bytes, or
    None when only the framing tells.
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
        self.length = 0 if bodiless or status in (204, 304) else self._declared()
        self.done = self.length == 0
        self._taken = 0
        self._closing = last or headers.get("connection", "").lower() == "close"
        if bodiless:
            self._chunked = False

    def _declared(self) -> int | None:
        text = self.headers.get("content-length")
        if self._chunked or text is None:
            return None
        if not (text.isascii() and text.isdigit()):
            raise self._connection._broken(f"a content-length of {text[:40]!r}")
        return int(text)

    @property
    def reusable(self) -> bool:
        """Whether the connection may carry another request: the body was read to its end."""
        return self.done and not self._closing

    def readinto(self, view: memoryview) -> None:
        """The whole body, of exactly `len(view)` = `length` bytes, into `view`; raises ConnectError."""
        self._connection.read_exact(view)
        self.done = True

    def fill(self, view: memoryview) -> None:
        """The next `len(view)` bytes of a body of a known length; raises ConnectError."""
        self._connection.read_exact(view)
        self._taken += len(view)
        self.done = self._taken == self.length

    def read(self, limit: int = 256 << 20) -> bytes:
        """The whole body; refuses (ConnectError) more than `limit` bytes."""
        if self.length is not None and self.length <= limit:
            body = bytearray(self.length)
            self.readinto(memoryview(body))
            return bytes(body)
        body = bytearray()
        for piece in self.pieces():
            body += piece
            if len(body) > limit:
                raise self._connection._broken(f"a body beyond {limit} bytes")
        return bytes(body)

    def pieces(self, size: int = 1 << 20) -> Iterator[Buffer]:
        """The body in pieces of at most `size` bytes; each is valid until the next is asked for."""
        if self._chunked:
            yield from self._chunks(size)
        elif self.length is None:
            self._closing = True
            yield from self._connection.read_rest()
        else:
            yield from self._sized(self.length, size)
        self.done = True

    def _sized(self, length: int, size: int) -> Iterator[Buffer]:
        buffer = memoryview(bytearray(min(size, length)))
        while length:
            piece = buffer[: min(size, length)]
            self._connection.read_exact(piece)
            length -= len(piece)
            yield piece

    def _chunks(self, size: int) -> Iterator[Buffer]:
        """Chunked framing (RFC 9112 §7.1); trailers are read and dropped."""
        while length := self._chunk_size():
            yield from self._sized(length, size)
            self._connection.read_line()
        while self._connection.read_line():
            pass

    def _chunk_size(self) -> int:
        line = self._connection.read_line().partition(b";")[0].strip()
        try:
            return int(line, 16)
        except ValueError as error:
            raise self._connection._broken(f"a chunk size of {line[:40]!r}") from error


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    """(status, headers) of a response head; raises ConnectError when it is none."""
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ", 2)
    if not words[0].startswith("HTTP/1.") or len(words) < 2 or not words[1].isdigit():
        raise ConnectError(f"not an HTTP answer: {lines[0][:80]!r}. Is the endpoint's scheme and port right?")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if colon:
            name, value = name.lower(), value.strip()
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
    if words[0] == "HTTP/1.0":
        headers.setdefault("connection", "close")  # its default (RFC 9112 §9.3)
    return int(words[1]), headers


def _close_all(idle: deque[Connection]) -> None:
    with contextlib.suppress(IndexError):
        while True:
            idle.pop().close()


class Pool:
    """Idle connections of one endpoint, newest first. Thread-safe; a forked child starts with none."""

    def __init__(self, endpoint: Endpoint, timeout: float, max_idle: int = 16) -> None:
        self.endpoint = endpoint
        self.timeout = timeout
        self._idle: deque[Connection] = deque(maxlen=None)
        self._max_idle = max_idle
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _close_all, self._idle)

    def acquire(self) -> Connection:
        """An idle connection, or a new one; raises ConnectError."""
        if self._pid != os.getpid():
            self.clear()
            self._pid = os.getpid()
        with contextlib.suppress(IndexError):
            while True:
                connection = self._idle.pop()
                if connection.idle():
                    return connection
                connection.close()
        return self.dial()

    def dial(self, timeout: float | None = None) -> Connection:
        """A new connection, which the caller owns; with a `timeout` of its own (seconds) if that is given."""
        return Connection(self.endpoint, self.timeout if timeout is None else timeout)

    def release(self, connection: Connection) -> None:
        """Gives a connection back, its last response read to the end."""
        if len(self._idle) < self._max_idle and self._pid == os.getpid():
            self._idle.append(connection)
        else:
            connection.close()

    def clear(self) -> None:
        """Closes what is idle."""
        _close_all(self._idle)

    def __repr__(self) -> str:
        return f"Pool({self.endpoint}, {len(self._idle)} idle)"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.endpoint, self.timeout, self._max_idle)
