"""Parser of multipart/form-data with one file, as browsers send it, without I/O.

Law: bytes in; fields, then the file's bytes as they arrive. Memory is bounded by `MAX_FORM_BYTES` before
the file and by the length of a delimiter within it. Whatever follows the file is ignored, as in S3.
Invariant: the result does not depend on how the input was split.
https://www.rfc-editor.org/rfc/rfc7578, with RFC 2046 §5.1 for the delimiters.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    _Step = Callable[[], bool]

MAX_FORM_BYTES = 20 << 10  # S3's own limit for everything before the file
MAX_FIELDS = 200

_BOUNDARY = re.compile(
    r'multipart/form-data\s*(?:;.*?)?;\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))\s*(?:;|\Z)',
    re.IGNORECASE,
)
_NAME = re.compile(r';\s*name\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))', re.IGNORECASE)
_FILENAME = re.compile(r';\s*filename\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))', re.IGNORECASE)


class FormError(ValueError):
    """An invalid form; the message says why."""


class FormTooLargeError(FormError):
    """More than MAX_FORM_BYTES or MAX_FIELDS before the file."""


def read_boundary(content_type: str) -> str:
    """Return the boundary given in a Content-Type. Raises FormError."""
    match = _BOUNDARY.match(content_type.strip())
    boundary = "" if match is None else (match[1] or match[2] or "").rstrip()
    if not boundary or not boundary.isascii() or not boundary.isprintable():
        raise FormError("the Content-Type is not multipart/form-data with a boundary")
    return boundary


class FormReader:
    """Reads one form. Its states: search for a delimiter, the rest of its line, a part's head, a value, the
    file, done.

    `fields` (lower-case name → value) and `filename` are complete once `in_file` is true.
    """

    def __init__(self, boundary: str) -> None:
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.in_file = False
        self._delimiter = b"\r\n--" + boundary.encode()
        self._held = bytearray(b"\r\n")  # the first delimiter needs no preceding line
        self._taken = 0
        self._name = ""
        self._step: _Step = self._skip_preamble
        self._done = False

    def __repr__(self) -> str:
        return f"<FormReader {self._step.__name__.strip('_')}, {len(self.fields)} fields>"

    def feed(self, data: bytes) -> list[bytes]:
        """Return the pieces of the file in `data`, in order. Raises FormError, after which the reader
        cannot be used."""
        if self._done:
            return []
        return self._read_file(data) if self.in_file else self._read_form(data)

    def _read_form(self, data: bytes) -> list[bytes]:
        self._taken += len(data)
        self._held += data
        while self._step():
            pass
        return self._begin_file() if self.in_file else self._await_file()

    def _begin_file(self) -> list[bytes]:
        rest = bytes(self._held)
        self._held.clear()
        if self._taken - len(rest) > MAX_FORM_BYTES:
            raise _too_large()
        return self._read_file(rest)

    def _await_file(self) -> list[bytes]:
        if self._done:
            raise FormError("the form has no field named file")
        if self._taken > MAX_FORM_BYTES:
            raise _too_large()
        return []

    def finish(self) -> None:
        """Signal the end of the input. Raises FormError unless the file was complete."""
        if not self.in_file:
            raise FormError("the form has no field named file")
        if not self._done:
            raise FormError("the form ends before its last boundary")

    # Each step returns whether it made progress; all operate on `_held`, which is at most MAX_FORM_BYTES
    # long.

    def _skip_preamble(self) -> bool:
        return self._take_until(self._delimiter, self._read_delimiter_line) is not None

    def _read_delimiter_line(self) -> bool:
        """Consume the rest of a delimiter's line: `--` ends the form, white space is transport padding."""
        if len(self._held) >= 2 and self._held[:2] == b"--":
            self._done = True
            return False
        line = self._take_until(b"\r\n", self._read_head)
        if line is not None and line.strip(b" \t"):
            raise FormError("a boundary line has text after its boundary")
        if line is not None:
            self._held[:0] = b"\r\n"  # a part without headers begins with the empty line
        return line is not None

    def _read_head(self) -> bool:
        head = self._take_until(b"\r\n\r\n", self._read_value)
        if head is None:
            return False
        disposition = _disposition(_text(head))
        self._name = _parameter(_NAME, disposition).lower()
        if not self._name:
            raise FormError("a part has no name in its Content-Disposition")
        if self._name == "file":
            self.filename = _parameter(_FILENAME, disposition)
            self.in_file = True
        return not self.in_file

    def _read_value(self) -> bool:
        value = self._take_until(self._delimiter, self._read_delimiter_line)
        if value is None:
            return False
        if self._name in self.fields:
            raise FormError(f"the field {self._name[:64]!r} appears twice")
        if len(self.fields) >= MAX_FIELDS:
            raise FormTooLargeError(f"more than {MAX_FIELDS} fields")
        self.fields[self._name] = _text(value)
        return True

    def _take_until(self, end: bytes, then: _Step) -> bytes | None:
        found = self._held.find(end)
        if found < 0:
            return None
        taken = bytes(self._held[:found])
        del self._held[: found + len(end)]
        self._step = then
        return taken

    def _read_file(self, data: bytes) -> list[bytes]:
        """Return all bytes that cannot be part of the delimiter."""
        joined = bytes(self._held) + data if self._held else data
        end = joined.find(self._delimiter)
        self._done = end >= 0
        if not self._done:
            end = len(joined) - _overlap(joined, self._delimiter)
        self._held[:] = b"" if self._done else joined[end:]
        return [joined[:end] if end < len(joined) else joined] if end else []


def _too_large() -> FormTooLargeError:
    return FormTooLargeError(f"more than {MAX_FORM_BYTES} bytes come before the file")


def _overlap(data: bytes, delimiter: bytes) -> int:
    """Return how many bytes at the end of `data` may be the start of `delimiter`."""
    start = max(0, len(data) - len(delimiter) + 1)
    while (start := data.find(b"\r", start)) >= 0:
        if delimiter.startswith(data[start:]):
            return len(data) - start
        start += 1
    return 0


def _disposition(head: str) -> str:
    for line in head.split("\r\n"):
        name, colon, value = line.partition(":")
        if colon and name.strip().lower() == "content-disposition":
            return value
    raise FormError("a part has no Content-Disposition")


def _parameter(pattern: re.Pattern[str], disposition: str) -> str:
    """Unescape a parameter: browsers write a quote as %22 or after a backslash; other backslashes belong to
    Windows paths."""
    match = pattern.search(disposition)
    if match is None:
        return ""
    return (match[1] if match[1] is not None else match[2]).replace('\\"', '"')


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise FormError("a field is not UTF-8") from None
