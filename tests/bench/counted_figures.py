"""Figures for a process of its own to send: it loads this module, and not all that a test loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.results import Figure

if TYPE_CHECKING:
    from collections.abc import Iterator


def counted(most: int) -> Iterator[Figure]:
    """So many, with their numbers. Raises ValueError after three."""
    for number in range(most):
        yield Figure("it", number, {})
    if most == 3:
        raise ValueError("three")
