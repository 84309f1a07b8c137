"""How many bytes of an origin's answer make a piece: what comes quickly comes in larger ones.

Law: pure. Larger pieces cost less. A reader waits for the last byte of a piece for some milliseconds
after its first, no longer, wherever the origin is as quick as it was.
"""

from __future__ import annotations

from typing import Final

LEAST, MOST = 64 << 10, 1 << 20  # bytes of a piece
_WAIT: Final = 0.005  # seconds for a piece
_FAIR: Final = 50e6  # bytes a second, until more is known
_TELLING: Final = 1 << 20  # bytes of an answer that says something


class Pace:
    """One an origin."""

    def __init__(self) -> None:
        self._rate = _FAIR

    def __repr__(self) -> str:
        return f"<Pace of {self._rate / 1e6:.1f} MB/s>"

    def piece(self) -> int:
        """Bytes of a piece of the next answer."""
        return min(MOST, max(LEAST, int(self._rate * _WAIT)))

    def took(self, size: int, seconds: float) -> None:
        """So many bytes of an answer came, and so long they were waited for."""
        if size >= _TELLING:
            self._rate = size / max(seconds, 1e-6)
