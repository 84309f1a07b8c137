"""Figures as rows of a Markdown table."""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.daemons import Daemon


@dataclass
class Table:
    """Prints each figure when it is known. `figures`: scene and name → value, for tests."""

    out: TextIO
    figures: dict[tuple[str, str], float] = field(default_factory=dict)

    def add(self, scene: str, name: str, value: float, unit: str) -> None:
        """One figure."""
        self.figures[scene, name] = value
        shown = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        print(f"| {scene} | {name} | {shown} {unit} |", file=self.out, flush=True)

    @contextmanager
    def seconds(self, scene: str, name: str) -> Iterator[None]:
        """How long the block takes."""
        began = time.perf_counter()
        yield
        self.add(scene, name, time.perf_counter() - began, "s")

    def median_ms(self, scene: str, name: str, act: Callable[[], object], times: int = 21) -> None:
        """The median of some calls."""
        taken = []
        for _ in range(times):
            began = time.perf_counter()
            act()
            taken.append(time.perf_counter() - began)
        self.add(scene, name, sorted(taken)[times // 2] * 1e3, "ms")

    def memory(self, scene: str, name: str, daemon: Daemon) -> None:
        """Memory of all processes of the node without pages of files: what the kernel cannot take back."""
        self.add(scene, name, private_memory(daemon) / 2**20, "MiB")


def private_memory(daemon: Daemon) -> int:
    """Anonymous and shared memory of a node's processes, in bytes; pages that are shared count once."""
    supervisor = psutil.Process(daemon.pid)
    return sum(private_bytes(process.pid) for process in (supervisor, *supervisor.children(recursive=True)))


def private_bytes(pid: int) -> int:
    """Of one process: nothing, if it has ended since it was found, as what reads a Parquet file does."""
    with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/smaps_rollup") as file:
        rows = dict(line.split(":", 1) for line in file if ":" in line and "Pss" in line)
        return sum(int(rows[name].split()[0]) << 10 for name in ("Pss_Anon", "Pss_Shmem") if name in rows)
    return 0
