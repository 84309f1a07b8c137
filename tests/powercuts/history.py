"""What a name went through, and what may be found of it after a power cut.

Law: each name has one writer, so its history is a sequence. What is found must be the last acknowledged value
or that of a request that was still running; with `durability: relaxed`, also what it was at any time within
the bound before the cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable
    from pathlib import Path

SYNC_SECONDS: Final = 1.0
SLACK: Final = 1.0
"""Seconds that a checkpoint may take on a busy machine, besides the bound."""


@dataclass
class Attempt:
    """A change of a name: a value, or None for its removal. Times of the monotonic clock; `acknowledged` is 0
    while it is not."""

    value: Hashable
    begun: float
    acknowledged: float = 0.0

    def is_settled(self, since: float) -> bool:
        """Whether a cut that takes nothing back that was acknowledged before `since` leaves it."""
        return 0 < self.acknowledged <= since

    def told(self, cut_at: float) -> str:
        """What it was, and when, for findings."""
        ended = f"acknowledged {cut_at - self.acknowledged:.2f} s" if self.acknowledged else "not answered"
        return f"{self.value}: begun {cut_at - self.begun:.2f} s, {ended} before"


@dataclass
class History:
    """What one name went through."""

    attempts: list[Attempt] = field(default_factory=list)

    def allowed(self, since: float) -> set[Hashable]:
        """What may be found after a cut that takes nothing back that was acknowledged before `since`."""
        settled = [at for at, each in enumerate(self.attempts) if each.is_settled(since)]
        first = settled[-1] if settled else -1
        found = {each.value for each in self.attempts[max(0, first) :]}
        return found if settled else found | {None}

    def after_cut(self, since: float) -> None:
        """Keeps what may be found later, too: the last change that must be there, and all after it, which may
        be or may come to be."""
        settled = [at for at, each in enumerate(self.attempts) if each.is_settled(since)]
        first = settled[-1] if settled else -1
        if not settled:
            self.attempts.insert(0, Attempt(None, 0.0, acknowledged=1e-9))
            first = 0
        self.attempts = self.attempts[first:]
        self.attempts[0].acknowledged = 1e-9
        for each in self.attempts[1:]:
            each.acknowledged = 0.0

    def settle(self, value: Hashable) -> None:
        """Goes on from what was found."""
        self.attempts = [Attempt(value, 0.0, acknowledged=1e-9)]


@dataclass
class Report:
    """Of all cuts: acknowledged changes, the slowest start, what was wrong, the reads that were refused for
    damage, the cuts while data moved or was repaired, and the jobs that a cut interrupted."""

    cuts: int = 0
    acknowledged: int = 0
    slowest: float = 0.0
    damaged: int = 0
    moving: int = 0
    interrupted: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, problem: str) -> None:
        """Notes what is wrong after this cut."""
        self.wrong.append(f"cut {self.cuts}: {problem}")

    def __str__(self) -> str:
        head = (
            f"{self.cuts} cuts, {self.acknowledged} acknowledged, {len(self.wrong)} lost or wrong, "
            f"slowest start {self.slowest:.1f} s"
        )
        head += f", {self.damaged} reads refused" if self.damaged else ""
        head += f", {self.moving} cuts while data moved" if self.moving else ""
        head += f", {self.interrupted} jobs interrupted" if self.interrupted else ""
        return "\n".join([head, *self.wrong])


def copied(tables: Iterable[dict[str, History]]) -> list[dict[str, History]]:
    """Copies that do not change with them."""
    return [
        {name: History([*map(replace, each.attempts)]) for name, each in table.items()} for table in tables
    ]


def oldest_kept(cut_at: float, *, relaxed: bool) -> float:
    """The time before which nothing acknowledged may be gone after a cut at `cut_at`."""
    return cut_at - (SYNC_SECONDS + SLACK if relaxed else 0.0)


def as_after_a_boot(source: Path) -> None:
    """The boot id differs after a power cut. Below this directory it does not, so the records of it do."""
    for mark in source.glob("**/boot"):
        scheme, _, boot = mark.read_text().partition(" ")
        if boot:
            mark.write_text(f"{scheme} before")
