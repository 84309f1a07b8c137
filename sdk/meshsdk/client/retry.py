"""Retry policy: back-off, deadlines, and liveness checks of a silent node.

Law: this module decides and the caller sleeps; a long wait logs a warning (logger `meshsdk`). A node
that does not even answer a liveness check is abandoned early; a node that is working gets its full
timeout.
Invariant: a wait never outlasts the deadline and never undercuts the server's Retry-After.
"""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from meshsdk.errors import BusyError, ConnectError, DeadlineError, ServerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshsdk.client.http_connection import Connection
    from meshsdk.errors import MeshError


_log = logging.getLogger("meshsdk")

# 421 means "another node owns it": after a map change the same endpoint answers, or forwards.
RETRIED_STATUSES = frozenset({408, 421, 429, 500, 502, 503, 504})
_AT_ONCE = 1.0  # seconds
PRESENCE = 2.0
"""Seconds within which a node says that it is there."""
SUSPICIOUS = 5.0
"""Seconds of silence before which nobody is asked whether it is: a busy machine may be as slow."""
LONGER = "To wait longer: deadline=SECONDS, of mesh.Loader or mesh.connect."
_CHECK = f"Look at the nodes with `mesh cluster status`. {LONGER}"
SETTLED_CODES = frozenset({"OpFailed"})  # the same op would do the same to the same bytes


def retryable(error: BaseException) -> bool:
    """Whether asking an idempotent question again can help."""
    if isinstance(error, ServerError):
        return error.status in RETRIED_STATUSES and error.code not in SETTLED_CODES
    return isinstance(error, ConnectError)


def progress_of(error: BaseException) -> float | None:
    """How far work is that a server does meanwhile, 0…1, if it says that it does."""
    told = error.detail.get("progress") if isinstance(error, BusyError) else None
    return float(told) if isinstance(told, (int, float)) else None


def silence(timeout: float, deadline: float, left: float) -> float:
    """Seconds without a word after which a node is asked whether it is there: `timeout`, or earlier, so that
    another can be asked before the `deadline`, and who waits is told at it; `left` is what is left of it."""
    least = max(_AT_ONCE, SUSPICIOUS - (deadline - left))
    return min(timeout, max(least, min(deadline / 2, left - PRESENCE)))


def _forget_places(error: BaseException) -> None:
    """Of a failure and its causes only the words are left to be shown: where in the SDK they were noticed is
    a screen of text that tells nobody anything."""
    each: BaseException | None = error
    while each is not None:
        each = each.with_traceback(None).__cause__


@dataclass(frozen=True, slots=True)
class BackOff:
    """Exponential back-off with full jitter: the n-th wait is uniform in (0, min(cap, base·2ⁿ)] seconds.

    `deadline` is for servers that are not to be had; one that works on what was asked is waited for as long
    as it comes further, and for `standstill` seconds when it does not.
    """

    deadline: float
    base: float = 0.1
    cap: float = 10.0
    standstill: float = 600.0


@dataclass(slots=True)
class Patience:
    """One question's budget of waiting, from now on. `now` and `jitter` are injectable for tests."""

    policy: BackOff
    started: float = field(default_factory=time.monotonic)
    attempts: int = 0
    jitter: random.Random = field(default_factory=random.Random)
    _tell_at: float = 3.0
    _done: float = -1.0  # what a server said of its work
    _untold: bool = True
    _further: float = 0.0  # when it came further
    _heard: float = 0.0  # when it last said so

    def delay(self, error: MeshError, now: float) -> float:
        """Seconds to wait before asking again; raises `error` itself when asking again cannot help,
        DeadlineError (from it) at the deadline, and where the server wants a wait that would pass it."""
        if not retryable(error):
            raise error
        return self.wait(error, now)

    def wait(self, error: MeshError, now: float) -> float:
        """The same of an error that is known to pass."""
        self.attempts += 1
        ceiling = min(self.policy.cap, self.policy.base * 2 ** min(self.attempts - 1, 20))
        asked: float = getattr(error, "retry_after", None) or 0.0
        left = self._until(error, now) - now
        if left <= 0 or asked > left:
            why = str(error)
            _forget_places(error)
            raise DeadlineError(
                f"gave up after {self.attempts} attempts in {now - self.started:.0f} s: {why}"
                f"{' ' if why.endswith(('.', '?')) else '. '}"
                f"{_CHECK if isinstance(error, ServerError) and not error.blames_keys else LONGER}"
            ) from error
        # Cut to what is left, or a long one that was drawn would end the waiting before its time.
        wait = max(min(self.jitter.uniform(0, ceiling), left), asked)
        self._tell(error, now, wait)
        return wait

    @property
    def ends(self) -> float:
        """When it ends with who says nothing of work."""
        return max(self.started, self._heard) + self.policy.deadline

    def _until(self, error: MeshError, now: float) -> float:
        """When patience ends."""
        done = progress_of(error)
        if done is None:
            return self.ends
        self._heard = now
        if done > self._done:
            self._done, self._further = done, now
        return self._further + max(self.policy.deadline, self.policy.standstill)

    def _tell(self, error: MeshError, now: float, wait: float) -> None:
        """Of a server that is not there before a second is over: nobody is to look for it elsewhere."""
        since = now - self.started
        first = self._untold and isinstance(error, ConnectError) and since + wait >= _AT_ONCE
        if not first and since < self._tell_at:
            return
        self._untold, self._tell_at = False, max(2 * since, self._tell_at)
        _log.warning("still asking after %.1f s (attempt %d): %s", since, self.attempts, error)


ABSENT: Final = "no answer, nor a word that it is there: does it stand still, or is the way to it cut?"


def await_answer(connection: Connection, silence: float, timeout: float, there: Callable[[], bool]) -> None:
    """Until an answer begins. Each `silence` seconds it is asked whether the node is `there`. Raises
    ConnectError where it is not, and after `timeout` seconds."""
    until = time.monotonic() + timeout
    while (left := until - time.monotonic()) > 0:
        if connection.begins(min(silence, left)):
            return
        if left > silence and not there():
            raise ConnectError(f"{connection.endpoint}: {ABSENT}")
    raise ConnectError(f"{connection.endpoint}: no answer within {timeout:g} s")
