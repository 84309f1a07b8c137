"""File changes: tells an event loop that a file was written, by any process of the machine (inotify)."""

from __future__ import annotations

import asyncio
import ctypes
import os
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

_MODIFIED: Final = 2  # IN_MODIFY
_libc = ctypes.CDLL(None, use_errno=True)


class FileChanges:
    """Calls `changed` on the event loop after each write to a file, while the block runs. Raises OSError if
    the machine cannot say so: it has too many watches, or is not Linux."""

    def __init__(self, path: Path, changed: Callable[[], None]) -> None:
        self._changed, self._loop = changed, asyncio.get_running_loop()
        try:
            self._fd = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        except AttributeError as error:
            raise OSError("no inotify here") from error
        try:
            _checked(_libc.inotify_add_watch(self._fd, os.fsencode(path), _MODIFIED))
        except OSError:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        self._loop.add_reader(self._fd, self._on_readable)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _on_readable(self) -> None:
        os.read(self._fd, 65536)
        self._changed()


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
