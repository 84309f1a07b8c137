"""Audit log: one JSON line per request, with who did what to which object and the outcome.

It contains no secret, no signature and no query string. Writing never delays a request: a thread writes the
lines, and drops and counts those it cannot keep up with. A line is written completely or not at all, even on
a full disk, in the order of its process, and to the file that has the configured name at that moment, so a
rotation tool can rename the file without a signal. The log can also rotate itself.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import queue
import stat
import threading
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec

from meshd.telemetry import metrics

STDOUT: Final = Path("-")
_FLUSH_DELAY = 0.1  # seconds that a line may wait to be written together with others
_MAX_BYTES = 16 << 20
_log = logging.getLogger("meshd.audit")
_encode = msgspec.json.Encoder().encode


class AuditEntry(msgspec.Struct, omit_defaults=True):
    """One line. Empty fields are left out; docs/access.md describes the fields."""

    time: str
    request_id: str
    remote: str
    operation: str
    status: int
    ms: float
    user: str = ""
    access_key: str = ""
    session: str = ""
    made_with: str = ""
    subject: str = ""
    role: str = ""
    bucket: str = ""
    key: str = ""
    version: str = ""
    source: str = ""
    path: str = ""
    code: str = ""
    keys: tuple[str, ...] = ()
    failed: dict[str, str] = {}
    bytes_in: int = 0
    bytes_out: int = 0
    member: str = ""


class Rotation(msgspec.Struct, frozen=True):
    """Rotation: a file of `size` bytes (0: never) becomes `.1`, that one `.2`, and so on; `files` are
    kept."""

    size: int = 0
    files: int = 10


_NO_ROTATION: Final = Rotation()


class AuditLog:
    """Appends to a file or, with STDOUT, to the standard output. Create it in a running loop; it must be
    closed."""

    def __init__(self, path: Path, *, max_bytes: int = _MAX_BYTES, rotation: Rotation = _NO_ROTATION) -> None:
        self._path, self._max = path, max_bytes
        self._loop = asyncio.get_running_loop()
        self._lines: list[bytes] = []
        self._waiting: asyncio.TimerHandle | None = None
        self._buffered = self._handed = self._done = 0  # bytes; only the thread changes `_done`
        self._queue: queue.SimpleQueue[bytes | _Command] = queue.SimpleQueue()
        self._file = _File(path, rotation)
        self._thread = threading.Thread(target=self._work, name="audit", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<AuditLog {self._path}, {self.pending} bytes to write>"

    @property
    def pending(self) -> int:
        """Bytes that have not been written yet."""
        return self._buffered + self._handed - self._done

    def write_entry(self, entry: AuditEntry) -> None:
        """Queue a line. Call it in the loop; it never waits."""
        line = _line(entry)
        if self.pending + len(line) > self._max:
            metrics.audit_dropped.inc()
            return
        self._lines.append(line)
        self._buffered += len(line)
        if self._waiting is None:
            self._waiting = self._loop.call_later(_FLUSH_DELAY, self._hand_over)

    def reopen(self) -> None:
        """Reopen the file by its name for further lines, because the old file was renamed."""
        self._hand_over()
        self._queue.put(_REOPEN)

    def close(self, patience: float) -> None:
        """Write the remaining lines, waiting at most `patience` seconds for a disk or a reader."""
        self._hand_over()
        self._queue.put(_STOP)
        self._thread.join(patience)
        if self._thread.is_alive():
            _log.warning("audit lines were lost", extra={"bytes": self.pending})

    def _hand_over(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        if self._lines:
            batch = b"".join(self._lines)
            self._lines.clear()
            self._handed += len(batch)
            self._buffered = 0
            self._queue.put(batch)

    def _work(self) -> None:
        while (item := self._queue.get()) is not _STOP:
            if isinstance(item, bytes):
                self._file.append_batch(item)
                self._done += len(item)
            else:
                self._file.close()
        self._file.close()


def _line(entry: AuditEntry) -> bytes:
    """Encode a line; text from clients that is not UTF-8 is escaped."""
    try:
        return _encode(entry) + b"\n"
    except UnicodeEncodeError:
        fields = {name: _without_surrogates(getattr(entry, name)) for name in entry.__struct_fields__}
        return _encode(AuditEntry(**fields)) + b"\n"


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, tuple):
        return tuple(map(_without_surrogates, value))
    if isinstance(value, dict):
        return {_without_surrogates(name): _without_surrogates(code) for name, code in value.items()}
    return value


class _Command:
    pass


_REOPEN, _STOP = _Command(), _Command()


class _File:
    """The file, opened on demand and used by one thread. Several processes append to the same file."""

    def __init__(self, path: Path, rotation: Rotation) -> None:
        self._path, self._rotation = path, rotation
        self._fd = -1
        self._failing = False
        self._renamed = self._stuck = False
        self._why = 0

    def append_batch(self, batch: bytes) -> None:
        """Write lines; lines that cannot be written are counted as dropped."""
        whole = 0
        try:
            if self._fd >= 0 and self._is_left():
                self.close()
            if self._fd < 0:
                self._fd = open_audit_file(self._path)
            if self._rotation.size and self._rotates():
                self.close()
                self._fd = open_audit_file(self._path)
            whole = self._write(batch)
        except OSError as error:
            self._why = error.errno or 0
        if whole == len(batch):
            self._failing = False
            return
        metrics.audit_dropped.inc(batch.count(b"\n", whole))
        if not self._failing:
            fields = {"path": self._path, "why": os.strerror(self._why)}
            _log.error("cannot write to the audit log", extra=fields)
        self._failing = True
        self.close()

    def _rotates(self) -> bool:
        """Rotate the file if it is full; return whether another file has its name now. A file that cannot be
        renamed grows further: its lines matter more than its limit."""
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size < self._rotation.size:
            return False
        fcntl.flock(self._fd, fcntl.LOCK_EX)  # one process renames it
        try:
            if not self._is_renamed():
                self._shift()
        except OSError as error:
            if not self._stuck:
                extra = {"path": self._path, "why": os.strerror(error.errno or 0)}
                _log.error("the audit log is full but cannot be renamed; it keeps growing", extra=extra)
            self._stuck = True
            return False
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._stuck = False
        return True

    def _shift(self) -> None:
        """Rename `.1` to `.2`, and so on; the last file is dropped."""
        kept = range(1, self._rotation.files + 1)
        names = [str(self._path), *(f"{self._path}.{number}" for number in kept)]
        for older, newer in zip(names[:0:-1], names[-2::-1], strict=True):
            with suppress(FileNotFoundError):
                os.replace(newer, older)

    def _is_left(self) -> bool:
        """Whether the file was renamed before the previous lines, which still belonged to it."""
        left, self._renamed = self._renamed, self._is_renamed()
        return left and self._renamed

    def _is_renamed(self) -> bool:
        """Whether another file has the name now, or none."""
        if self._path == STDOUT:
            return False
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except FileNotFoundError:
            return True

    def _write(self, batch: bytes) -> int:
        """Append whole lines; return how many bytes are in the file. Raises OSError if the file cannot be
        inspected."""
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            return self._append(batch)  # a pipe cannot be truncated
        fcntl.flock(self._fd, fcntl.LOCK_EX)  # the other workers write to it too
        try:
            start = os.fstat(self._fd).st_size
            written = self._append(batch)
            whole = written if written == len(batch) else batch.rfind(b"\n", 0, written) + 1
            if whole < written and os.fstat(self._fd).st_size == start + written:
                os.ftruncate(self._fd, start + whole)
            return whole
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _append(self, batch: bytes) -> int:
        """Return how many bytes were written; `_why` is set if an error occurred."""
        left = memoryview(batch)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            self._why = error.errno or 0
        return len(batch) - len(left)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd, self._renamed = self._fd, -1, False
            with suppress(OSError):  # as on NFS, for what was written before; the descriptor is closed
                os.close(fd)


def open_audit_file(path: Path) -> int:
    """Open the log for appending and return its descriptor. Raises OSError."""
    if path == STDOUT:
        return os.dup(1)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def format_audit_time(ms: int) -> str:
    """Format milliseconds since 1970 for a line."""
    seconds, rest = divmod(ms, 1000)
    return f"{_second(seconds)}.{rest:03d}Z"


@lru_cache(maxsize=4)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
