"""Real transform processes and a pool over them, replaced when they die as the supervisor does."""

from __future__ import annotations

import asyncio
import io
import multiprocessing
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from meshd.rpc.unix_messages import listen
from meshd.transform import worker
from meshd.transform.compiler import complete_spec
from meshd.transform.pool import TransformPool
from meshd.transform.resource_limits import RowLimits
from meshwire.plan.plan_spec import parse_spec, spec_document
from meshwire.strict_json import canonical_json
from tests.support.bounded_wait import await_end

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator
    from pathlib import Path

FORK = multiprocessing.get_context("fork")
USUAL = RowLimits()


def text_of(ops: list[dict[str, Any]], fields: list[str]) -> str:
    spec = complete_spec(parse_spec({"seed": 11, "ops": ops}), lambda field: b"")
    return canonical_json({"spec": spec_document(spec), "fields": fields}).decode()


def jpeg(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    buffer = io.BytesIO()
    small = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    small.resize((97 + seed, 75)).save(buffer, "JPEG")
    return buffer.getvalue()


class Crew:
    """Transform processes on sockets in a folder; a dead one is replaced when asked."""

    def __init__(self, folder: Path, count: int, limits: RowLimits = USUAL) -> None:
        self._limits, self.deaths = limits, 0
        self.sockets = [folder / f"t{number}.sock" for number in range(count)]
        self._listeners = [listen(path) for path in self.sockets]
        self.processes = [self._start(listener) for listener in self._listeners]

    def _start(self, listener: socket.socket) -> Any:
        child = FORK.Process(target=worker.main, args=(listener, self._limits), daemon=True)
        child.start()
        return child

    async def watch(self) -> None:
        """Replace the dead, as the supervisor does."""
        while True:
            for number, child in enumerate(self.processes):
                if not child.is_alive():
                    await_end(child)
                    self.deaths += 1
                    self.processes[number] = self._start(self._listeners[number])
            await asyncio.sleep(0.01)

    def close(self) -> None:
        for child in self.processes:
            child.kill()
            await_end(child)
            child.close()
        for listener in self._listeners:
            listener.close()


@asynccontextmanager
async def running(
    folder: Path, count: int = 2, limits: RowLimits = USUAL
) -> AsyncIterator[tuple[Crew, TransformPool]]:
    crew = Crew(folder, count, limits)
    pool = TransformPool(crew.sockets)
    pool.start()
    watching = asyncio.create_task(crew.watch())
    try:
        yield crew, pool
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await pool.aclose()
        crew.close()
