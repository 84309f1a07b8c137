"""An answer under way whose bytes cannot be read to their end.

Law: how many went out is known exactly, so that what gives the rest begins at the next one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable


class TornError(OSError):
    """`sent` bytes of a body went out; those behind them cannot be read: `why`."""

    def __init__(self, sent: int, why: BaseException) -> None:
        super().__init__(f"the bytes behind the first {sent} cannot be read: {why}")
        self.sent, self.why = sent, why


Rest = Callable[[TornError], AsyncGenerator[bytes, None]]
"""Gives the bytes behind those that were sent, or raises: the connection is cut then."""
