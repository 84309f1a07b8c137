"""What was found in the store, and lies at an origin by the time it is read: it was brought there meanwhile.

Law: nothing was given out yet, so it is looked for anew from the beginning, where the origin is asked.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_T = TypeVar("_T")
_TRIES: Final = 5
_NOT_CACHED: Final = (
    "The bucket has an origin, and what this needs is not in the cache: read the objects once, or "
    "`mesh prefetch` them."
)


class NotCachedHereError(S3Error):
    """The store was asked for what lies at an origin."""

    def __init__(self) -> None:
        super().__init__("ServiceUnavailable", _NOT_CACHED)


async def anew_if_brought(attempt: Callable[[], Awaitable[_T]]) -> _T:
    """What `attempt` gives, which looks for an object and reads it; made again when that was brought to its
    origin in between, as often as writers may have that happen. Raises what `attempt` raises."""
    for _ in range(_TRIES - 1):
        with suppress(NotCachedHereError):
            return await attempt()
    return await attempt()
