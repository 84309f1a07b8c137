"""How much of each thing there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Counts:
    """`keys` of one bucket, `buckets` of one user, `parts` of one upload, `versions` of one key, `clients`
    that ask for the most expensive allowed thing at once, next to `reads` of a small object."""

    keys: int = 1_000_000
    buckets: int = 10_000
    parts: int = 10_000
    versions: int = 100_000
    clients: int = 200
    reads: int = 101

    @classmethod
    def quick(cls) -> Self:
        """Sizes of a test."""
        return cls(keys=1_500, buckets=20, parts=20, versions=1_500, clients=8, reads=5)
