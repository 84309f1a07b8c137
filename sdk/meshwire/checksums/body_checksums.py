"""Checksums of object bodies: S3's ten algorithms, combining the checksums of parts, and the verifier of an
upload.

Law: pure functions of the bytes passed in; only checksums of whole objects.
Invariant: values are base64 of the big-endian digest.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from hmac import compare_digest
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

from meshwire.checksums import crc
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Buffer = bytes | bytearray | memoryview

ALGORITHMS = (
    "crc32",
    "crc32c",
    "crc64nvme",
    "sha1",
    "sha256",
    "sha512",
    "md5",
    "xxhash64",
    "xxhash3",
    "xxhash128",
)
DEFAULT_ALGORITHM = "crc64nvme"
DIGEST_SIZES: Mapping[str, int] = MappingProxyType(
    {"crc32": 4, "crc32c": 4, "crc64nvme": 8, "sha1": 20, "sha256": 32, "sha512": 64, "md5": 16}
    | {"xxhash64": 8, "xxhash3": 8, "xxhash128": 16}
)

_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class BodyDigests:
    """Digests that the client declares for the body it sends.

    `content_md5` is base64; `checksums` maps algorithm (`crc32`, `crc32c`, `crc64nvme`, `sha1`, `sha256`)
    to base64; `trailer` names the algorithms whose values follow in the chunked trailer; `wanted` names
    those to compute and store because `x-amz-sdk-checksum-algorithm` lists them.
    """

    content_md5: str | None = None
    checksums: Mapping[str, str] = field(default_factory=dict)
    trailer: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()


class Hasher(Protocol):
    def update(self, data: Buffer, /) -> None: ...
    def digest(self) -> bytes: ...
    def base64(self) -> str: ...


class _Crc:
    __slots__ = ("_function", "_size", "_value")

    def __init__(self, function: Callable[[Buffer, int], int], size: int) -> None:
        self._function, self._size, self._value = function, size, 0

    def update(self, data: Buffer, /) -> None:
        self._value = self._function(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._size, "big")

    def base64(self) -> str:
        return _base64(self.digest())


_HASHES: Final = MappingProxyType(
    {"sha1": hashlib.sha1, "sha256": hashlib.sha256, "sha512": hashlib.sha512, "md5": hashlib.md5}
)


class _Hash:
    __slots__ = ("_hash",)

    def __init__(self, name: str) -> None:
        self._hash = _HASHES[name](usedforsecurity=False)

    def update(self, data: Buffer, /) -> None:
        self._hash.update(data)

    def digest(self) -> bytes:
        return self._hash.digest()

    def base64(self) -> str:
        return _base64(self.digest())


class _Xxh:
    __slots__ = ("_hash",)

    def __init__(self, maker: str) -> None:
        self._hash = getattr(crc.load_awscrt().XXHash, maker)()

    def update(self, data: Buffer, /) -> None:
        self._hash.update(data)

    def digest(self) -> bytes:
        return bytes(self._hash.finalize())

    def base64(self) -> str:
        return _base64(self.digest())


_CRCS: Mapping[str, Callable[[Buffer, int], int]] = MappingProxyType(
    {"crc32": crc.crc32, "crc32c": crc.crc32c, "crc64nvme": crc.crc64nvme}
)
# Looked up by name because awscrt before 0.38 lacks them; the SDK alone does not need them and works with
# it.
_XXHS = MappingProxyType(
    {"xxhash64": "new_xxhash64", "xxhash3": "new_xxhash3_64", "xxhash128": "new_xxhash3_128"}
)


def new_hasher(algorithm: str) -> Hasher:
    """Create an empty hasher; `algorithm` is one of ALGORITHMS."""
    crc = _CRCS.get(algorithm)
    if crc is not None:
        return _Crc(crc, DIGEST_SIZES[algorithm])
    xxh = _XXHS.get(algorithm)
    return _Hash(algorithm) if xxh is None else _Xxh(xxh)


def _base64(digest: bytes) -> str:
    return binascii.b2a_base64(digest, newline=False).decode()


def decode_checksum(algorithm: str, value: str) -> bytes | None:
    """Decode a base64 checksum; return None if it is not a valid digest of this algorithm (or of `md5`)."""
    try:
        digest = binascii.a2b_base64(value, strict_mode=True)
    except ValueError:  # also binascii.Error
        return None
    return digest if len(digest) == DIGEST_SIZES.get(algorithm, 16) else None


# --- checksums of multipart uploads ---------------------------------------------------------------


def composite_checksum(algorithm: str, parts: Iterable[str]) -> str:
    """Return the COMPOSITE checksum of parts (base64 each): the checksum of their digests, `-`, and their
    number."""
    hasher, count = new_hasher(algorithm), 0
    for part in parts:
        hasher.update(base64.b64decode(part))
        count += 1
    return f"{hasher.base64()}-{count}"


# Bit-reversed polynomials: crc(a ‖ b) = crc(a)·x^(8·len(b)) mod P ⊕ crc(b), as in zlib's crc32_combine.
_POLYNOMIALS = MappingProxyType({"crc32": 0xEDB88320, "crc32c": 0x82F63B78, "crc64nvme": 0x9A6C9329AC4BC9B5})


def combine_checksums(algorithm: str, parts: Iterable[tuple[str, int]]) -> str:
    """Return the FULL_OBJECT checksum of parts (base64, size in bytes) for crc32, crc32c or crc64nvme,
    without reading any bytes.

    Raises ValueError for all other algorithms, which cannot be combined.
    """
    if algorithm not in _POLYNOMIALS:
        raise ValueError(f"{algorithm} of a whole object cannot be computed from its parts; use COMPOSITE")
    width = DIGEST_SIZES[algorithm]
    value = 0
    for part, size in parts:
        shifted = _multiply(algorithm, _shift(algorithm, size), value) if value else 0
        value = shifted ^ int.from_bytes(base64.b64decode(part), "big")
    return _base64(value.to_bytes(width, "big"))


def _multiply(algorithm: str, a: int, b: int) -> int:
    """Return a·b mod P over GF(2), bit-reversed: the top bit is x⁰."""
    polynomial = _POLYNOMIALS[algorithm]
    bit = 1 << (DIGEST_SIZES[algorithm] * 8 - 1)
    product = 0
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ polynomial if b & 1 else b >> 1
    return product


@lru_cache(maxsize=256)
def _power(algorithm: str, k: int) -> int:
    """Return x^(2^k) mod P."""
    if k == 0:
        return 1 << (DIGEST_SIZES[algorithm] * 8 - 2)
    root = _power(algorithm, k - 1)
    return _multiply(algorithm, root, root)


@lru_cache(maxsize=4096)
def _shift(algorithm: str, size: int) -> int:
    """Return x^(8·size) mod P."""
    product = 1 << (DIGEST_SIZES[algorithm] * 8 - 1)
    exponent = size * 8
    for k in range(exponent.bit_length()):
        if exponent >> k & 1:
            product = _multiply(algorithm, _power(algorithm, k), product)
    return product


# --- uploads ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BodyDigest:
    """The computed digests of a body. `md5_hex` is the ETag of a single-part upload; `checksums` (algorithm
    → base64) are those to store with the object."""

    md5_hex: str
    checksums: Mapping[str, str]
    size: int


class BodyVerifier:
    """Hashes a body as it streams through and compares it with everything that the client declared about
    it.

    `payload_sha256` is the payload hash of the signature (values other than 64 hexadecimal digits are
    ignored); `extra` names further algorithms to compute and store. If no checksum would be stored
    otherwise, CRC64NVME is, as in S3.
    """

    def __init__(
        self, digests: BodyDigests, payload_sha256: str | None = None, *, extra: Iterable[str] = ()
    ) -> None:
        self._digests = digests
        self._payload_sha256 = (
            payload_sha256 if payload_sha256 is not None and len(payload_sha256) == 64 else None
        )
        kept = dict.fromkeys((*digests.checksums, *digests.trailer, *digests.wanted, *extra)) or {
            DEFAULT_ALGORITHM: None
        }
        self._kept = tuple(kept)
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._hashers = {name: new_hasher(name) for name in kept}
        if self._payload_sha256 is not None and "sha256" not in self._hashers:
            self._hashers["sha256"] = new_hasher("sha256")
        self._updates = (self._md5.update, *(hasher.update for hasher in self._hashers.values()))
        self._size = 0

    def __repr__(self) -> str:
        return f"BodyVerifier({', '.join(self._hashers)}; {self._size} bytes)"

    def update(self, chunk: Buffer) -> None:
        for update in self._updates:
            update(chunk)
        self._size += len(chunk)

    def finish(self, trailers: Mapping[str, str] = _NOTHING) -> BodyDigest:
        """Compare the digests. `trailers` are those of a chunked body (lower-case names).

        Raises S3Error: InvalidDigest, BadDigest, XAmzContentSHA256Mismatch, InvalidRequest,
        MalformedTrailerError.
        """
        self._check_payload_sha256()
        self._check_md5()
        checksums = {name: self._hashers[name].base64() for name in self._kept}
        for algorithm, value in self._digests.checksums.items():
            if value != checksums[algorithm]:
                self._check(algorithm, value)
        for algorithm in self._digests.trailer:
            sent = trailers.get(f"x-amz-checksum-{algorithm}")
            if sent is None:
                raise S3Error(
                    "MalformedTrailerError", f"The announced trailer x-amz-checksum-{algorithm} is missing."
                )
            self._check(algorithm, sent)
        return BodyDigest(self._md5.hexdigest(), checksums, self._size)

    def _check_payload_sha256(self) -> None:
        declared = self._payload_sha256
        if declared is None:
            return
        computed = self._hashers["sha256"].digest().hex()
        if not compare_digest(declared, computed):
            raise S3Error(
                "XAmzContentSHA256Mismatch",
                extra={"ClientComputedContentSHA256": declared, "S3ComputedContentSHA256": computed},
            )

    def _check_md5(self) -> None:
        declared = self._digests.content_md5
        if declared is None:
            return
        digest = decode_checksum("md5", declared)
        if digest is None:
            raise S3Error("InvalidDigest", "The Content-MD5 you specified is not valid.")
        if digest != self._md5.digest():
            raise S3Error(
                "BadDigest",
                "The Content-MD5 you specified did not match what we received.",
                extra={"ExpectedDigest": declared, "CalculatedDigest": _base64(self._md5.digest())},
            )

    def _check(self, algorithm: str, value: str) -> None:
        digest = decode_checksum(algorithm, value)
        if digest is None:
            raise S3Error("InvalidRequest", f"Value for x-amz-checksum-{algorithm} header is invalid.")
        if digest != self._hashers[algorithm].digest():
            raise S3Error(
                "BadDigest", f"The {algorithm.upper()} you specified did not match the calculated checksum."
            )
