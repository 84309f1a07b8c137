"""The confined processes a transform process has: one a build, kept while it is used.

Law: a process that dies, hangs, lacks memory or talks nonsense costs its sample one retry in a new one; then
the sample is bad. A module that cannot even be imported any more is a defect, not the sample's.
"""

from __future__ import annotations

import contextlib
import signal
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from meshd.telemetry import metrics
from meshd.transform.errors import BadSampleError
from meshd.transform.userops.calling import ConfinedProcess, DiedError, UnusableModuleError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meshd.transform.userops.calling import Confinement
    from meshd.transform.userops.modules import Module
    from meshwire.declarations import Declaration

KEPT: Final = 4
"""Processes a transform process keeps at a time, the last used."""


class ConfinedProcesses:
    """The confined processes of one transform process, by module; the last used are kept."""

    def __init__(self, confinement: Confinement) -> None:
        self._confinement = confinement
        self._processes: OrderedDict[str, ConfinedProcess] = OrderedDict()

    def __repr__(self) -> str:
        return f"<ConfinedProcesses {len(self._processes)}>"

    def apply(
        self, module: Module, declared: Declaration, args: Mapping[str, Any], key: int, value: Any
    ) -> Any:
        """What an op makes of a value. Raises BadSampleError, WrongOutputError, UnusableModuleError."""
        seconds = min(declared.seconds, self._confinement.seconds)
        with _watchdog_paused():
            for again in (True, False):
                process = None
                try:
                    process = self._process(module)
                    return process.apply(
                        declared.name, args, value, key=key, random=declared.random, seconds=seconds
                    )
                except DiedError as death:
                    self._bury(module, death)
                    if not again and process is None:
                        raise UnusableModuleError(f"its import fails now: {death.reason}") from death
                    if not again:
                        raise BadSampleError(f"{death.reason}, twice") from death
        raise AssertionError("unreachable")

    def _process(self, module: Module) -> ConfinedProcess:
        found = self._processes.get(module.version)
        if found is None:
            while len(self._processes) >= KEPT:
                self._processes.popitem(last=False)[1].close()
            memory = min(module.memory, self._confinement.memory)
            found = ConfinedProcess(module.name, module.source, memory, self._confinement)
            self._processes[module.version] = found
        self._processes.move_to_end(module.version)
        return found

    def _bury(self, module: Module, death: DiedError) -> None:
        metrics.user_op_processes.labels(death.kind).inc()
        dead = self._processes.pop(module.version, None)
        if dead is not None:
            dead.close()

    def close(self) -> None:
        """End them all."""
        while self._processes:
            self._processes.popitem()[1].close()


@contextlib.contextmanager
def _watchdog_paused() -> Iterator[None]:
    """The transform process' own limit of a row's time does not count what has a limit of its own."""
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
