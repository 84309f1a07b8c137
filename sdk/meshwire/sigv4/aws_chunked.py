"""Decoder of the `aws-chunked` body encoding, signed and unsigned, without I/O.

Law: bytes in, payload out as it arrives; memory is bounded by one line.
Invariant: a signed chunk is verified at its end, so commit nothing before `finish` has returned.
https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-streaming.html
"""

from __future__ import annotations

import hashlib
import re
from hmac import compare_digest
from typing import TYPE_CHECKING

from meshwire.errors import S3Error
from meshwire.sigv4.signer import chunk_signature, trailer_signature

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from meshwire.sigv4.verifier import Verified

    _Step = Callable[[bytes, int, list[bytes]], int]

MAX_LINE = 8192
MAX_TRAILERS = 16
_MAX_SURPLUS = 2  # minio-go sends one extra CRLF after a body with trailers; S3 accepts it

_HEADER = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[ \t]*(.*))?\Z", re.DOTALL)
_SIGNATURE = re.compile(rb"chunk-signature=([0-9a-f]{64})[ \t]*\Z")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\x20-\x7e]*")
_TRAILER_SIGNATURE = "x-amz-trailer-signature"


class ChunkedDecoder:
    """Decodes one body. Its states: a chunk's header line, its data, the line end after it, trailers, done.

    `payload_hash` names the variant (one of `sigv4.STREAMING_PAYLOADS`); `verified` is required for the
    signed ones; `trailer_names` are the headers announced by x-amz-trailer; `decoded_length` in bytes is
    checked if given.
    """

    def __init__(
        self,
        payload_hash: str,
        verified: Verified | None,
        trailer_names: Collection[str] = (),
        decoded_length: int | None = None,
    ) -> None:
        self._signed = payload_hash.startswith("STREAMING-AWS4-HMAC-SHA256-PAYLOAD")
        self._with_trailer = payload_hash.endswith("-TRAILER")
        if not self._signed and payload_hash != "STREAMING-UNSIGNED-PAYLOAD-TRAILER":
            raise S3Error(
                "InvalidArgument", "x-amz-content-sha256 does not name a known aws-chunked variant."
            )
        if self._signed and verified is None:
            raise S3Error("AccessDenied", "A signed aws-chunked body requires a signed request.")
        if trailer_names and not self._with_trailer:
            raise S3Error(
                "InvalidRequest", "x-amz-trailer requires an x-amz-content-sha256 that ends in -TRAILER."
            )
        self._chain = _Chain(verified) if self._signed and verified is not None else None
        self._expected = frozenset(name.lower() for name in trailer_names)
        self._decoded_length = decoded_length
        self._line = bytearray()
        self._step: _Step = self._read_header
        self._remaining = 0
        self._size = 0
        self._trailers: dict[str, str] = {}
        self._signature_seen = False
        self._surplus = 0

    def __repr__(self) -> str:
        return f"ChunkedDecoder({self._step.__name__.removeprefix('_')}, {self._size} bytes decoded)"

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payload pieces in `data`, in order. Raises S3Error, after which the decoder cannot be
        used."""
        pieces: list[bytes] = []
        position = 0
        while position < len(data):
            position = self._step(data, position, pieces)
        return pieces

    def finish(self) -> Mapping[str, str]:
        """Return the trailers by lower-case name once the body has ended. Raises S3Error IncompleteBody."""
        if self._step != self._read_nothing:
            raise S3Error("IncompleteBody", "The aws-chunked body ended before its last chunk and trailers.")
        return self._trailers

    # Each step consumes at least one byte of `data` from `position` and returns the position after it.

    def _read_line(self, data: bytes, position: int) -> tuple[int, bytes | None]:
        """Return (new position, line without its end), or None for an incomplete line. A bare LF also ends
        a line: the trailers in S3's documentation use it."""
        limit = position + MAX_LINE + 2 - len(self._line)
        end = data.find(b"\n", position, limit)
        if end < 0:
            if len(data) >= limit:
                raise S3Error("InvalidRequest", f"A line of the aws-chunked body exceeds {MAX_LINE} bytes.")
            self._line += data[position:]
            return len(data), None
        line = data[position:end]
        if self._line:
            line = bytes(self._line) + line
            self._line.clear()
        return end + 1, line.removesuffix(b"\r")

    def _read_header(self, data: bytes, position: int, pieces: list[bytes]) -> int:
        position, line = self._read_line(data, position)
        if line is None:
            return position
        match = _HEADER.match(line)
        if match is None:
            raise S3Error("InvalidRequest", "A chunk of the aws-chunked body has no hexadecimal size.")
        self._remaining = int(match[1], 16)
        self._check_size()
        if self._chain is not None:
            self._chain.begin(match[2] or b"")
        self._step = self._read_data if self._remaining else self._last_chunk()
        return position

    def _check_size(self) -> None:
        if self._decoded_length is None:
            return
        total = self._size + self._remaining
        if total > self._decoded_length or (self._remaining == 0 and total != self._decoded_length):
            raise S3Error(
                "IncompleteBody",
                "The aws-chunked body does not have the number of bytes given in "
                "x-amz-decoded-content-length.",
            )

    def _read_data(self, data: bytes, position: int, pieces: list[bytes]) -> int:
        piece = data[position : position + self._remaining]
        if self._chain is not None:
            self._chain.update(piece)
        pieces.append(piece)
        self._size += len(piece)
        self._remaining -= len(piece)
        if not self._remaining:
            if self._chain is not None:
                self._chain.end()
            self._step = self._read_data_end
        return position + len(piece)

    def _read_data_end(self, data: bytes, position: int, pieces: list[bytes]) -> int:
        position, line = self._read_line(data, position)
        if line is not None:
            if line:
                raise S3Error("InvalidRequest", "A chunk of the aws-chunked body is longer than its size.")
            self._step = self._read_header
        return position

    def _last_chunk(self) -> _Step:
        if self._chain is not None:
            self._chain.end()
        return self._read_trailer

    def _read_trailer(self, data: bytes, position: int, pieces: list[bytes]) -> int:
        position, line = self._read_line(data, position)
        if line is None:
            return position
        if line:
            self._add_trailer(line)
        elif not self._awaits_signature():
            self._end()
        return position

    def _awaits_signature(self) -> bool:
        """Whether a signature follows: some clients send an empty line between the trailers and their
        signature, as S3's documentation shows."""
        return self._signed and self._with_trailer and bool(self._trailers) and not self._signature_seen

    def _add_trailer(self, line: bytes) -> None:
        # Split and stripped rather than matched as a whole: a single regular expression takes hours on
        # hostile lines.
        name, colon, value = line.decode("latin-1").partition(":")
        name, value = name.rstrip(" \t").lower(), value.strip(" \t")
        if (
            not colon
            or _NAME.fullmatch(name) is None
            or _VALUE.fullmatch(value) is None
            or self._signature_seen
            or name in self._trailers
            or len(self._trailers) >= MAX_TRAILERS
        ):
            raise S3Error("MalformedTrailerError")
        if name == _TRAILER_SIGNATURE and self._chain is not None and self._with_trailer:
            self._chain.check_trailers(self._trailers, value)
            self._signature_seen = True
        elif name not in self._expected:
            raise S3Error(
                "MalformedTrailerError", f"The trailer {name[:64]} was not announced by x-amz-trailer."
            )
        else:
            self._trailers[name] = value

    def _end(self) -> None:
        missing = self._expected - self._trailers.keys()
        if missing:
            raise S3Error("MalformedTrailerError", f"The announced trailer {min(missing)} is missing.")
        if self._signed and self._with_trailer and not self._signature_seen:
            raise S3Error("SignatureDoesNotMatch", "The trailers of the aws-chunked body are not signed.")
        self._step = self._read_nothing

    def _read_nothing(self, data: bytes, position: int, pieces: list[bytes]) -> int:
        rest = data[position:]
        self._surplus += len(rest)
        if self._surplus > _MAX_SURPLUS or rest.strip(b"\r\n"):
            raise S3Error("InvalidRequest", "The aws-chunked body continues after its end.")
        return len(data)


