"""Mutations of a corpus: what is tried where no coverage guides.

Law: pure; the random source comes in as an argument, so that a run can be repeated by its seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

_TELLING = (0, 1, 9, 10, 13, 32, 34, 37, 38, 43, 47, 58, 60, 61, 63, 127, 128, 255)


def mutated(random: Random, corpus: Sequence[bytes], words: Sequence[str], limit: int) -> bytes:
    """A child of one or two inputs of the corpus: one to eight changes."""
    data = bytearray(random.choice(corpus))
    for _ in range(1 << random.randrange(4)):
        _CHANGES[random.randrange(len(_CHANGES))](random, data, corpus, words)
    return bytes(data[:limit])


def _place(random: Random, data: bytearray) -> int:
    return random.randrange(len(data) + 1)


def _overwrite(random: Random, data: bytearray, corpus: Sequence[bytes], words: Sequence[str]) -> None:
    if data:
        data[random.randrange(len(data))] = random.choice((random.randrange(256), *_TELLING))


def _insert_word(random: Random, data: bytearray, corpus: Sequence[bytes], words: Sequence[str]) -> None:
    at = _place(random, data)
    data[at:at] = random.choice(words).encode() if words else b"\0"


def _cut(random: Random, data: bytearray, corpus: Sequence[bytes], words: Sequence[str]) -> None:
    at = _place(random, data)
    del data[at : at + random.randrange(1, 1 + max(1, len(data) // 4))]


def _repeat(random: Random, data: bytearray, corpus: Sequence[bytes], words: Sequence[str]) -> None:
    at = _place(random, data)
    piece = data[at : at + random.randrange(1, 64)]
    data[at:at] = piece * random.randrange(1, 6)


def _cross(random: Random, data: bytearray, corpus: Sequence[bytes], words: Sequence[str]) -> None:
    other = random.choice(corpus)
    start = random.randrange(len(other) + 1)
    data[_place(random, data) :] = other[start:]


def _number(random: Random, data: bytearray, corpus: Sequence[bytes], words: Sequence[str]) -> None:
    at = _place(random, data)
    number = random.choice((0, -1, 1 << 31, 1 << 63, (1 << 64) - 1, 10**30, random.randrange(100_000)))
    data[at : at + random.randrange(4)] = str(number).encode()


_CHANGES = (_overwrite, _overwrite, _insert_word, _cut, _repeat, _cross, _number)
