"""When to ask again, and when to give up.

Law: decisions only; the caller sleeps. A long wait is logged (`meshsdk`, warning), so that nobody
wonders. Invariant: the wait never outlasts the deadline, and a server's Retry-After is never undercut.
"""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshsdk.errors import ConnectError, DeadlineError, ServerError

if TYPE_CHECKING:
    from meshsdk.errors import MeshError

_log = logging.getLogger("meshsdk")

# 421 means "another node owns it": after a map change the same endpoint answers, or forwards.
RETRIED_STATUSES = frozenset({408, 421, 429, 500, 502, 503, 504})
SETTLED_CODES = frozenset({"OpFailed"})  # the same op would do the same to the same bytes


def retryable(error: BaseException) -> bool:
    """Whether asking an idempotent question again can help."""
    if isinstance(error, ServerError):
        return error.status in RETRIED_STATUSES and error.code not in SETTLED_CODES
    return isinstance(error, ConnectError)


@dataclass(frozen=True, slots=True)
class BackOff:
    """Exponential back-off with full jitter: the n-th wait is uniform in (0, min(cap, base·2ⁿ)] seconds."""

    deadline: float
    base: float = 0.1
    cap: float = 10.0


@dataclass(slots=True)
class Patience:
    """One question's budget of waiting, from now on. `now` and `jitter` are injectable for tests."""

    policy: BackOff
    started: float = field(default_factory=time.monotonic)
    attempts: int = 0
    jitter: random.Random = field(default_factory=random.Random)
    _tell_at: float = 3.0

    def delay(self, error: MeshError, now: float) -> float:
        """Seconds to wait before asking again; raises `error` itself when asking again cannot help,
        DeadlineError (from it) when the wait would pass the deadline."""
        if not retryable(error):
            raise error
        self.attempts += 1
        ceiling = min(self.policy.cap, self.policy.base * 2 ** min(self.attempts - 1, 20))
        wait = max(self.jitter.uniform(0, ceiling), getattr(error, "retry_after", None) or 0.0)
        if now + wait - self.started > self.policy.deadline:
            raise DeadlineError(
                f"gave up after {self.attempts} attempts in {now - self.started:.0f} s: {error} "
                "Check that the server is up (`curl ENDPOINT/-/ready`), or raise deadline="
            ) from error
        if now - self.started >= self._tell_at:
            self._tell_at = 2 * (now - self.started)
            _log.warning(
                "still asking after %.0f s (%d attempts): %s", now - self.started, self.attempts, error
            )
        return wait
