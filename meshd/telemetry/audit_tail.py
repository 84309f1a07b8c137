"""Last lines of the node's audit log, for an administrator who looks at it.

Reads the end of the file that has the configured name, and of the one before it that was renamed, so that a
rotation does not empty the answer.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import msgspec

from meshd.telemetry.audit_log import STDOUT

if TYPE_CHECKING:
    from pathlib import Path

MOST_BYTES: Final = 4 << 20
"""Bytes of log that are searched."""


class AuditTail:
    """Reads the log `path`; None if there is none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path if path != STDOUT else None

    def __repr__(self) -> str:
        return f"<AuditTail {self._path}>"

    @property
    def is_readable(self) -> bool:
        """Whether the log is a file."""
        return self._path is not None

    def read(self, limit: int, containing: str) -> list[dict[str, Any]]:
        """Return at most `limit` entries, the latest first, whose line contains a text (blocking).

        Raises OSError if the log is there and cannot be read.
        """
        found: list[dict[str, Any]] = []
        left, wanted = MOST_BYTES, containing.encode(errors="surrogateescape")
        for name in () if self._path is None else (str(self._path), f"{self._path}.1"):
            lines = _last_bytes(name, left)
            left -= len(lines)
            for line in reversed(lines.splitlines()):
                if len(found) == limit:
                    return found
                if wanted in line:
                    found += _entry(line)
        return found


def _last_bytes(name: str, most: int) -> bytes:
    """Return whole lines from the end of a file; nothing if it is not there."""
    try:
        with open(name, "rb") as file:
            start = max(0, os.fstat(file.fileno()).st_size - most)
            file.seek(start)
            data = file.read(most)
    except FileNotFoundError:
        return b""
    return data.partition(b"\n")[2] if start else data


def _entry(line: bytes) -> list[dict[str, Any]]:
    try:
        return [msgspec.json.decode(line, type=dict[str, Any])]
    except (msgspec.DecodeError, UnicodeDecodeError):  # another program wrote it, or a disk was full
        return []
