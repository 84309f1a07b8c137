"""Typed calls between nodes: one declaration per call, shared by its caller and its handler, and the framing.

A `PeerCall` alone defines a call on the wire: method, path, messages, limits, timeout and connection pool.
`PeerClient.call_typed` sends it, a method with `@handler(CALL)` answers it, and the server mounts the
registered handlers. Nodes of two releases talk to each other while a cluster is upgraded, so a message may
gain fields with defaults, and must never change otherwise.

A body is a sequence of pieces, each preceded by its length and crc32c (u32 each, big-endian); length 0 marks
the end. So a truncated or corrupted body never looks complete. This module does no I/O.
"""

from __future__ import annotations

import struct
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Protocol, TypeVar, cast
from urllib.parse import parse_qsl, quote_plus, urlencode

import msgspec
from awscrt import checksums

from meshd.errors import MeshdError
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

Message = TypeVar("Message")
Request = TypeVar("Request")
Response = TypeVar("Response")
OtherResponse = TypeVar("OtherResponse")
Service = TypeVar("Service")
Result = TypeVar("Result")
ErrorFormat = Literal["s3", "batch"]
"""Whether a handler's errors are answered with the codes of S3 or of the batch API."""
PREFIX: Final = "/-/peer/"
SILENCE_TIMEOUT: Final = 30.0
"""Seconds of silence after which a caller gives up."""
_HEADER: Final = struct.Struct("!II")
MAX_PIECE_BYTES: Final = 4 << 20
END_MARKER: Final = _HEADER.pack(0, 0)
_encode: Final = msgspec.msgpack.Encoder().encode
_CALL_ATTRIBUTE: Final = "__peer_call__"


class BodyFramingError(MeshdError):
    """A body from another node was truncated, or does not match its checksums."""


class NotHereError(MeshdError):
    """This node does not store the requested data (409 NotHere); another node may."""


class MalformedResponseError(BodyFramingError):
    """A node's response is not of the declared type. As after a truncated body, it is unknown what the node
    did, so callers handle both alike."""


class ResponseStream:
    """The response type of a call that answers with a body of any length; its caller gets a
    `PeerResponse`."""


class RequestTarget(Protocol):
    """Encodes a request into the target of a call, whose body then carries data."""

    def encode_request(self, request: Any) -> str:
        """Return what follows the path of the call, percent-encoded."""
        ...

    def decode_request(self, suffix: str, kind: type[Message]) -> Message:
        """Decode a request. Raises ValueError, msgspec.MsgspecError."""
        ...


class QueryTarget(msgspec.Struct, frozen=True):
    """Encodes the fields of a Struct as a query string. Fields that are missing there get their defaults."""

    quote_via: Callable[..., str] = quote_plus

    def encode_request(self, request: msgspec.Struct) -> str:
        return "?" + urlencode(msgspec.to_builtins(request), quote_via=self.quote_via)

    def decode_request(self, suffix: str, kind: type[Message]) -> Message:
        fields = dict(parse_qsl(suffix.partition("?")[2], keep_blank_values=True))
        return msgspec.convert(fields, type=kind, strict=False)


IN_QUERY: Final = QueryTarget()


