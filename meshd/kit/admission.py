"""How much may be under way at a time, and whose: what does not fit is refused at once, never queued.

Law: while there is room, whoever asks gets it. Beyond the limit only those are let in who hold less than an
even share, so that one who fills the node does not keep the others out. Invariant: what is held stays below
twice the limit; one request above the whole limit is let in when nothing else is held.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class FullError(Exception):
    """There is no room now. `held`: how much is under way, of `limit`."""

    def __init__(self, held: int, limit: int) -> None:
        super().__init__(f"{held} of {limit}")
        self.held, self.limit = held, limit


class Admission:
    """At most `limit` units at a time. Use on one event loop only."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError("an admission needs at least one unit")
        self.limit = limit
        self.held = 0
        self._by_account: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Admission {self.held} of {self.limit} held, by {len(self._by_account)}>"

    def held_by(self, account: str) -> int:
        """What one account holds."""
        return self._by_account[account]

    def has_room(self, account: str, units: int) -> bool:
        """Whether `enter` would let it in."""
        if not self.held or self.held + units <= self.limit:
            return True
        if self.held + units > 2 * self.limit:
            return False
        holders = len(self._by_account) + (account not in self._by_account)
        return self._by_account[account] + units <= self.limit // holders

    def enter(self, account: str, units: int) -> None:
        """Hold units from here on. Raises FullError."""
        if not self.has_room(account, units):
            raise FullError(self.held, self.limit)
        self.held += units
        self._by_account[account] += units

    def leave(self, account: str, units: int) -> None:
        """Give back what `enter` gave."""
        self.held -= units
        self._by_account[account] -= units
        if self._by_account[account] <= 0:
            del self._by_account[account]

    @contextmanager
    def hold(self, account: str, units: int) -> Iterator[None]:
        """Units for the length of a block. Raises FullError."""
        self.enter(account, units)
        try:
            yield
        finally:
            self.leave(account, units)
