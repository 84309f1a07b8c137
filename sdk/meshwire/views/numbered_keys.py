"""Keys made of numbers, such as `epoch=3/step=000017/rank=0-of-8.safetensors`.

Law: a number has one spelling. Iteration yields keys in order of their UTF-8 bytes (`10` before `2`) from
any position without visiting those before it; memory does not grow with their number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_DIGITS = "0123456789"
_SORTED = 4096  # spellings cached
_NUMBER = {True: r"(\d{%d})", False: r"(0|[1-9]\d{0,18})"}


@dataclass(frozen=True, slots=True)
class KeyLevel:
    """A level of a key: `head`, then a number below `count`, zero-padded to `width` if that is set. The
    text after an unpadded number must sort before the digits: `/`, `-`, `.` or nothing."""

    head: str
    count: int
    width: int = 0


@dataclass(frozen=True)
class NumberedKeys:
    """All keys of these levels, one number each, that end in `tail`."""

    levels: tuple[KeyLevel, ...]
    tail: str = ""

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        parts = [
            re.escape(level.head) + (_NUMBER[True] % level.width if level.width else _NUMBER[False])
            for level in self.levels
        ]
        return re.compile("".join(parts) + re.escape(self.tail), re.ASCII)

    def parse_key(self, key: str) -> tuple[int, ...] | None:
        """Return the numbers of a key, or None if it is not one of these keys."""
        match = self._pattern.fullmatch(key)
        if match is None:
            return None
        numbers = tuple(int(text) for text in match.groups())
        inside = all(number < level.count for number, level in zip(numbers, self.levels, strict=True))
        return numbers if inside else None

    def iter_keys(self, prefix: str = "", after: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the keys that begin with `prefix` and sort after `after`, in order, with their numbers."""

        def alive(start: str) -> bool:
            """Whether keys with this prefix may be wanted."""
            wanted = start.startswith(prefix) or prefix.startswith(start)
            return wanted and (start > after or after.startswith(start))

        def below(base: str, numbers: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
            if len(numbers) == len(self.levels):
                key = base + self.tail
                if key > after and key.startswith(prefix):
                    yield key, numbers
                return
            level = self.levels[len(numbers)]
            stem = base + level.head
            free = stem.startswith(prefix) and stem > after and not after.startswith(stem)
            for text in _every(level) if free else _texts(level, stem, alive):
                yield from below(stem + text, (*numbers, int(text)))

        return below("", ())


def _every(level: KeyLevel) -> Iterable[str]:
    """Return all spellings of a level's numbers, in order."""
    if level.width:
        return (f"{number:0{level.width}d}" for number in range(level.count))
    if level.count <= _SORTED:
        return _sorted_numbers(level.count)
    return _texts(level, "", lambda _: True)


@lru_cache(maxsize=64)
def _sorted_numbers(count: int) -> tuple[str, ...]:
    return tuple(sorted(map(str, range(count))))


def _texts(level: KeyLevel, base: str, alive: Callable[[str], bool], text: str = "") -> Iterator[str]:
    """Yield the spellings of the level's numbers that begin with `text`, in order, as long as their keys
    may be wanted."""
    whole = len(text) == level.width if level.width else bool(text)
    if whole:
        yield text
    if (level.width and whole) or (text == "0" and not level.width):
        return
    for digit in _DIGITS:
        more = text + digit
        lowest = int(more) * 10 ** (level.width - len(more)) if level.width else int(more)
        if lowest >= level.count:
            return
        if alive(base + more):
            yield from _texts(level, base, alive, more)
