"""The last lines of an audit log: the latest first, across a rotation; an unreadable one is an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from meshd.telemetry.audit_tail import AuditTail

if TYPE_CHECKING:
    from pathlib import Path


def test_the_latest_lines_come_first_and_a_rotation_is_read_across(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    log.with_name("audit.log.1").write_text('{"n":1}\n{"n":2}\n')
    log.write_text('{"n":3}\nhalf a li\n{"n":4}\n')
    assert AuditTail(log).read(3, "") == [{"n": 4}, {"n": 3}, {"n": 2}]
    assert AuditTail(log).read(9, '"n":1') == [{"n": 1}]


def test_a_log_that_is_missing_is_empty_and_one_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    assert AuditTail(tmp_path / "audit.log").read(9, "") == []
    with pytest.raises(OSError, match="directory"):
        AuditTail(tmp_path).read(9, "")
