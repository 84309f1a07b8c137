"""What must stay: pins, declared working sets, and data that is not at the origin yet.

Law: a guard is a bucket and a prefix of its keys. A pin is a person's, a working set that of who declared it;
both hold until they are taken back. `hints` off: working sets are not heard.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshd.cache.policies.interface import Item


class Guards:
    """Who may not go."""

    def __init__(self) -> None:
        self.dirty: set[Item] = set()
        self._pins: set[Item] = set()
        self._declared: dict[str, frozenset[Item]] = {}
        self._prefixes: dict[str, tuple[str, ...]] = {}

    def __repr__(self) -> str:
        return f"<Guards {len(self._pins)} pins, {len(self._declared)} sets, {len(self.dirty)} dirty>"

    def pin(self, bucket: str, prefix: str) -> None:
        self._pins.add((bucket, prefix))
        self._gather()

    def unpin(self, bucket: str, prefix: str) -> None:
        self._pins.discard((bucket, prefix))
        self._gather()

    def declare(self, name: str, prefixes: frozenset[Item]) -> None:
        """A working set, as (bucket, prefix); the same name again replaces it."""
        self._declared[name] = prefixes
        self._gather()

    def withdraw(self, name: str) -> None:
        self._declared.pop(name, None)
        self._gather()

    def wanted(self, item: Item) -> bool:
        """It is pinned or in a working set."""
        return bool(self._prefixes) and item[1].startswith(self._prefixes.get(item[0], ()))

    def holds(self, item: Item) -> bool:
        """It may not be dropped."""
        return item in self.dirty or self.wanted(item)

    def _gather(self) -> None:
        gathered = defaultdict(list)
        for bucket, prefix in sorted(self._pins.union(*self._declared.values())):
            gathered[bucket].append(prefix)
        self._prefixes = {bucket: tuple(prefixes) for bucket, prefixes in gathered.items()}
