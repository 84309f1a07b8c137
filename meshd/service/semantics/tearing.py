"""What cannot be read any more of spans that were given out, told to whoever gave them.

Law: told before the next spans are asked for; those begin at the first byte that lacks.
"""

from __future__ import annotations


class Tear:
    """One an answer."""

    def __init__(self) -> None:
        self._sent: int | None = None

    def __repr__(self) -> str:
        return "<Tear>" if self._sent is None else f"<Tear behind {self._sent} bytes>"

    def met(self, sent: int) -> None:
        """Of the last spans only the first `sent` bytes could be read."""
        self._sent = sent

    def take(self) -> int | None:
        """How many that were, once; None where all could be read."""
        sent, self._sent = self._sent, None
        return sent
