"""Checksums against published check values, and the verifier of bodies."""

from __future__ import annotations

import base64
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire.checksums import body_checksums
from meshwire.checksums.body_checksums import BodyDigests, BodyVerifier
from meshwire.errors import S3Error
from meshwire.http_values import conditional_requests

# The CRC catalogue's check values: the checksum of "123456789".
CHECK = {"crc32": "cbf43926", "crc32c": "e3069283", "crc64nvme": "ae8b14860a799888"}
DATA = b"hello"
SHA256 = hashlib.sha256(DATA).hexdigest()
MD5 = base64.b64encode(hashlib.md5(DATA).digest()).decode()


def value(algorithm: str, data: bytes) -> str:
    hasher = body_checksums.new_hasher(algorithm)
    hasher.update(data)
    return hasher.base64()


@pytest.mark.parametrize("algorithm", CHECK)
def test_check_values(algorithm: str) -> None:
    hasher = body_checksums.new_hasher(algorithm)
    hasher.update(b"1234")
    hasher.update(memoryview(b"56789"))
    assert hasher.digest().hex() == CHECK[algorithm]


@pytest.mark.parametrize(
    ("algorithm", "digest"),
    [
        # With seed 0, in canonical (big-endian) form.
        ("xxhash64", "ef46db3751d8e999"),
        ("xxhash3", "2d06800538d394c2"),
        ("xxhash128", "99aa06d3014798d86001c324468d497f"),
    ],
)
def test_xxhashes_of_nothing(algorithm: str, digest: str) -> None:
    hasher = body_checksums.new_hasher(algorithm)
    assert hasher.digest().hex() == digest
    hasher.update(b"123")
    assert (
        body_checksums.decode_checksum(algorithm, hasher.base64()) == hasher.digest() != bytes.fromhex(digest)
    )


@pytest.mark.parametrize("algorithm", ["sha1", "sha256", "sha512", "md5"])
def test_hashes(algorithm: str) -> None:
    assert base64.b64decode(value(algorithm, DATA)) == hashlib.new(algorithm, DATA).digest()


@given(st.sampled_from(sorted(CHECK)), st.lists(st.binary(max_size=300), max_size=6))
def test_combined_is_whole(algorithm: str, parts: list[bytes]) -> None:
    combined = body_checksums.combine_checksums(
        algorithm, [(value(algorithm, part), len(part)) for part in parts]
    )
    assert combined == value(algorithm, b"".join(parts))


def test_large_parts_combine_without_their_bytes() -> None:
    zeros = body_checksums.new_hasher("crc32")
    for _ in range(64):
        zeros.update(bytes(1 << 20))
    part = value("crc32", bytes(1 << 20))
    assert body_checksums.combine_checksums("crc32", [(part, 1 << 20)] * 64) == zeros.base64()
    with pytest.raises(ValueError, match="COMPOSITE"):
        body_checksums.combine_checksums("sha256", [("", 1)])


def test_composites() -> None:
    digests = [hashlib.sha256(part).digest() for part in (b"a", b"b")]
    composite = body_checksums.composite_checksum(
        "sha256", [base64.b64encode(digest).decode() for digest in digests]
    )
    assert composite == base64.b64encode(hashlib.sha256(b"".join(digests)).digest()).decode() + "-2"
    md5s = [hashlib.md5(part) for part in (b"a", b"b")]
    expected = hashlib.md5(b"".join(part.digest() for part in md5s)).hexdigest()
    assert conditional_requests.multipart_etag(part.hexdigest() for part in md5s) == f"{expected}-2"


def finish(
    digests: BodyDigests,
    payload_sha256: str | None = None,
    trailers: dict[str, str] | None = None,
    extra: tuple[str, ...] = (),
) -> body_checksums.BodyDigest:
    verifier = BodyVerifier(digests, payload_sha256, extra=extra)
    verifier.update(DATA[:2])
    verifier.update(memoryview(DATA)[2:])
    return verifier.finish(trailers or {})


def test_crc64nvme_is_kept_by_default() -> None:
    digest = finish(BodyDigests(), SHA256)
    assert digest.checksums == {"crc64nvme": value("crc64nvme", DATA)}
    assert (digest.md5_hex, digest.size) == (hashlib.md5(DATA).hexdigest(), 5)


def test_what_is_declared_is_kept() -> None:
    digests = BodyDigests(MD5, {"sha256": value("sha256", DATA)})
    assert list(finish(digests, SHA256, extra=("crc32",)).checksums) == ["sha256", "crc32"]
    assert list(finish(BodyDigests(wanted=("sha1",))).checksums) == ["sha1"]
    trailer = BodyDigests(trailer=("crc32",))
    assert list(finish(trailer, None, {"x-amz-checksum-crc32": value("crc32", DATA)}).checksums) == ["crc32"]


@pytest.mark.parametrize(
    ("digests", "payload", "trailers", "code"),
    [
        (BodyDigests(), "0" * 64, {}, "XAmzContentSHA256Mismatch"),
        (BodyDigests("AAAA"), None, {}, "InvalidDigest"),
        (BodyDigests("AAAAAAAAAAAAAAAAAAAAAA=="), None, {}, "BadDigest"),
        (BodyDigests(None, {"crc32": "AAAAAA=="}), None, {}, "BadDigest"),
        (BodyDigests(None, {"crc32": "AAAA"}), None, {}, "InvalidRequest"),
        (BodyDigests(trailer=("crc32c",)), None, {}, "MalformedTrailerError"),
        (BodyDigests(trailer=("crc32c",)), None, {"x-amz-checksum-crc32c": "AAAAAA=="}, "BadDigest"),
        (BodyDigests(trailer=("crc32c",)), None, {"x-amz-checksum-crc32c": "é"}, "InvalidRequest"),
    ],
)
def test_mismatches(digests: BodyDigests, payload: str | None, trailers: dict[str, str], code: str) -> None:
    with pytest.raises(S3Error) as caught:
        finish(digests, payload, trailers)
    assert caught.value.code == code
