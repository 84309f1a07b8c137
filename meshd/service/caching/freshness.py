"""Until when what is known of an origin counts as so: a table that all processes of a node share.

Law: a sketch of fixed size in mapped memory. A slot that another name took is as if it were never noted: the
origin is asked once more. Emptied with every start. A slot is one aligned 64-bit word, which is stored and
loaded whole (`meshd.kit.shared_words`).
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import secrets
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from meshd.kit.clock import Clock

_SLOTS: Final = 1 << 20
_GENERATIONS: Final = 1 << 12
_BIRTH: Final = _SLOTS + _GENERATIONS
_SIZE: Final = (_BIRTH + 1) * 8
_SECONDS: Final = (1 << 24) - 1


class FreshTable:
    """A word a slot: 40 bits of the name's hash, 24 of the second it was noted in."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._clock = clock
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # the first process makes it
            made = not os.fstat(fd).st_size
            if made:
                os.ftruncate(fd, _SIZE)
            self._map = mmap.mmap(fd, _SIZE)
            self._words = memoryview(self._map).cast("Q")
            if made:
                self._words[_BIRTH] = secrets.randbits(64)
            fcntl.flock(fd, fcntl.LOCK_UN)  # the map holds on to the open file
        finally:
            os.close(fd)

    def __repr__(self) -> str:
        return "<FreshTable>"

    def note(self, *name: str) -> None:
        """It is so now."""
        slot, tag = _place(name)
        self._words[slot] = tag << 24 | self._now()

    def forget(self, *name: str) -> None:
        """It may not be so any more."""
        slot, tag = _place(name)
        if self._words[slot] >> 24 == tag:
            self._words[slot] = 0

    def holds(self, ttl: float, *name: str) -> bool:
        """It was noted less than `ttl` seconds ago."""
        slot, tag = _place(name)
        word = self._words[slot]
        noted = word >> 24 == tag and word != 0
        return bool(noted and ((self._now() - word) & _SECONDS) < ttl)

    def mark(self, bucket: str) -> str:
        """Another one once the bucket was written to through this node, or the node has started anew; other
        buckets may change it, too."""
        return f"{self._words[_BIRTH]:x}-{self._words[_generation(bucket)]:x}"

    def rise(self, bucket: str) -> None:
        """The bucket was written to. A number by chance: two at once never take the same for theirs."""
        self._words[_generation(bucket)] = secrets.randbits(64)

    def _now(self) -> int:
        return self._clock.now_ms() // 1000 & _SECONDS

    def close(self) -> None:
        self._words.release()
        self._map.close()


def _place(name: tuple[str, ...]) -> tuple[int, int]:
    digest = hashlib.blake2b("\0".join(name).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "big")
    return number % _SLOTS, number >> 24


def _generation(bucket: str) -> int:
    digest = hashlib.blake2b(bucket.encode(), digest_size=4).digest()
    return _SLOTS + int.from_bytes(digest, "big") % _GENERATIONS
