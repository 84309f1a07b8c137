"""When the SDK asks again."""

from __future__ import annotations

import contextlib
import pickle
import random
from types import SimpleNamespace
from typing import Any

import pytest

from meshsdk.client.error_responses import _retry_after, parsed, read_error
from meshsdk.client.http_connection import parse_head
from meshsdk.client.request import Request
from meshsdk.client.retry import BackOff, Patience, retryable, shards_of, silence
from meshsdk.errors import (
    AccessError,
    BusyError,
    ConnectError,
    CorruptFrameError,
    DeadlineError,
    InvalidPlanError,
    MeshError,
    NotFoundError,
    ServerError,
    SnapshotChangedError,
    server_error,
)
from meshwire.s3.xml_documents import parse_copy_result, parse_list_buckets


def patience(deadline: float = 100.0) -> Patience:
    return Patience(BackOff(deadline), started=0.0, jitter=random.Random(1))


def raised_once(error: Exception) -> Exception:
    with contextlib.suppress(Exception):
        raise error
    return error


def test_waits_grow_are_jittered_and_capped() -> None:
    patient = patience(1e9)
    waits = [patient.delay(ConnectError("down"), 0.0) for _ in range(200)]
    assert all(0 <= wait <= min(10.0, 0.1 * 2**count) for count, wait in enumerate(waits))
    assert len(set(waits)) == len(waits)
    assert max(waits[20:]) > 5


def test_a_servers_retry_after_is_never_undercut() -> None:
    assert patience().delay(BusyError("busy", status=503, retry_after=7.5), 0.0) >= 7.5


def test_the_last_try_is_at_the_deadline() -> None:
    for seed in range(50):
        patient, now = Patience(BackOff(4.0), started=0.0, jitter=random.Random(seed)), 0.0
        while now < 4.0:
            wait = patient.delay(ConnectError("down"), now)
            assert 0 < wait <= 4.0 - now
            now += wait
        with pytest.raises(DeadlineError, match="in 4 s: down"):
            patient.delay(ConnectError("down"), now)


def test_past_the_deadline_the_last_failure_is_the_cause_in_words_alone() -> None:
    first, last = raised_once(OSError("refused")), BusyError("busy", status=503, retry_after=7.5)
    last.__cause__ = first
    with pytest.raises(DeadlineError, match="1 attempt in 0 s, for the node asks to wait 8 s") as raised:
        patience(5.0).delay(last, 0.0)
    assert last.__cause__ is first
    assert first.__traceback__ is None
    assert raised.value.__cause__ is last
    assert "busy. Check the nodes" in str(raised.value)
    assert str(raised.value).endswith("pass deadline=SECONDS to mesh.Loader or mesh.connect.")
    with pytest.raises(DeadlineError, match=r"Is it up\? To wait longer"):
        patience(0.0).delay(ConnectError("Is it up?"), 1.0)


def test_a_long_wait_is_told_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    patient = patience(1e9)
    for second in range(100):
        patient.delay(BusyError("node-1: busy", status=503), float(second))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 6  # after 3, 6, 12, 24, 48 and 96 seconds
    assert "still retrying after 3.0 s" in told[0]
    assert "node-1: busy" in told[0]


def test_a_wait_says_how_long_it_may_last(caplog: pytest.LogCaptureFixture) -> None:
    patient = patience(60.0)
    for second in range(5):
        patient.delay(BusyError("busy", status=503), float(second))
    assert "still retrying after 3.0 s of 60 s (attempt " in caplog.text


def test_who_is_not_there_is_told_within_a_second(caplog: pytest.LogCaptureFixture) -> None:
    patient, now = patience(1e9), 0.0
    while not caplog.records:
        slept = now
        now += patient.delay(ConnectError("node-1: refused"), now)
    assert slept < 1 <= now  # before the wait that goes beyond it
    assert "node-1: refused" in caplog.text
    for second in range(2, 7):
        patient.delay(ConnectError("node-1: refused"), float(second))
    assert len(caplog.records) == 3  # and at 3 and 6


def test_requests_that_fail_alike_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """A loader has many in flight when a node dies."""
    waiting = [patience(1e9) for _ in range(8)]
    for second in range(20):
        for number, patient in enumerate(waiting):
            patient.delay(ConnectError("node-9: refused"), second + number / 100)
    told = [record.getMessage() for record in caplog.records]
    assert 4 <= len(told) <= 6, told  # at once, and after about 3, 6 and 12 seconds
    waiting[0].delay(ConnectError("node-8: refused"), 100.0)
    assert "node-8" in caplog.records[-1].getMessage()  # another reason is told in any case


def working(share: float) -> BusyError:
    return BusyError("indexing", status=503, retry_after=1.0, detail={"progress": share})


@pytest.mark.parametrize(
    ("told", "shards"),
    [
        ({"shards": {"done": 3, "all": 10}}, (3, 10)),
        ({"shards": {"done": 3}}, None),
        ({"shards": [3, 10]}, None),
        ({"progress": 0.3}, None),
    ],
)
def test_shards_are_those_that_the_server_counts(
    told: dict[str, Any], shards: tuple[int, int] | None
) -> None:
    assert shards_of(BusyError("indexing", status=503, detail=told)) == shards


def test_work_that_goes_on_is_told_with_its_progress(caplog: pytest.LogCaptureFixture) -> None:
    patient = patience(15.0)
    for second in range(6):
        patient.delay(working(second / 10), float(second))
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for the node's work: 30 % done after 3.0 s"
    ]


