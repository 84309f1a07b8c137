"""Probes of disks that may not return: while a device hangs, the thread that probes it waits for minutes.

Law: at most one probe of a path is under way; nobody waits longer than PROBE_WAIT for one. A disk is silent
from SILENT_SECONDS on: the log says so once, and once more when it answers.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from meshd.util.clock import Clock

_log = logging.getLogger(__name__)
PROBE_WAIT: Final = 5.0  # seconds
SILENT_SECONDS: Final = 15.0  # a busy disk, with many writes before the probe's own, may take several


class _Probe:
    def __init__(self, task: asyncio.Future[Any], began: float, began_ms: int) -> None:
        self.task, self.began, self.began_ms = task, began, began_ms
        self.told = False


class DiskProbes:
    """The probes under way. `run`: runs a blocking call in a thread."""

    def __init__(self, clock: Clock, run: Callable[..., Awaitable[Any]]) -> None:
        self._clock, self._run = clock, run
        self._running: dict[Path, _Probe] = {}

    def __repr__(self) -> str:
        return f"<DiskProbes, under way: {sorted(map(str, self._running))}>"

    async def probe(self, path: Path, call: Callable[[], None]) -> bool:
        """Starts `call`, or looks at the one of this path that is under way.

        Returns True if it has ended, False if it goes on. Raises its OSError.
        """
        probe, wait = self._running.get(path), 0.0
        if probe is None:
            task, wait = asyncio.ensure_future(self._run(call)), PROBE_WAIT
            probe = self._running[path] = _Probe(task, self._clock.monotonic(), self._clock.now_ms())
        await asyncio.wait([probe.task], timeout=wait)
        if not probe.task.done():
            self._warn(path, probe)
            return False
        del self._running[path]
        probe.task.result()
        if probe.told:
            _log.warning("a disk answers again", extra={"disk": str(path), "seconds": self._age(probe)})
        return True

    def silent_seconds(self) -> float:
        """Returns for how long the disk that is silent longest has been so; 0 if all answer."""
        return max(map(self._age, filter(self._is_silent, self._running.values())), default=0.0)

    def silent_since(self, path: Path) -> int | None:
        """Returns when a silent disk was asked what it has not answered, in ms since 1970; None if it
        answers."""
        probe = self._running.get(path)
        return probe.began_ms if probe is not None and self._is_silent(probe) else None

    def _is_silent(self, probe: _Probe) -> bool:
        # After a pause of the whole node an old probe may have ended without anybody having looked at it.
        return not probe.task.done() and self._age(probe) >= SILENT_SECONDS

    def _age(self, probe: _Probe) -> float:
        return self._clock.monotonic() - probe.began

    def _warn(self, path: Path, probe: _Probe) -> None:
        if not probe.told and self._is_silent(probe):
            probe.told = True
            _log.error(
                "a disk does not answer: reads and writes of it hang",
                extra={"disk": str(path), "seconds": self._age(probe)},
            )