@dataclass(frozen=True, eq=False)
class PeerCall(Generic[Request, Response]):
    """One call between nodes.

    A message of type `bytes` is sent unchanged, None as an empty body, any other type as msgpack. With a
    `target`, the request is sent in the URL, and the body carries data, which the handler reads from its
    `CallContext`.
    """

    path: str
    """Begins with `/-/peer/`. A path that ends in `/` covers everything below."""
    request: type[Request]
    response: type[Response]
    method: str = "POST"
    target: RequestTarget | None = None
    max_bytes: int | None = 64 << 10
    """Limit of the request's body; None: a body of any length."""
    timeout: float = SILENCE_TIMEOUT
    """Seconds of silence after which the caller gives up."""
    pool: str = ""
    """Name of the connection pool; calls of one pool share their connections with each other only."""
    map_wait: float = 0.0
    """Seconds for which a node whose cluster map is older than the caller's waits for a newer one."""
    errors: ErrorFormat = "s3"
    malformed_code: str = ""
    """Error code (with status 400) for a request that cannot be decoded. Default: BadRequest of the batch
    API, InvalidArgument of S3."""
    _decode_request: Callable[[bytes], Any] = field(init=False, repr=False)
    _decode_response: Callable[[bytes], Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.path.startswith(PREFIX):
            raise ValueError(f"{self.path} is not under {PREFIX}")
        decode_request = _decoder(self.request) if self.target is None else bytes
        object.__setattr__(self, "_decode_request", decode_request)
        object.__setattr__(self, "_decode_response", _decoder(self.response))

    def returning(self, response: type[OtherResponse]) -> PeerCall[Request, OtherResponse]:
        """Return the same call with another response type. For calls whose response type depends on the
        request."""
        return cast("PeerCall[Request, OtherResponse]", replace(self, response=cast("Any", response)))

    def encode_request(self, request: Request) -> tuple[str, bytes]:
        """Return the target and the body of a request."""
        if self.target is not None:
            return self.path + self.target.encode_request(request), b""
        return self.path, encode_message(request)

    def decode_request(self, target: str, body: bytes) -> Request:
        """Decode a request. Raises S3Error with the call's `malformed_code`."""
        try:
            if self.target is not None:
                return self.target.decode_request(target.removeprefix(self.path), self.request)
            return cast("Request", self._decode_request(body))
        except (msgspec.MsgspecError, ValueError) as error:
            code = self.malformed_code or ("BadRequest" if self.errors == "batch" else "InvalidArgument")
            raise malformed_message(error, code) from error

    def decode_response(self, body: bytes) -> Response:
        """Decode a response. Raises MalformedResponseError."""
        try:
            return cast("Response", self._decode_response(body))
        except (msgspec.MsgspecError, ValueError) as error:
            raise MalformedResponseError(f"malformed peer message from {self.path}: {error}") from error


def encode_message(message: object) -> bytes:
    """Encode a message as a body."""
    if message is None:
        return b""
    return message if isinstance(message, bytes) else _encode(message)


async def body_with_message(
    pieces: AsyncGenerator[bytes, None], message: bytes
) -> AsyncGenerator[bytes, None]:
    """Yield the pieces of a body, then the encoded message that follows them."""
    async with aclosing(pieces):
        async for piece in pieces:
            yield piece
    yield message


def decode_message(body: bytes, decode: Callable[[bytes], Message]) -> Message:
    """Decode the message that follows data in a body. Raises S3Error InvalidArgument."""
    try:
        return decode(body)
    except (msgspec.MsgspecError, ValueError) as error:
        raise malformed_message(error) from error


def malformed_message(error: Exception, code: str = "InvalidArgument") -> S3Error:
    """Return the error for a message that cannot be decoded."""
    return S3Error(code, f"malformed peer message: {str(error)[:200]}")


def _decoder(kind: type[Message]) -> Callable[[bytes], Any]:
    if kind is bytes or kind is ResponseStream:
        return bytes
    if kind is type(None):
        return lambda body: None
    return msgspec.msgpack.Decoder(kind).decode


# --- the framing of bodies ---------------------------------------------------------------------------------


def piece_header(piece: bytes | bytearray | memoryview) -> bytes:
    """Return the header of a piece (1 to MAX_PIECE_BYTES bytes); the piece follows it."""
    return _HEADER.pack(len(piece), checksums.crc32c(piece))


def frame_body(body: bytes) -> bytes:
    """Return a whole body, framed."""
    parts = []
    for start in range(0, len(body), MAX_PIECE_BYTES):
        piece = body[start : start + MAX_PIECE_BYTES]
        parts += [piece_header(piece), piece]
    return b"".join([*parts, END_MARKER])


class FrameDecoder:
    """Decodes bytes as they arrive into complete pieces; `done` after the end marker."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._length = self._crc = 0
        self.done = False

    def __repr__(self) -> str:
        return f"<FrameDecoder {len(self._held)} bytes held{', done' if self.done else ''}>"

    def feed(self, data: bytes) -> list[bytes]:
        """Return the pieces that are complete now. Raises BodyFramingError."""
        self._held += data
        found: list[bytes] = []
        while True:
            if not self._length:
                if len(self._held) < _HEADER.size:
                    return found
                self._begin_piece()
                if self.done:
                    return found
            if len(self._held) < self._length:
                return found
            found.append(self._take_piece())

    def finish(self) -> None:
        """Raise BodyFramingError unless the end marker has arrived."""
        if not self.done:
            raise BodyFramingError("a body between nodes was cut")

    def _begin_piece(self) -> None:
        if self.done:
            raise BodyFramingError("a body between nodes continues after its end marker")
        self._length, self._crc = _HEADER.unpack_from(self._held)
        del self._held[: _HEADER.size]
        if not self._length:
            self.done = True
            if self._held or self._crc:
                raise BodyFramingError("a body between nodes continues after its end marker")
        if self._length > MAX_PIECE_BYTES:
            raise BodyFramingError(
                f"a piece of a body between nodes has {self._length} bytes; the limit is {MAX_PIECE_BYTES}"
            )

    def _take_piece(self) -> bytes:
        with memoryview(self._held) as view:
            piece = bytes(view[: self._length])
        del self._held[: self._length]
        if checksums.crc32c(piece) != self._crc:
            raise BodyFramingError("a piece of a body between nodes does not match its checksum")
        self._length = 0
        return piece


# --- the answering side -----------------------------------------------------------------------------------


class CallContext(msgspec.Struct, frozen=True):
    """The caller's node and cluster map version, and the body of a call whose request is in the target."""

    node_id: str
    map_version: int
    iter_body: Callable[[], AsyncIterator[bytes]]
    """The body, piece by piece, verified. Raises S3Error BadDigest, IncompleteBody, RequestTimeout."""
    read_body: Callable[[], Awaitable[bytes]]
    """The whole body, within the call's `max_bytes`. Raises as `iter_body` does, and S3Error
    EntityTooLarge."""


def handler(
    call: PeerCall[Request, Response],
) -> Callable[
    [Callable[[Service, Request, CallContext], Awaitable[Response]]],
    Callable[[Service, Request, CallContext], Awaitable[Response]],
]:
    """Register a method as the handler of a call: `async def method(self, request, context) -> response`.

    A handler may raise S3Error, StoreError, BatchError and NotHereError, which are answered in the call's
    error format, and StaleMapError (421) if its cluster map differs from the caller's.
    """
    return _register(call)


def stream_handler(
    call: PeerCall[Request, ResponseStream],
) -> Callable[
    [Callable[[Service, Request, CallContext], Result]], Callable[[Service, Request, CallContext], Result]
]:
    """Like `handler`, for a call whose response is a stream. The method is an async generator of its pieces,
    or a coroutine that returns a body which the server knows how to send (a frame, a stream of blobs)."""
    return _register(call)


def _register(call: PeerCall[Any, Any]) -> Callable[[Any], Any]:
    def register(method: Any) -> Any:
        setattr(method, _CALL_ATTRIBUTE, call)
        return method

    return register


class RegisteredHandler(msgspec.Struct, frozen=True):
    """A call and the bound method that handles it."""

    call: PeerCall[Any, Any]
    method: Callable[[Any, CallContext], Any]


def registered_handlers(service: object) -> list[RegisteredHandler]:
    """Return the handlers of a service, in the order of their definition."""
    return [
        RegisteredHandler(call, getattr(service, name))
        for name, method in vars(type(service)).items()
        if (call := getattr(method, _CALL_ATTRIBUTE, None)) is not None
    ]
