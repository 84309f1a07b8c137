"""The audit log: whole lines in order, renamed files, full buffers and disks that fail."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from typing import TYPE_CHECKING, Any

from meshd.telemetry import audit_log, metrics
from meshd.telemetry.audit_log import AuditEntry, AuditLog, format_audit_time

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest


def entry(number: int, **fields: Any) -> AuditEntry:
    return AuditEntry(format_audit_time(0), f"R{number}", "127.0.0.1", "GetObject", 200, 1.5, **fields)


def written(path: Path) -> list[str]:
    return [json.loads(line)["request_id"] for line in path.read_text().splitlines()]


def dropped() -> float:
    return float(metrics.audit_dropped._value.get())


def session(path: Path, *steps: Callable[[AuditLog], object], **options: Any) -> None:
    async def main() -> None:
        log = AuditLog(path, **options)
        for step in steps:
            step(log)
        log.close(20)
        assert log.pending == 0

    asyncio.run(main())


def lines(first: int, count: int) -> Callable[[AuditLog], None]:
    def write(log: AuditLog) -> None:
        for number in range(first, first + count):
            log.write_entry(entry(number))

    return write


def test_lines_are_written_in_order_and_private(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    session(path, lines(0, 1000))
    assert written(path) == [f"R{number}" for number in range(1000)]
    assert path.stat().st_mode & 0o777 == 0o600


def test_empty_fields_are_left_out_and_odd_text_stays_on_its_line(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    session(
        path, lambda log: log.write_entry(entry(1, key='a\nb"ü\ud800'.encode("utf-8", "replace").decode()))
    )
    assert json.loads(path.read_text()) == {
        "time": "1970-01-01T00:00:00.000Z",
        "request_id": "R1",
        "remote": "127.0.0.1",
        "operation": "GetObject",
        "status": 200,
        "ms": 1.5,
        "key": 'a\nb"ü?',
    }


def test_a_renamed_file_gets_what_came_before_and_the_new_one_what_comes_after(tmp_path: Path) -> None:
    path, old = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    path.touch()

    def rotate(log: AuditLog) -> None:
        log._file.append_batch(b"")  # open before the file is renamed, as after any line
        path.rename(old)
        log.reopen()

    session(path, lines(0, 3), rotate, lines(3, 3))
    assert written(old) == ["R0", "R1", "R2"]
    assert written(path) == ["R3", "R4", "R5"]


def test_what_does_not_fit_the_buffer_is_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    size = len(audit_log._encode(entry(1000))) + 1
    before = dropped()
    session(path, lines(1000, 10), max_bytes=4 * size)
    assert written(path) == ["R1000", "R1001", "R1002", "R1003"]
    assert dropped() - before == 6


def test_a_disk_that_fails_costs_lines_and_not_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "audit.jsonl"
    true_write, failing = os.write, True

    def write(fd: int, data: Any) -> int:
        if failing:
            raise OSError(28, "No space left on device")
        return true_write(fd, data)

    monkeypatch.setattr(os, "write", write)
    before = dropped()
    with caplog.at_level(logging.ERROR, "meshd.audit"):
        session(path, lines(0, 3))
        assert dropped() - before == 3
        failing = False
        session(path, lines(3, 2))
    assert written(path) == ["R3", "R4"]
    assert [record.message for record in caplog.records] == ["cannot write to the audit log"]


def test_a_line_is_written_soon_without_being_asked(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"

    async def main() -> None:
        log = AuditLog(path)
        log.write_entry(entry(1))
        for _ in range(2000):
            await asyncio.sleep(0.01)
            if not log.pending:
                break
        assert written(path) == ["R1"]
        log.close(20)

    asyncio.run(main())


def test_what_is_no_text_is_escaped(tmp_path: Path) -> None:
    """A client claims any bytes; the line of its request is written all the same."""
    path = tmp_path / "audit.jsonl"
    odd = entry(1, access_key="a\udcff", keys=("\udcfe", "b"), failed={"\udcfd": "AccessDenied"})
    session(path, lambda log: log.write_entry(odd), lambda log: log.write_entry(entry(2)))
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["access_key"], first["keys"]) == ("a\\udcff", ["\\udcfe", "b"])
    assert first["failed"] == {"\\udcfd": "AccessDenied"}
    assert second["request_id"] == "R2"


def test_a_file_that_reports_an_error_when_it_is_closed_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, whose server had no room for what was written before."""
    path, close, failures = tmp_path / "audit.jsonl", os.close, [OSError(28, "No space left on device")]

    def failing_close(fd: int) -> None:
        close(fd)
        if failures and threading.current_thread().name == "audit":
            raise failures.pop()

    monkeypatch.setattr(os, "close", failing_close)
    session(path, lines(0, 3), lambda log: log.reopen(), lines(3, 3))
    assert not failures
    assert written(path) == [f"R{number}" for number in range(6)]
