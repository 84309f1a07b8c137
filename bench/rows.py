"""The rows of the store side, as data: what is asked, over how many connections, of which servers.

`Scale` holds everything that `--quick` makes smaller; a quick run's figures are not for the record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verb = Literal["GET", "PUT", "LIST"]
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of a run; seconds are for each reading."""

    rounds: int = 5
    seconds: int = 4
    reading: float = 2.0  # of a loader that stands ready
    small_keys: int = 5_000
    listed_keys: int = 1_000_000
    large_bytes: int = 64 * MIB
    photographs: int = 4_096
    batch: int = 256
    loader_rounds: int = 1
    warmed: bool = True
    accelerated: bool = True
    memory_bytes: int = 256 * MIB  # 64 of them reserve 16 GiB of disk, twice while they replace each other
    memory_seconds: int = 20
    memory_connections: int = 64
    gathered: int = 1_000
    confined: int = 2_000
    resharded: int = 2 << 30
    cold_bytes: int = 1 << 30
    cached_items: int = 2_000
    restored: int = 1 << 30
    series_chunks: int = 4_096
    tokens: int = 1 << 24
    raw_samples: int = 400_000
    table_rows: int = 2_000_000
    media_files: int = 256
    checkpoint: int = 256 * MIB
    downloaded: int = 40 * MIB
    rotational: int = 6_000
    rotational_long: int = 36_000
    rotational_reads: int = 1_000
    foretold: int = 8_192


FULL = Scale()
QUICK = Scale(
    rounds=1,
    seconds=1,
    reading=0.25,
    small_keys=64,
    listed_keys=2_000,
    large_bytes=4 * MIB,
    photographs=128,
    batch=32,
    loader_rounds=1,
    warmed=False,
    accelerated=False,
    memory_bytes=8 * MIB,
    memory_seconds=1,
    memory_connections=4,
    gathered=100,
    confined=80,
    resharded=8 * MIB,
    cold_bytes=24 * MIB,
    cached_items=200,
    restored=8 * MIB,
    series_chunks=256,
    tokens=1 << 22,
    raw_samples=20_000,
    table_rows=160_000,
    media_files=32,
    checkpoint=4 * MIB,
    downloaded=2 * MIB,
    rotational=128,
    rotational_long=256,
    rotational_reads=32,
    foretold=512,
)


@dataclass(frozen=True, slots=True)
class Bar:
    """What the project asks of itself: `mine` does at least `least` times what `peer` does, in the row's main
    figure."""

    mine: str
    peer: str
    least: float


@dataclass(frozen=True, slots=True)
class CpuBar:
    """What the daemon's CPU time may be for a request: `most` microseconds, and `ratio` times what SeaweedFS
    takes in the same run; None: no bar."""

    most: float | None = None
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `kept`: the servers keep this row's bucket from run to run, for filling it takes
    minutes. `cpu`: what is asked of the CPU time for a request."""

    name: str
    title: str
    verb: Verb
    size: int
    connections: int
    keys: int
    servers: tuple[str, ...]
    bars: tuple[Bar, ...] = ()
    kept: bool = False
    cpu: CpuBar = CpuBar()

    @property
    def by_bytes(self) -> bool:
        """Whether GB/s is the figure of interest rather than requests a second."""
        return self.verb != "LIST" and self.size >= MIB


def _ahead(least: float, mine: str = "meshd", peer: str = "seaweedfs") -> Bar:
    return Bar(mine, peer, least)


def store_rows(scale: Scale) -> tuple[Row, ...]:
    """All rows in the order of the report."""
    reading = ("seaweedfs", "meshd", "nginx")
    writing = ("seaweedfs", "meshd", "meshd-relaxed")
    large = scale.large_bytes
    title, small = f"{large // MIB} MiB", (_ahead(0.7), _ahead(1.2, "meshd-relaxed"))
    fast, limit = (_ahead(1.0), _ahead(0.7, peer="nginx")), (_ahead(1.0), _ahead(0.9, peer="nginx"))
    keys = scale.small_keys
    return (
        Row(
            "get-10k",
            "GET 10 KiB × 16",
            "GET",
            10 * KIB,
            16,
            keys,
            reading,
            (_ahead(1.5),),
            cpu=CpuBar(100, 0.4),
        ),
        Row("get-1m", "GET 1 MiB × 8", "GET", MIB, 8, 64, reading, fast, cpu=CpuBar(ratio=1.0)),
        Row("get-64m", f"GET {title} × 4", "GET", large, 4, 8, reading, limit),
        Row("put-10k", "PUT 10 KiB × 16", "PUT", 10 * KIB, 16, keys, writing, small, cpu=CpuBar(500)),
        Row("put-64m", f"PUT {title} × 4", "PUT", large, 4, 4, writing, (_ahead(1.0),)),
        _list_row("list-few", 1_000),
        _list_row("list", scale.listed_keys),
    )


def _list_row(name: str, keys: int) -> Row:
    title, servers = f"LIST 1,000 of {keys:,} × 4", ("seaweedfs", "meshd")
    return Row(name, title, "LIST", 0, 4, keys, servers, (_ahead(3.0),), kept=True)