def test_who_works_on_it_is_waited_for_beyond_the_deadline() -> None:
    patient = patience(15.0)
    for second in range(0, 1000, 100):
        assert patient.delay(working(second / 1000), float(second)) >= 1
    for second in range(1000, 1400, 100):  # no further for a while
        patient.delay(working(0.9), float(second))
    with pytest.raises(DeadlineError):
        patient.delay(working(0.9), 900.0 + 600)


def test_who_worked_and_is_gone_has_the_deadline_from_then_on() -> None:
    patient = patience(15.0)
    patient.delay(working(0.1), 100.0)
    patient.delay(ConnectError("refused"), 110.0)
    with pytest.raises(DeadlineError, match="refused"):
        patient.delay(ConnectError("refused"), 116.0)


def test_what_cannot_get_better_is_raised_at_once() -> None:
    refused = AccessError("no", status=403)
    with pytest.raises(AccessError):
        patience().delay(refused, 0.0)


@pytest.mark.parametrize("status", [408, 421, 429, 500, 502, 503, 504])
def test_transient_statuses(status: int) -> None:
    assert retryable(ServerError("x", status=status))


@pytest.mark.parametrize("status", [400, 403, 404, 409, 410, 412, 416, 422, 501])
def test_final_statuses(status: int) -> None:
    assert not retryable(ServerError("x", status=status))


def test_a_corrupt_frame_is_asked_for_again() -> None:
    assert retryable(CorruptFrameError("flipped"))
    assert not retryable(MeshError("other"))


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (409, "SnapshotChanged", SnapshotChangedError),
        (410, "UnknownOpBuild", InvalidPlanError),
        (404, "NoSuchKey", NotFoundError),
        (403, "SignatureDoesNotMatch", AccessError),
        (429, "", BusyError),
        (418, "Teapot", ServerError),
    ],
)
def test_errors_by_code_then_status(status: int, code: str, kind: type[ServerError]) -> None:
    error = server_error(status, code, "why", retry_after=2.0, detail={"key": "a"})
    assert type(error) is kind
    assert (error.status, error.code, error.retry_after) == (status, code, 2.0)
    again = pickle.loads(pickle.dumps(error))  # as a worker process would hand it over
    assert type(again) is kind
    assert (str(again), again.status, again.detail) == (str(error), status, {"key": "a"})


def test_advice_is_given_and_long_text_is_cut() -> None:
    assert "AWS_SECRET_ACCESS_KEY" in str(server_error(403, "SignatureDoesNotMatch", "no"))
    assert len(str(server_error(500, "X", "y" * 100_000))) <= 2000


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(None, None), ("2", 2.0), ("0.5", 0.5), ("-3", 0.0), ("soon", None), ("9e9", 3600.0)],
)
def test_retry_after(text: str | None, seconds: float | None) -> None:
    assert _retry_after(text) == seconds


def test_a_refusal_of_s3_says_when_to_retry() -> None:
    body = b"<Error><Code>SlowDown</Code><Message>wait</Message></Error>"
    response: Any = SimpleNamespace(status=503, headers={"retry-after": "6"}, read=lambda most: body)
    error = read_error(response, Request("PUT", "/bucket/key"))
    assert isinstance(error, BusyError)
    assert patience().delay(error, 0.0) >= 6.0


def test_retry_after_as_a_date_that_has_passed() -> None:
    assert _retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0


def test_heads() -> None:
    head = b"HTTP/1.1 206 Partial Content\r\nContent-Length: 5\r\nX-A: 1\r\nx-a:  2 \r\n\r\n"
    assert parse_head(head) == (206, {"content-length": "5", "x-a": "1, 2"})


@pytest.mark.parametrize(
    "head", [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"\r\n\r\n"]
)
def test_what_is_no_http_is_a_connect_error(head: bytes) -> None:
    with pytest.raises(ConnectError, match="not an HTTP response"):
        parse_head(head)


def test_an_op_that_broke_is_not_asked_again() -> None:
    assert not retryable(server_error(500, "OpFailed", "the op broke"))
    assert retryable(server_error(500, "InternalError", "once"))


def test_the_silent_are_asked_early_enough_for_another_node() -> None:
    assert silence(timeout=60.0, deadline=600.0, left=600.0) == 60.0
    assert silence(timeout=60.0, deadline=10.0, left=10.0) == 5.0
    assert silence(timeout=60.0, deadline=14.0, left=5.0) == 3.0  # it has two seconds to say that it is there
    assert silence(timeout=60.0, deadline=0.2, left=0.2) == 5.0  # slow is not away
    assert silence(timeout=60.0, deadline=0.2, left=-7.0) == 1.0
    assert silence(timeout=0.5, deadline=10.0, left=10.0) == 0.5


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<!DOCTYPE HTML>\n<html><head><title>Directory listing</title></head>", "(Directory listing)"),
        (b"It works!", "(It works!)"),
        (b"", "(it is empty)"),
        (b" \n", "(it is empty)"),
        (b'<?xml version="1.0"?><Other/>', '(<?xml version="1.0"?><Other/>)'),
        (
            b"<!DOCTYPE html><html><head>" + 9 * b'<meta property="og:type" content="website" />',
            "(<!DOCTYPE html>",
        ),
    ],
)
def test_an_answer_that_is_no_s3_document_is_described(body: bytes, words: str) -> None:
    with pytest.raises(ServerError, match="does not seem to be an S3 store") as raised:
        parsed(parse_list_buckets, body)
    assert words in str(raised.value)
    assert (raised.value.status, raised.value.code) == (200, "InvalidResponse")


def test_an_error_despite_a_success_status_keeps_its_code() -> None:
    body = b"<Error><Code>MalformedXML</Code><Message>no</Message></Error>"
    with pytest.raises(ServerError) as raised:
        parsed(parse_copy_result, body)
    assert raised.value.code == "MalformedXML"
