"""Pool of sandbox processes: one per module of user ops, for one transform process.

A process that dies, hangs or runs out of memory costs its sample one retry in a new process; after that the
sample is bad. A module that can no longer be imported is a defect of the module.
"""

from __future__ import annotations

import contextlib
import signal
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from meshd.telemetry import metrics
from meshd.transform.errors import BadSampleError
from meshd.transform.sandbox.sandbox_process import SandboxDiedError, SandboxProcess, UnusableModuleError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meshd.transform.sandbox.sandbox_process import SandboxPolicy
    from meshd.transform.sandbox.user_op_definitions import UserModule
    from meshwire.plan.op_declarations import OpDeclaration

_KEPT: Final = 4


class SandboxProcessPool:
    """The sandbox processes of one transform process, by module; keeps the most recently used ones."""

    def __init__(self, confinement: SandboxPolicy) -> None:
        self._confinement = confinement
        self._processes: OrderedDict[str, SandboxProcess] = OrderedDict()

    def __repr__(self) -> str:
        return f"<SandboxProcessPool {len(self._processes)}>"

    def run_op(
        self, module: UserModule, declared: OpDeclaration, args: Mapping[str, Any], key: int, value: Any
    ) -> Any:
        """Return an op's result for a value. Raises BadSampleError, WrongOutputError, UnusableModuleError."""
        seconds = min(declared.seconds, self._confinement.seconds)
        with _watchdog_paused():
            for again in (True, False):
                process = None
                try:
                    process = self._process(module)
                    return process.run_op(
                        declared.name, args, value, key=key, random=declared.random, seconds=seconds
                    )
                except SandboxDiedError as death:
                    self._discard_dead(module, death)
                    if not again and process is None:
                        raise UnusableModuleError(
                            f"it cannot be imported any more: {death.reason}"
                        ) from death
                    if not again:
                        advice = self._advice(death, module, declared)
                        raise BadSampleError(f"{death.reason}, twice{advice}") from death
        raise AssertionError("unreachable")

    def _advice(self, death: SandboxDiedError, module: UserModule, declared: OpDeclaration) -> str:
        """Return how an op gets more of what it ran out of."""
        granted = self._confinement
        if death.kind == "time" and declared.seconds < granted.seconds:
            return f": write @op(…, seconds=N), on this node at most {granted.seconds:g}"
        if death.kind == "memory" and module.memory < granted.memory:
            return f": write @op(…, memory=BYTES), on this node at most {granted.memory >> 20} MiB"
        if death.kind == "time":
            return ": the node grants no more (meshd serve --user-op-seconds)"
        return ": the node grants no more (meshd serve --user-op-memory)" if death.kind == "memory" else ""

    def _process(self, module: UserModule) -> SandboxProcess:
        found = self._processes.get(module.version)
        if found is None:
            while len(self._processes) >= _KEPT:
                self._processes.popitem(last=False)[1].close()
            memory = min(module.memory, self._confinement.memory)
            found = SandboxProcess(
                module.name, module.source, memory, self._confinement, module.wheels, module.objects
            )
            self._processes[module.version] = found
        self._processes.move_to_end(module.version)
        return found

    def _discard_dead(self, module: UserModule, death: SandboxDiedError) -> None:
        metrics.user_op_processes.labels(death.kind).inc()
        dead = self._processes.pop(module.version, None)
        if dead is not None:
            dead.close()

    def close(self) -> None:
        """Kill all processes."""
        while self._processes:
            self._processes.popitem()[1].close()


@contextlib.contextmanager
def _watchdog_paused() -> Iterator[None]:
    """Pause the transform process' own time limit per row, because a sandbox call has a limit of its own."""
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
