"""Whom the node's work is charged to: the key that signed for it, wherever the work is done.

Law: set where a request's signature is verified, and by whoever goes on with somebody's work later (a job);
tasks inherit it. Read only where work is queued or admitted. Never a secret, never shown to clients.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

NOBODY = ""
"""Unsigned requests, and the node itself."""

_account: ContextVar[str] = ContextVar("account", default=NOBODY)


def account() -> str:
    """The account of the work under way."""
    return _account.get()


def charge(name: str) -> None:
    """From here on, in this task and those it starts, the work is `name`'s."""
    _account.set(name)


@contextmanager
def charged(name: str) -> Iterator[None]:
    """Work within the block is `name`'s."""
    token = _account.set(name)
    try:
        yield
    finally:
        _account.reset(token)
