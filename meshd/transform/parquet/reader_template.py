"""Readers of Parquet files, as the daemon sees them: they are forked from a template that has loaded pyarrow.

Law: a process has at most one template that starts readers, and a template reads no file itself. Every file
has a reader of its own, which ends with `Reader.end`. A template that nobody has used for a while ends
(`take_unused_template`); one that has died or does not answer is replaced.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from meshd.transform.parquet.messages import STARTED
from meshd.transform.sandbox.sandbox_process import ENVIRONMENT, package_paths

if TYPE_CHECKING:
    from collections.abc import Mapping

_CODE = "from meshd.transform.parquet.child_main import main; main()"
_ARROW: Final = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "ARROW_IO_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
_ENDING_SECONDS: Final = 10.0


class TemplateEndedError(Exception):
    """The template ended before it started a reader; `code` is its exit code, as of `subprocess`."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit {code}")
        self.code = code


def _receive(status: socket.socket) -> bytes:
    """Receive one message; nothing if the template has ended. Raises TimeoutError."""
    try:
        return status.recv(64)
    except ConnectionError:
        return b""


class Reader:
    """The process that reads one file. Not thread-safe."""

    def __init__(self, template: ReaderTemplate, status: socket.socket) -> None:
        self._template, self._status = template, status

    def __repr__(self) -> str:
        return f"<Reader of {self._template}>"

    def exit_code(self) -> int:
        """Wait for the end of a process that has closed its socket; return its exit code, as of
        `subprocess`. Raises TimeoutError, TemplateEndedError."""
        self._status.settimeout(_ENDING_SECONDS)
        told = _receive(self._status)
        if not told:
            raise TemplateEndedError(self._template.wait())
        return int(told)

    def end(self) -> None:
        """Kill the process, if it runs, and wait. Idempotent."""
        if self._status.fileno() < 0:
            return
        with self._status as status, suppress(OSError):  # the template has died, and its readers with it
            status.settimeout(_ENDING_SECONDS)
            try:
                status.shutdown(socket.SHUT_WR)
                while status.recv(64):
                    pass
            except TimeoutError:
                _replace(self._template)
        self._template.release()

    def abandon(self) -> None:
        """As `end`, without waiting: the template does not answer."""
        self._status.close()
        self._template.release()


class ReaderTemplate:
    """One process to fork readers from. Safe to use from any thread."""

    def __init__(self, code: str) -> None:
        """Start the process. Raises OSError."""
        self.code = code
        self.used = True
        """Whether a reader was started, or ended, since this was last set to False."""
        self.has_answered = False
        self._readers, self._replaced = 0, False
        self._lock = threading.Lock()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-s", "-P", "-c", code, str(theirs.fileno())],
                    env=ENVIRONMENT | _ARROW | {"PYTHONPATH": os.pathsep.join(package_paths())},
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                )
        except BaseException:
            self._requests.close()
            raise

    def __repr__(self) -> str:
        return f"<ReaderTemplate {self.pid}>"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_idle(self) -> bool:
        """Whether no reader runs."""
        return not self._readers

    def start_reader(self, link: socket.socket, settings: Mapping[str, object], seconds: float) -> Reader:
        """Start a process that reads a file by `link`. Raises OSError if there is no room for it,
        TimeoutError after `seconds`, TemplateEndedError."""
        status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self._lock:
            self._readers += 1
        reader = Reader(self, status)
        try:
            with theirs:
                self._send(settings, link, theirs)
            status.settimeout(seconds)
            self._take_answer(_receive(status))
        except BaseException:
            reader.abandon()
            raise
        return reader

    def _send(self, settings: Mapping[str, object], *files: socket.socket) -> None:
        numbers = [file.fileno() for file in files]
        try:
            socket.send_fds(self._requests, [json.dumps(settings).encode()], numbers)
        except OSError as error:
            if isinstance(error, ConnectionError) or self._requests.fileno() < 0:
                raise TemplateEndedError(self.wait()) from None
            raise

    def _take_answer(self, told: bytes) -> None:
        if not told:
            raise TemplateEndedError(self.wait())
        self.has_answered = True
        if told != STARTED:
            raise OSError(int(told), os.strerror(int(told)))

    def release(self) -> None:
        """Note that a reader has ended."""
        with self._lock:
            self._readers -= 1
            unneeded = self._replaced and not self._readers
        self.used = True
        if unneeded:
            self.kill()
            self.close()

    def end_with_readers(self) -> None:
        """End it as soon as it has no reader: they end with it."""
        with self._lock:
            self._replaced = True
            if self._readers:
                return
        self.kill()
        self.close()

    def wait(self) -> int:
        """Wait for the end of a process that does not answer any more; return its exit code."""
        try:
            return self._process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def kill(self) -> None:
        """Kill it; its readers end with it."""
        self._process.kill()

    def close(self) -> None:
        """End it, and its readers. Idempotent."""
        self._requests.close()
        self.wait()


_lock = threading.Lock()
_current: list[ReaderTemplate] = []


def start_reader(link: socket.socket, settings: Mapping[str, object], seconds: float) -> Reader:
    """Start a process that reads a file by `link`, from this process's template.

    Raises OSError if there is no room for it, TimeoutError after `seconds`, TemplateEndedError if two
    templates in a row ended. After a TimeoutError, the next file is read from another template.
    """
    for last in (False, True):
        template = _template()
        try:
            return template.start_reader(link, settings, seconds)
        except TemplateEndedError:
            _discard(template)
            if last:
                raise
        except TimeoutError:
            if template.has_answered:
                _replace(template)
            else:  # no reader depends on it
                _discard(template)
            raise
    raise AssertionError("unreachable")


def _template() -> ReaderTemplate:
    with _lock:
        if _current and _current[0].code != _CODE:
            _current.pop().close()
        if not _current:
            _current.append(ReaderTemplate(_CODE))
        _current[0].used = True  # before anybody takes it for unused
        return _current[0]


def _discard(template: ReaderTemplate) -> None:
    _forget(template)
    template.kill()
    template.close()


def _replace(template: ReaderTemplate) -> None:
    """Start further readers from another template: this one does not answer, but its readers may run."""
    _forget(template)
    template.end_with_readers()


def _forget(template: ReaderTemplate) -> None:
    with _lock:
        if template in _current:
            _current.remove(template)


def take_unused_template() -> ReaderTemplate | None:
    """Return the template of this process for the caller to close, if nothing has used it since the last
    call; the next file is read by another."""
    with _lock:
        if not _current:
            return None
        if _current[0].used or not _current[0].is_idle:
            _current[0].used = False
            return None
        return _current.pop()


def close_template() -> None:
    """End the template of this process, and its readers (blocking)."""
    with _lock:
        if _current:
            _current.pop().close()


def template_pid() -> int:
    """Return the process id of this process's template; 0 if it has none."""
    with _lock:
        return _current[0].pid if _current else 0
