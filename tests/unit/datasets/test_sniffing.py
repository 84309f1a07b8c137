"""Hints about bytes: each names a fix that can be filled in; nothing makes it fail."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire.formats.content_sniffing import identify_content, identify_foreign, identify_numbers


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "empty"),
        (b"\xff\xd8\xff\xe0", "a JPEG file"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "a WebP file"),
        (b"\x93NUMPY\x01", "a .npy file"),
        (b"\x40\0\0\0\0\0\0\0" + b'{"a":{"dtype":"F16"', "a .safetensors file"),
        (b"\xfd7zXZ\0\0", "compressed with xz"),
        (b"ARROW1\0\0", "an Arrow file"),
        (b"PK\x03\x04", "a zip or .npz file"),
        (b' {"a": 1}', "a JSON document"),
        (b'[{"a": 1},\n {"b": 2}]', "a JSON document"),
        (b'{"a": 1}\n{"b": 2}\n', "lines of JSON"),
        (b" -12\n", "a number as text"),
        (b"<!DOCTYPE html><html>", "an HTML page"),
        (b"\n <!doctype HTML>", "an HTML page"),
        (b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>', "an XML error of a store"),
        (b"BZh91AY", "compressed with bzip2"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1", "a HEIC image"),
        (b"\0\0\0\x1cftypavif\0\0\0\0", "an AVIF image"),
        (b"\0\0\0\x18ftypmp42\0\0\0\0isom", "an MP4 or QuickTime file"),
        (b"\xef\xbb\xbf{}", "text with a byte order mark"),
        ('{"a": 1}'.encode("utf-16"), "text in UTF-16"),
    ],
)
def test_what_is_recognised(data: bytes, what: str) -> None:
    found = identify_content(data)
    assert found is not None
    assert found.what == what


@pytest.mark.parametrize(
    ("kind", "data", "fix"),
    [
        ("tfrecord", b"\x1a\x03\n\x01\x00", "ops.feature('x', 'integer')"),
        ("tfrecord", b"\x12\x06\n\x04\0\0\0\0", "ops.feature('x', 'number')"),
        ("tfrecord", b"\x12\x90\x03\n" + bytes(400), "ops.feature('x', 'number')"),
        ("parquet", (7).to_bytes(8, "little"), "ops.frombuffer('x', DTYPE)"),
        ("mds", (7).to_bytes(8, "little"), "ops.frombuffer('x', DTYPE)"),
    ],
)
def test_numbers_are_recognised_by_their_source(kind: str, data: bytes, fix: str) -> None:
    found = identify_numbers(kind, data)
    assert found is not None
    assert fix in found.fix.format(field="x")
    assert identify_numbers("objects", data) is None


@pytest.mark.parametrize(
    ("kind", "data"), [("tfrecord", b"\x12 text"), ("tfrecord", b""), ("parquet", b"text")]
)
def test_other_values_are_no_numbers(kind: str, data: bytes) -> None:
    assert identify_numbers(kind, data) is None


@given(st.binary(max_size=64))
def test_any_bytes_have_a_look_or_none(data: bytes) -> None:
    found = identify_content(data)
    assert found is None or found.fix.format(field="x")
    foreign = identify_foreign(data)
    assert foreign is None or foreign.fix.format() == foreign.fix
