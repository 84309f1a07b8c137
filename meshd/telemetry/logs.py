"""Log lines (one per event to stderr, text or JSON, without secrets) and the runtime log level.

Every line passes `SecretMasker`: known secrets, signatures and session tokens become ***. Use
`logging.getLogger("meshd.…")` with `extra={...}` for fields. The runtime log level is one 64-bit word in
shared memory, allocated before the first fork, so no process reads it half written. A process reads it when
it configures logging and on SIGUSR1. It does not outlive the supervisor, which also ends a temporary level.
"""

from __future__ import annotations

import json
import logging
import mmap
import re
import signal
import sys
import warnings
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TextIO

import msgspec

from meshd.config.options import LOG_LEVELS
from meshwire.phrases import open_files_message

if TYPE_CHECKING:
    from collections.abc import Iterable


request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Set by the HTTP server for the duration of a request; every line then carries it. Nothing else reads it."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_SIGNATURES = re.compile(
    r"""(?ix)
    (?P<name> x-amz-(?:signature|security-token|credential) | signature | session[_-]?token | password
        | secret (?:[_-]?(?:access[_-]?)?key)? )
    (?P<gap> ["']? \s* [=:] \s* ["']? )
    (?P<value> [^\s"'&,;<>]{4,} )"""
)
# Secret keys and session tokens that nodes issue.
_ISSUED_SECRETS = re.compile(r"mss-[\w-]{40}|mesht1\.[\w-]{16,}")
_MASK = "***"
_MAX_LINE = 8192


class SecretMasker:
    """Masks secrets in text: registered ones, and values whose name or shape suggests a secret."""

    def __init__(self) -> None:
        self._known: re.Pattern[str] | None = None
        self._secrets: set[str] = set()

    def add_secrets(self, secrets: Iterable[str]) -> None:
        """Mask these from now on. Short ones are ignored, since they would mask ordinary words, as are those
        that are masked by their shape."""
        new = {secret for secret in secrets if len(secret) >= 6 and not _ISSUED_SECRETS.fullmatch(secret)}
        if new <= self._secrets:
            return
        self._secrets |= new
        ordered = sorted(self._secrets, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def mask_text(self, text: str) -> str:
        """Return `text` with secrets masked, on one line, of bounded length."""
        if self._known is not None:
            text = self._known.sub(_MASK, text)
        text = _ISSUED_SECRETS.sub(_MASK, text)
        text = _SIGNATURES.sub(rf"\g<name>\g<gap>{_MASK}", text)
        if len(text) > _MAX_LINE:
            text = text[:_MAX_LINE] + "…"
        return text.replace("\r", "\\r").replace("\n", "\\n")


secret_masker = SecretMasker()


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    extra = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    if identifier := request_id.get():
        extra.setdefault("request_id", identifier)
    return extra


class _Formatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def _time(self, record: logging.LogRecord) -> str:
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"

    def _failure(self, record: logging.LogRecord) -> str:
        """Return the traceback of the exception; for want of file descriptors, what to do instead."""
        if not record.exc_info:
            return ""
        error = record.exc_info[1]
        return (error and open_files_message(error)) or self.formatException(record.exc_info)


class TextFormatter(_Formatter):
    """`TIME LEVEL PROCESS logger: message key=value …` on one line."""

    def format(self, record: logging.LogRecord) -> str:
        head = (
            f"{self._time(record)} {record.levelname:<7} {self._process} {record.name}: {record.getMessage()}"
        )
        parts = [head, *(f"{name}={_plain(value)}" for name, value in _fields(record).items())]
        if failure := self._failure(record):
            parts.append(f"exception={json.dumps(failure)}")
        return secret_masker.mask_text(" ".join(parts))


class JsonFormatter(_Formatter):
    """One JSON object per line: time, level, process, logger, message, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self._time(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        } | _fields(record)
        if failure := self._failure(record):
            line["exception"] = failure
        return json.dumps({name: _clean(value) for name, value in line.items()}, ensure_ascii=False)


def notice_line(message: str) -> str:
    """Return a line for standard output as JSON, with the fields of a log line. It may show a secret that is
    shown once, so nothing in it is masked."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    line = {"time": now, "level": "info", "process": "supervisor", "logger": "meshd", "message": message}
    return json.dumps(line)


def _clean(value: object) -> object:
    return value if isinstance(value, int | float | bool | None) else secret_masker.mask_text(str(value))


def _plain(value: object) -> str:
    text = str(value)
    return text if re.fullmatch(r"[^\s\"=]+", text) else json.dumps(text, ensure_ascii=False)


def configure(style: str, level: str, process: str, *, stream: TextIO | None = None) -> None:
    """Send every log record and warning of this process to stderr in `style` (text or json)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(process) if style == "json" else TextFormatter(process))
    logging.getLogger().handlers[:] = [handler]
    # Unreadable files are reported, with their name, by the code that reads them.
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    logging.captureWarnings(capture=True)
    set_level(level)


def set_level(level: str) -> None:
    """Log records of at least this level from now on."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel(max(logging.WARNING, root.level))
    warnings.simplefilter("default" if level == "debug" else "ignore", DeprecationWarning)


_LEVEL_BITS: Final = 3  # bits of the level; the others are its end, in milliseconds of the monotonic clock


class RequestedLevel(msgspec.Struct, frozen=True):
    """A requested level, and the second of the monotonic clock at which it ends."""

    level: str
    until: float


class RuntimeLogLevel:
    """The requested level, in memory shared by all processes of the node."""

    def __init__(self) -> None:
        self._word = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")

    def __repr__(self) -> str:
        return f"<RuntimeLogLevel {self.requested()}>"

    def requested(self) -> RequestedLevel | None:
        """Return the requested level; None while the configured one holds."""
        word = self._word[0]
        if not word:
            return None
        return RequestedLevel(LOG_LEVELS[word & ((1 << _LEVEL_BITS) - 1)], (word >> _LEVEL_BITS) / 1000)

    def request_level(self, level: str, until: float) -> None:
        """Request `level`, one of LOG_LEVELS, until that second of the monotonic clock. Notifies no
        process."""
        self._word[0] = round(until * 1000) << _LEVEL_BITS | LOG_LEVELS.index(level)

    def reset_level(self) -> None:
        """Return to the configured level. Notifies no process."""
        self._word[0] = 0


runtime_level: Final = RuntimeLogLevel()


def follow_runtime_level(configured: str) -> None:
    """Make this process log at the requested level or, without one, at `configured`; checked now and on every
    SIGUSR1. Call it in the main thread."""

    def look(*_: object) -> None:
        asked = runtime_level.requested()
        set_level(asked.level if asked else configured)

    signal.signal(signal.SIGUSR1, look)
    signal.siginterrupt(signal.SIGUSR1, False)
    look()
