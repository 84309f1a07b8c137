"""Log lines: their shape, and that no secret gets through."""

from __future__ import annotations

import io
import json
import logging
from contextvars import Context
from typing import TYPE_CHECKING

import pytest

from meshd.telemetry import logs
from meshd.telemetry.logs import JsonFormatter, SecretMasker, TextFormatter, request_id

if TYPE_CHECKING:
    from collections.abc import Callable


def line(formatter: logging.Formatter, message: str = "done", **extra: object) -> str:
    record = logging.makeLogRecord(
        {"name": "meshd.x", "levelname": "INFO", "created": 0.0, "msg": message} | extra
    )
    return formatter.format(record)


def test_text_is_one_line_with_fields() -> None:
    no_request = Context()
    shown = no_request.run(line, TextFormatter("worker-0"), "done\nwell", bytes=12, what='a "b"')
    assert shown == (
        '1970-01-01T00:00:00.000Z INFO    worker-0 meshd.x: done\\nwell bytes=12 what="a \\"b\\""'
    )


def test_json_is_one_object_with_the_request_id() -> None:
    token = request_id.set("R1")
    try:
        shown = json.loads(line(JsonFormatter("worker-0"), bytes=12))
    finally:
        request_id.reset(token)
    assert shown == {
        "time": "1970-01-01T00:00:00.000Z",
        "level": "info",
        "process": "worker-0",
        "logger": "meshd.x",
        "message": "done",
        "bytes": 12,
        "request_id": "R1",
    }


@pytest.mark.parametrize("formatter", [TextFormatter, JsonFormatter])
def test_known_secrets_are_masked_wherever_they_stand(
    formatter: Callable[[str], logging.Formatter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "secret_masker", SecretMasker())
    logs.secret_masker.add_secrets(["top/secret+key", "tiny"])
    try:
        raise ValueError("cannot use top/secret+key")
    except ValueError as error:
        failure = (type(error), error, error.__traceback__)
    shown = line(formatter("w"), "got top/secret+key", exc_info=failure, field="top/secret+key", number=3)
    assert "top/secret+key" not in shown
    assert shown.count("***") >= 3
    assert "ValueError" in shown
    assert len(shown.splitlines()) == 1


@pytest.mark.parametrize(
    "text",
    [
        "GET /b/k?X-Amz-Signature=SENSITIVE&x=1",
        "Authorization: AWS4-HMAC-SHA256 Credential=AK/x, SignedHeaders=host, Signature=SENSITIVE",
        '{"secret_key": "SENSITIVE"}',
        "secret_key: SENSITIVE",
        "x-amz-security-token=SENSITIVE",
        "aws_secret_access_key = SENSITIVE",
        "password='SENSITIVE'",
    ],
)
def test_what_is_named_like_a_secret_is_masked(text: str) -> None:
    assert "SENSITIVE" not in SecretMasker().mask_text(text)


def test_ordinary_text_is_left_alone() -> None:
    for text in ("3 signatures of ops", "the secret of speed", "key a/b=c", "design: shared"):
        assert SecretMasker().mask_text(text) == text


def test_lines_are_bounded() -> None:
    assert len(SecretMasker().mask_text("x" * 100_000)) < 10_000


def test_configure_replaces_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    root, stream = logging.getLogger(), io.StringIO()
    before, level = root.handlers[:], root.level
    try:
        for _ in range(2):
            logs.configure("json", "info", "coordinator", stream=stream)
        logging.getLogger("meshd.y").info("hello")
        logging.getLogger("meshd.y").debug("not this")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        logging.captureWarnings(capture=False)
    (written,) = stream.getvalue().splitlines()
    assert json.loads(written)["process"] == "coordinator"
