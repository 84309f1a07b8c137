"""Heads as bytes, and the store's errors in S3's words."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.core.api_errors import to_s3_error
from meshd.server.response import head_bytes
from meshd.store import errors
from meshwire.errors import CODES, S3Error

NAMES = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=10)


@given(st.lists(st.tuples(NAMES, st.text(max_size=30)), max_size=6))
def test_no_value_can_end_a_line(headers: list[tuple[str, str]]) -> None:
    text = head_bytes(200, [(n, v) for n, v in headers if v.isprintable() or "\n" in v or "\r" in v], 0)
    head = text.decode("utf-8", "surrogateescape")
    assert head.endswith("\r\n\r\n")
    lines = head[:-4].split("\r\n")
    assert not any("\n" in line or "\r" in line for line in lines)
    assert lines[0] == "HTTP/1.1 200 OK"
    kept = [n for n, v in headers if v.isprintable() or "\n" in v or "\r" in v]
    assert [line.split(":")[0] for line in lines[3:]] == kept


def test_a_split_response_stays_one_line() -> None:
    head = head_bytes(206, [("x", "a\r\nset-cookie: b"), ("y", "c\0d")], 0, connection="close")
    assert b"\r\nx: a  set-cookie: b\r\ny: c d\r\nConnection: close\r\n\r\n" in head
    assert head.startswith(
        b"HTTP/1.1 206 Partial Content\r\nServer: meshd\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\n"
    )


@pytest.mark.parametrize("kind", errors.StoreError.__subclasses__())
def test_every_error_of_the_store_has_a_word(kind: type[errors.StoreError]) -> None:
    error = kind(3) if kind is errors.InvalidPartError else kind("/secret/path is broken")
    refusal = to_s3_error(error)
    assert isinstance(refusal, S3Error)
    assert refusal.code in CODES
    assert "/secret/path" not in refusal.message


def test_a_full_disk_is_told_as_such() -> None:
    refusal = to_s3_error(errors.DiskFullError("no room"))
    assert (refusal.code, refusal.status) == ("InsufficientStorage", 507)
    assert "Delete objects" in refusal.message
    refusal = to_s3_error(errors.IndexFullError("no room"))
    assert (refusal.code, refusal.status) == ("InsufficientStorage", 507)
    assert "--index-dir" in refusal.message
    assert "deleting objects does not help" in refusal.message
    refusal = to_s3_error(errors.IndexMapFullError())
    assert (refusal.code, refusal.status) == ("InsufficientStorage", 507)
    assert "`index-map`" in refusal.message


def test_a_damaged_object_is_logged_when_it_is_found_not_with_every_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        to_s3_error(errors.CorruptExtentError("the checksum is another", "photos/1.jpg"))
        assert "corrupt extent, not served: photos/1.jpg" in caplog.text
        caplog.clear()
        told = to_s3_error(errors.QuarantinedError("it is in quarantine"), "photos/1.jpg")
        assert "photos/1.jpg is damaged on disk" in told.message
        assert not caplog.records
