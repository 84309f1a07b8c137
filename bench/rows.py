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
    small_keys: int = 5_000
    listed_keys: int = 100_000
    large_bytes: int = 64 * MIB
    photographs: int = 4_096
    batch: int = 256
    loader_rounds: int = 3
    memory_bytes: int = 1 << 30
    memory_seconds: int = 20
    memory_connections: int = 64


FULL = Scale()
QUICK = Scale(
    rounds=1,
    seconds=1,
    small_keys=64,
    listed_keys=2_000,
    large_bytes=4 * MIB,
    photographs=128,
    batch=32,
    loader_rounds=1,
    memory_bytes=32 * MIB,
    memory_seconds=2,
    memory_connections=8,
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `bar`: the least ratio to SeaweedFS that the project asks of `meshd`, or
    None.
    """

    name: str
    title: str
    verb: Verb
    size: int
    connections: int
    keys: int
    servers: tuple[str, ...]
    bar: float | None = None

    @property
    def by_bytes(self) -> bool:
        """Whether GB/s is the figure of interest rather than requests a second."""
        return self.verb != "LIST" and self.size >= MIB


def store_rows(scale: Scale) -> tuple[Row, ...]:
    """All rows in the order of the report."""
    reading = ("seaweedfs", "meshd", "nginx")
    writing = ("seaweedfs", "meshd", "meshd-relaxed")
    large = scale.large_bytes
    title = f"{large // MIB} MiB"
    return (
        Row("get-10k", "GET 10 KiB × 16", "GET", 10 * KIB, 16, scale.small_keys, reading, 1.0),
        Row("get-1m", "GET 1 MiB × 8", "GET", MIB, 8, 64, reading),
        Row("get-64m", f"GET {title} × 4", "GET", large, 4, 8, reading, 0.9),
        Row("put-10k", "PUT 10 KiB × 16", "PUT", 10 * KIB, 16, scale.small_keys, writing),
        Row("put-64m", f"PUT {title} × 4", "PUT", large, 4, 4, writing),
        Row(
            "list",
            f"LIST 1,000 of {scale.listed_keys:,} × 4",
            "LIST",
            0,
            4,
            scale.listed_keys,
            ("seaweedfs", "meshd"),
        ),
    )
