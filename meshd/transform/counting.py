"""What ops did, counted: by the process that runs them, and from its replies in the metrics.

Law: a step of a chain is measured once, under the names of its ops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from meshd.telemetry import metrics
from meshd.transform.messages import OpUse

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.transform.messages import RenderReply


def size_of(value: Any) -> int:
    """Bytes of a value between two ops."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    return len(value) if isinstance(value, bytes | bytearray | memoryview) else 0


class Tally:
    """Use of ops, by name, over one slice. `clock`: seconds; `reading`: seconds spent on source bytes."""

    __slots__ = ("_uses", "clock", "reading")

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.reading = 0.0
        self._uses: dict[str, list[float]] = {}

    def __repr__(self) -> str:
        return f"<Tally {self.uses()}>"

    def add(self, op: str, seconds: float, taken: int, made: int, *, failed: bool = False) -> None:
        """One call of an op: its time, and the bytes of its value before and after."""
        use = self._uses.get(op)
        if use is None:
            use = self._uses[op] = [0, 0, 0.0, 0, 0]
        use[0] += 1
        use[1] += failed
        use[2] += seconds
        use[3] += taken
        use[4] += made

    def uses(self) -> tuple[OpUse, ...]:
        """All of it, by op."""
        return tuple(
            OpUse(op, int(calls), int(failures), seconds, int(taken), int(made))
            for op, (calls, failures, seconds, taken, made) in self._uses.items()
        )


def count_reply(reply: RenderReply) -> None:
    """A process's reply in the metrics."""
    metrics.transform_samples.labels("row").inc(len(reply.rendered) + len(reply.failures))
    metrics.transform_seconds.observe(reply.seconds)
    for failure in reply.failures:
        if failure.kind == "damaged":
            metrics.store_corrupt_reads.inc()
        metrics.transform_failures.labels(metrics.op_label(failure.op)).inc()
    for use in reply.ops:
        name = metrics.op_label(use.op)
        metrics.op_calls.labels(name).inc(use.calls)
        metrics.op_seconds.labels(name).inc(use.seconds)
        metrics.op_bytes.labels(name, "in").inc(use.bytes_in)
        metrics.op_bytes.labels(name, "out").inc(use.bytes_out)
