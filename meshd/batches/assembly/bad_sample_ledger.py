"""The bad-sample ledger: which samples could not be read, where, why and how often; one document per plan.

Law: the ledger is bounded. An entry is durable before the frame it belongs to is returned. Every process
and job can read it.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from meshd.util.async_tasks import SingleFlight

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshd.core.document_store import DocumentStore
    from meshwire.plan.plan_spec import PlanSpec

LIMIT = 1000
_KEPT = 64  # plans whose entries stay in memory
_MESSAGE = 300


@dataclass(frozen=True, slots=True)
class BadSample:
    """`key`: the sample's name; `position` and `epoch`: its last occurrence; `times`: occurrences so far."""

    key: str
    op: str
    error: str
    position: int
    epoch: int
    times: int = 1


def read_ledger(catalog: DocumentStore, plan: str) -> list[dict[str, Any]]:
    """Return the entries of a plan as plain JSON values, oldest first; empty if there are none."""
    document = catalog.read_intact(f"bad/{plan}")
    return [] if document is None else list(json.loads(document))


def merge_ledgers(*ledgers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the ledgers of several nodes: one entry per sample and op, with `times` added up."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in (entry for ledger in ledgers for entry in ledger):
        known = found.get((entry["key"], entry["op"]))
        times = entry["times"] + (known["times"] if known is not None else 0)
        found[entry["key"], entry["op"]] = {**(known or entry), "times": times}
    return list(found.values())


class BadSampleLedger:
    """Writes the ledgers. Only one process of a node, the one with the assembler, has it."""

    def __init__(self, catalog: DocumentStore) -> None:
        self._catalog = catalog
        self._entries: dict[str, dict[tuple[str, str], BadSample]] = {}
        self._writing: SingleFlight[str, None] = SingleFlight()
        self._recording: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<BadSampleLedger of {len(self._entries)} plans>"

    async def record_bad_samples(self, plan: str, found: Iterable[BadSample]) -> None:
        """Add entries; they are durable when this returns. Above the limit, new samples are left out, while
        counts still rise.
        """
        self._recording[plan] += 1
        try:
            self._add(plan, found)
            while True:
                _, joined = await self._writing.run(plan, lambda: self._write(plan))
                if not joined:  # a write that was joined may have begun before these entries were added
                    return
        finally:
            self._recording[plan] -= 1
            self._forget_old()

    def _add(self, plan: str, found: Iterable[BadSample]) -> None:
        entries = self._entries_of(plan)
        for item in found:
            name = (item.key, item.op)
            known = entries.get(name)
            if known is not None:
                entries[name] = replace(item, times=known.times + 1)
            elif len(entries) < LIMIT:
                entries[name] = replace(item, error=item.error[:_MESSAGE])

    def _forget_old(self) -> None:
        """Drop the oldest plans that nobody is recording for; their entries are read back when needed."""
        for plan in list(self._entries)[: max(0, len(self._entries) - _KEPT)]:
            if not self._recording[plan]:
                del self._entries[plan], self._recording[plan]

    def _entries_of(self, plan: str) -> dict[tuple[str, str], BadSample]:
        entries = self._entries.get(plan)
        if entries is None:
            found = (BadSample(**entry) for entry in read_ledger(self._catalog, plan))
            entries = self._entries[plan] = {(entry.key, entry.op): entry for entry in found}
        return entries

    async def _write(self, plan: str) -> None:
        document = json.dumps([asdict(entry) for entry in self._entries[plan].values()]).encode()
        await self._catalog.write_document(f"bad/{plan}", document)


def max_bad_rows(spec: PlanSpec, rows: int) -> int:
    """Return how many rows of a global batch may be bad."""
    return max(1, int(spec.max_bad * rows))
