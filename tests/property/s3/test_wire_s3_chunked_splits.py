"""The chunked decoder gives the same however its input is split, and never more than was signed."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire.checksums import body_checksums
from meshwire.errors import S3Error
from meshwire.sigv4 import STREAMING_PAYLOADS, Verified
from meshwire.sigv4.aws_chunked import ChunkedDecoder
from meshwire.sigv4.signer import chunk_signature, signing_key, trailer_signature

STAMP = "20260101T000000Z"
SCOPE = "20260101/us-east-1/s3/aws4_request"
KEY = signing_key("secret", "20260101", "us-east-1", "s3")
VERIFIED = Verified(KEY, "0" * 64, SCOPE, STAMP)
TRAILER = "x-amz-checksum-crc32"

payloads = st.lists(st.binary(min_size=1, max_size=40), max_size=5)
kinds = st.sampled_from(sorted(STREAMING_PAYLOADS))


def encode(kind: str, chunks: list[bytes], end: bytes = b"\r\n") -> bytes:
    """A body as a client writes it."""
    signed, previous, out = "AWS4" in kind, VERIFIED.seed_signature, b""
    for chunk in [*chunks, b""]:
        extension = ""
        if signed:
            previous = chunk_signature(KEY, STAMP, SCOPE, previous, hashlib.sha256(chunk).hexdigest())
            extension = f";chunk-signature={previous}"
        out += f"{len(chunk):x}{extension}".encode() + end + chunk + (end if chunk else b"")
    if kind.endswith("TRAILER"):
        hasher = body_checksums.new_hasher("crc32")
        hasher.update(b"".join(chunks))
        line = f"{TRAILER}:{hasher.base64()}"
        out += line.encode() + end
        if signed:
            digest = hashlib.sha256(f"{line}\n".encode()).hexdigest()
            out += b"x-amz-trailer-signature:"
            out += trailer_signature(KEY, STAMP, SCOPE, previous, digest).encode() + end
    return out + end


def decoder(kind: str, length: int | None = None) -> ChunkedDecoder:
    return ChunkedDecoder(kind, VERIFIED, [TRAILER] if kind.endswith("TRAILER") else [], length)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(bounds)]


@given(kinds, payloads, st.lists(st.integers(0, 10_000), max_size=30), st.sampled_from([b"\r\n", b"\n"]))
def test_any_split_decodes_alike(kind: str, chunks: list[bytes], cuts: list[int], end: bytes) -> None:
    body, plain = encode(kind, chunks, end), b"".join(chunks)
    one = decoder(kind, len(plain))
    out = b"".join(piece for part in split(body, cuts) for piece in one.feed(part))
    assert out == plain
    assert set(one.finish()) == ({TRAILER} if kind.endswith("TRAILER") else set())


@given(kinds, payloads)
def test_byte_by_byte(kind: str, chunks: list[bytes]) -> None:
    one, body = decoder(kind), encode(kind, chunks)
    assert b"".join(b"".join(one.feed(body[i : i + 1])) for i in range(len(body))) == b"".join(chunks)
    one.finish()


@given(kinds, payloads, st.integers(0, 10_000))
def test_any_cut_is_incomplete(kind: str, chunks: list[bytes], cut: int) -> None:
    body = encode(kind, chunks)
    one = decoder(kind, len(b"".join(chunks)))
    one.feed(body[: cut % len(body)])
    with pytest.raises(S3Error, match="IncompleteBody"):
        one.finish()


@given(kinds, payloads, st.binary(min_size=1, max_size=5).filter(lambda b: len(b) > 2 or b.strip(b"\r\n")))
def test_nothing_follows_the_end(kind: str, chunks: list[bytes], more: bytes) -> None:
    """But for one line end, which minio-go sends."""
    with pytest.raises(S3Error):
        decoder(kind).feed(encode(kind, chunks) + more)


@given(
    st.sampled_from([kind for kind in sorted(STREAMING_PAYLOADS) if "AWS4" in kind]),
    payloads,
    st.integers(0, 10_000),
    st.integers(1, 255),
)
def test_a_changed_byte_is_never_believed(kind: str, chunks: list[bytes], at: int, flip: int) -> None:
    """Whatever byte is changed: an error, or the very same payload and trailers (e.g. a digit's case)."""
    body = bytearray(encode(kind, chunks))
    body[at % len(body)] ^= flip
    one, plain = decoder(kind, len(b"".join(chunks))), b"".join(chunks)
    try:
        out = b"".join(one.feed(bytes(body)))
        trailers = one.finish()
    except S3Error:
        return
    reference = decoder(kind)
    reference.feed(encode(kind, chunks))
    assert (out, trailers) == (plain, reference.finish())


@given(kinds, st.binary(max_size=200), st.lists(st.integers(0, 300), max_size=5))
def test_any_bytes_decode_or_raise_an_s3_error(kind: str, data: bytes, cuts: list[int]) -> None:
    one = decoder(kind, 10)
    try:
        out = b"".join(piece for part in split(data, cuts) for piece in one.feed(part))
        one.finish()
    except S3Error:
        return
    assert len(out) == 10
    assert out in data


@given(kinds, payloads, st.integers(-3, 3).filter(bool))
def test_the_declared_length_counts(kind: str, chunks: list[bytes], off: int) -> None:
    declared = max(0, len(b"".join(chunks)) + off)
    if declared == len(b"".join(chunks)):
        return
    with pytest.raises(S3Error, match="IncompleteBody"):
        decoder(kind, declared).feed(encode(kind, chunks))
