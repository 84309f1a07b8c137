"""The audit log's file: on a disk that becomes full, and under a name that is given to another."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from typing import TYPE_CHECKING, Any

import msgspec

from meshd.telemetry import metrics
from meshd.telemetry.audit_log import AuditEntry, AuditLog, Rotation

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def entry(number: int) -> AuditEntry:
    return AuditEntry("2026-01-01T00:00:00.000Z", f"{number:016X}", "127.0.0.1", "GetObject", 200, 1.0)


def ids(path: Path) -> list[int]:
    return [int(json.loads(line)["request_id"], 16) for line in path.read_text().splitlines()]


async def written(log: AuditLog, *numbers: int) -> None:
    for number in numbers:
        log.write_entry(entry(number))
    async with asyncio.timeout(60):
        while log.pending:  # noqa: ASYNC110 - a thread writes them
            await asyncio.sleep(0.01)


def dropped() -> float:
    (metric,) = metrics.audit_dropped.collect()
    return float(next(sample.value for sample in metric.samples if sample.name.endswith("_total")))


def test_lines_are_whole_on_a_disk_that_becomes_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "audit.jsonl", os.write
    room = 5 * len(msgspec.json.encode(entry(2)) + b"\n") // 2  # two lines, and some of the third

    def full(fd: int, data: Any) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = write(fd, bytes(data)[:room])
        room -= taken
        return taken

    async def scenario() -> None:
        log = AuditLog(path)
        await written(log, 1)
        before = dropped()
        with monkeypatch.context() as disk:
            disk.setattr(os, "write", full)
            await written(log, 2, 3, 4, 5)
            await written(log, 6)
        assert dropped() - before == 3
        await written(log, 7)
        log.close(5)

    asyncio.run(scenario())
    assert ids(path) == [1, 2, 3, 7]


def test_a_renamed_file_is_left_without_a_signal(tmp_path: Path) -> None:
    path, old = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"

    async def scenario() -> None:
        log = AuditLog(path)
        await written(log, 1)
        path.rename(old)
        await written(log, 2)
        await written(log, 3)
        path.rename(tmp_path / "audit.jsonl.2")
        path.write_bytes(b"")  # as logrotate does with `create`
        await written(log, 4)
        await written(log, 5)
        os.truncate(path, 0)  # and with `copytruncate`
        await written(log, 6)
        log.close(5)

    asyncio.run(scenario())
    assert (ids(old), ids(tmp_path / "audit.jsonl.2"), ids(path)) == ([1, 2], [3, 4], [6])


def test_full_files_are_renamed_and_the_oldest_goes(tmp_path: Path) -> None:
    """By two processes' worth of writers: no line is lost but those of files that are one too many."""
    path, line = tmp_path / "audit.jsonl", len(msgspec.json.encode(entry(2)) + b"\n")

    async def scenario() -> None:
        logs = [AuditLog(path, rotation=Rotation(10 * line, 3)) for _ in range(2)]
        for number in range(60):
            await written(logs[number % 2], number)
        for log in logs:
            log.close(5)

    asyncio.run(scenario())
    names = ["audit.jsonl.3", "audit.jsonl.2", "audit.jsonl.1", "audit.jsonl"]
    assert sorted(names) == sorted(each.name for each in tmp_path.iterdir())
    kept = [number for name in names for number in ids(tmp_path / name)]
    assert kept == list(range(60 - len(kept), 60))
    assert all(len(ids(tmp_path / name)) == 10 for name in names)


def test_a_full_file_that_cannot_be_renamed_grows_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, line = tmp_path / "audit.jsonl", len(msgspec.json.encode(entry(2)) + b"\n")

    def refused(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "no")

    async def scenario() -> None:
        log = AuditLog(path, rotation=Rotation(2 * line, 3))
        monkeypatch.setattr(os, "replace", refused)
        for number in range(6):
            await written(log, number)
        log.close(5)

    asyncio.run(scenario())
    assert ids(path) == list(range(6))
    assert [record.message for record in caplog.records].count(
        "the audit log is full but cannot be renamed; it keeps growing"
    ) == 1
