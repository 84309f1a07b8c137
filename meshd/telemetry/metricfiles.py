"""Files in which the processes of a node share their metrics, on a disk that may be full.

Law: room is asked for before it is written to. These files are mapped into memory: on a full disk a write to
room that was not promised ends the process (SIGBUS). Invariant: what finds no room is not told meanwhile, and
told in full with the first change that finds some, for whoever counts keeps the value.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, Final

from prometheus_client import values
from prometheus_client.mmap_dict import MmapedDict

from meshd.kit.clock import SystemClock

_FIRST: Final = 1 << 16  # bytes of a new file
_EMPTY: Final = struct.pack("i", 8)  # a file's head: how much of it is used, the head included
_clock = SystemClock()
_ENTRY: Final = 32  # bytes of a series beside its name, at most


class PromisedDict(MmapedDict):  # type: ignore[misc]  # the library has no types here
    """A file of the library's format that grows only by what the disk promised."""

    def __init__(self, filename: str, read_mode: bool = False) -> None:
        self._path, self._read = Path(filename), read_mode
        self._f: Any = None
        self._m: Any = None
        self._positions: dict[str, int] = {}
        self._capacity = 0

    def _open(self) -> None:
        """Raises OSError when there is no room."""
        if not self._path.exists():
            draft = self._path.with_suffix(".new")
            try:
                with draft.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, _FIRST)
                    file.write(_EMPTY)
                draft.replace(self._path)  # a scrape sees a whole file or none
            except OSError:
                draft.unlink(missing_ok=True)
                raise
        super().__init__(str(self._path), self._read)

    def _init_value(self, key: str) -> None:
        if self._f is None:
            self._open()
            if key in self._positions:
                return
        needed, capacity = self._used + len(key.encode()) + _ENTRY, self._capacity
        while needed > capacity:
            os.posix_fallocate(self._f.fileno(), capacity, capacity)
            capacity *= 2
        super()._init_value(key)

    def read_value(self, key: str) -> tuple[float, float]:
        try:
            value, stamp = super().read_value(key)
        except OSError:
            return 0.0, 0.0
        return value, stamp

    def write_value(self, key: str, value: float, timestamp: float) -> None:
        """The library's times are the wall clock's, which may be set back: the latest value would be one from
        before, for as long as it was set back by."""
        try:
            super().write_value(key, value, _clock.monotonic() if timestamp else 0.0)
        except OSError:
            return


def install() -> None:
    """Have the library use it. Before the first metric is made."""
    values.MmapedDict = PromisedDict
