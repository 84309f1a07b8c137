"""Whose turn it is: rounds over contenders, interleaved and counterbalanced.

Law: every round has each contender once, and every other round runs in the opposite order (A B C, C B A, …):
a slow minute of the machine meets all of them, and none always follows the same one and gets its leftovers,
page memory that another pushed out or a disk that is still busy. An even number of rounds balances exactly.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")


def order(contenders: Iterable[T], number: int) -> list[T]:
    """The contenders as they take their turns in round `number`, counted from 0."""
    return list(contenders)[:: -1 if number % 2 else 1]


def random_order(contenders: Iterable[T]) -> list[T]:
    """The contenders in an order of chance: for many short rounds, in which each place counts."""
    contenders = list(contenders)
    return random.sample(contenders, len(contenders))


def turns(
    row: str, names: Iterable[str], rounds: int, say: Callable[[str], None]
) -> Iterator[tuple[int, str]]:
    """(round, contender's name) of all rounds; `say` is told before each."""
    names = list(names)
    for number in range(rounds):
        for name in order(names, number):
            say(f"{row}: {name}, round {number + 1} of {rounds}")
            yield number, name