class _Chain:
    """The signatures of a signed body, each chained to the previous one."""

    __slots__ = ("_declared", "_hash", "_previous", "_verified")

    def __init__(self, verified: Verified) -> None:
        self._verified = verified
        self._previous = verified.seed_signature
        self._declared = ""
        self._hash = hashlib.sha256()

    def begin(self, extension: bytes) -> None:
        match = _SIGNATURE.match(extension)
        if match is None:
            raise S3Error(
                "SignatureDoesNotMatch", "A chunk of the signed aws-chunked body has no chunk-signature."
            )
        self._declared = match[1].decode()
        self._hash = hashlib.sha256()

    def update(self, data: bytes) -> None:
        self._hash.update(data)

    def end(self) -> None:
        v = self._verified
        computed = chunk_signature(
            v.signing_key, v.timestamp, v.scope, self._previous, self._hash.hexdigest()
        )
        self._compare(computed, self._declared, "A chunk of the aws-chunked body does")

    def check_trailers(self, trailers: Mapping[str, str], declared: str) -> None:
        v = self._verified
        text = "".join(f"{name}:{value}\n" for name, value in sorted(trailers.items()))
        digest = hashlib.sha256(text.encode()).hexdigest()
        computed = trailer_signature(v.signing_key, v.timestamp, v.scope, self._previous, digest)
        self._compare(computed, declared, "The trailers of the aws-chunked body do")

    def _compare(self, computed: str, declared: str, what: str) -> None:
        if not compare_digest(computed.encode(), declared.encode()):
            raise S3Error("SignatureDoesNotMatch", f"{what} not match the signature you provided.")
        self._previous = computed
