"""Retry policy: back-off, deadlines, liveness checks of a silent node, and the queue of failed steps.

Law: this module decides how long to wait and the caller sleeps; a long wait logs a warning (logger
`meshsdk`). A node that does not answer a liveness check is abandoned early; a node that is working gets its
full timeout. A failed step goes to another node at once, and waits only after every node failed.
Invariant: a wait never extends past the deadline and is never shorter than the server's Retry-After.
"""

from __future__ import annotations

import heapq
import logging
import math
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from meshsdk.client.routing import mark_failed
from meshsdk.client.settings import replacement_keys
from meshsdk.errors import BusyError, ConnectError, DeadlineError, ServerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshsdk.client.http_connection import Connection
    from meshsdk.client.request import Request
    from meshsdk.client.routing import Router
    from meshsdk.client.settings import Endpoint, RenewableKeys
    from meshsdk.errors import MeshError
    from meshwire.sigv4 import Credential


_log = logging.getLogger("meshsdk")

# 421 means that another node owns the name: after a map change the same endpoint answers or forwards.
RETRIED_STATUSES = frozenset({408, 421, 429, 500, 502, 503, 504})
_AT_ONCE = 1.0  # seconds
PRESENCE = 2.0
"""Seconds within which a live node answers a liveness check."""
SUSPICIOUS = 5.0
"""Seconds of silence before the first liveness check: a busy node may be silent for as long."""
QUIET = 1.0
"""The same for one request that another node may answer. Later pauses between checks are longer."""
LONGER = "To wait longer, pass deadline=SECONDS to mesh.Loader or mesh.connect."
_CHECK = f"Check the nodes with `mesh cluster status`. {LONGER}"
SETTLED_CODES = frozenset({"OpFailed"})  # the op would fail in the same way on the same bytes


def retryable(error: BaseException) -> bool:
    """Return whether repeating an idempotent request can help."""
    if isinstance(error, ServerError):
        settled = error.code in SETTLED_CODES or bool(error.detail.get("damaged"))
        return error.status in RETRIED_STATUSES and not settled
    return isinstance(error, ConnectError)


def progress_of(error: BaseException) -> float | None:
    """Return the progress (0…1) of the server's work on this request; None if the server reports none."""
    told = error.detail.get("progress") if isinstance(error, BusyError) else None
    return float(told) if isinstance(told, (int, float)) else None


def shards_of(error: MeshError) -> tuple[int, int] | None:
    """Return how many of how many shards the server has done for this request; None if it counts none."""
    told = error.detail.get("shards") if isinstance(error, BusyError) else None
    numbers = (told.get("done"), told.get("all")) if isinstance(told, dict) else (None, None)
    done, count = numbers
    return (done, count) if isinstance(done, int) and isinstance(count, int) else None


def silence(timeout: float, deadline: float, left: float) -> float:
    """Return the seconds of silence after which to check that a node is alive.

    This is `timeout`, or less, so that there is time to try another node before the `deadline` and to report
    the failure at it. `left`: seconds left until the deadline.
    """
    least = max(_AT_ONCE, SUSPICIOUS - (deadline - left))
    return min(timeout, max(least, min(deadline / 2, left - PRESENCE)))


def _forget_places(error: BaseException) -> None:
    """Remove the tracebacks of an error and its causes: SDK internals only obscure the messages."""
    each: BaseException | None = error
    while each is not None:
        each = each.with_traceback(None).__cause__


_MOST_TOLD: Final = 100
_told: Final = dict[str, float]()
"""When warnings were last logged in this process, by the text of the error."""

_JITTER: Final = random.SystemRandom()
"""It has no state that a fork would share, and needs no seed: seeding costs 8 µs per request."""


@dataclass(frozen=True, slots=True)
class BackOff:
    """Exponential back-off with full jitter: the n-th wait is uniform in (0, min(cap, base·2ⁿ)] seconds.

    `deadline` (seconds) limits the wait for an unavailable server. A server that works on the request is
    waited for as long as its progress grows, and for `standstill` seconds after it stops growing.
    """

    deadline: float
    base: float = 0.1
    cap: float = 10.0
    standstill: float = 600.0


@dataclass(slots=True)
class Patience:
    """The waiting budget of one request, from now on. Tests inject `now` and `jitter`."""

    policy: BackOff
    started: float = field(default_factory=time.monotonic)
    attempts: int = 0
    jitter: random.Random = _JITTER
    _tell_at: float = 3.0
    _done: float = -1.0  # the highest progress that a server reported
    _untold: bool = True
    _further: float = 0.0  # when the progress last grew
    _heard: float = 0.0  # when a server last reported progress

    def delay(self, error: MeshError, now: float) -> float:
        """Return the seconds to wait before the next attempt.

        Raises `error` itself if another attempt cannot help, and DeadlineError (from it) at the deadline or
        if the server's Retry-After would pass it.
        """
        if not retryable(error):
            raise error
        return self.wait(error, now)

    def wait(self, error: MeshError, now: float) -> float:
        """Return the seconds to wait, as `delay` does, for an error that is known to be temporary."""
        self.attempts += 1
        ceiling = min(self.policy.cap, self.policy.base * 2 ** min(self.attempts - 1, 20))
        asked: float = getattr(error, "retry_after", None) or 0.0
        left = self._until(error, now) - now
        if left <= 0 or asked > left:
            why = str(error)
            _forget_places(error)
            times = "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"
            asks = f", for the node asks to wait {asked:.0f} s longer" if left > 0 else ""
            raise DeadlineError(
                f"gave up after {times} in {now - self.started:.0f} s{asks}: {why}"
                f"{' ' if why.endswith(('.', '?')) else '. '}"
                f"{_CHECK if isinstance(error, ServerError) and not error.blames_keys else LONGER}"
            ) from error
        # Cut to the time left; otherwise a long random wait would end the retries before the deadline.
        wait = max(min(self.jitter.uniform(0, ceiling), left), asked)
        self._tell(error, now, wait)
        return wait

    @property
    def ends(self) -> float:
        """The monotonic time at which waiting ends for a server that reports no progress."""
        return max(self.started, self._heard) + self.policy.deadline

    def _until(self, error: MeshError, now: float) -> float:
        """Return the monotonic time at which waiting ends after this error."""
        done = progress_of(error)
        if done is None:
            return self.ends
        self._heard = now
        if done > self._done:
            self._done, self._further = done, now
        return self._further + max(self.policy.deadline, self.policy.standstill)

    def _tell(self, error: MeshError, now: float, wait: float) -> None:
        """Log a warning if the wait is long.

        An unreachable server is reported within the first second, so that users do not search for the cause
        elsewhere.
        """
        since = now - self.started
        first = self._untold and isinstance(error, ConnectError) and since + wait >= _AT_ONCE
        if not first and since < self._tell_at:
            return
        self._untold, self._tell_at = False, max(2 * since, self._tell_at)
        if _told_lately(str(error), now, max(_AT_ONCE, since / 2)):
            return
        done = progress_of(error)
        if done is not None:
            _log.warning("waiting for the node's work: %.0f %% done after %.1f s", 100 * done, since)
            return
        whole = self.ends - self.started
        elapsed = f"{since:.1f} s of {whole:.0f} s" if math.isfinite(whole) else f"{since:.1f} s"
        _log.warning("still retrying after %s (attempt %d): %s", elapsed, self.attempts, error)


def _told_lately(text: str, now: float, within: float) -> bool:
    """Return whether another request told the same within the last seconds, else note that this one does: a
    loader has many requests in flight when a node dies."""
    last = _told.get(text)
    if last is not None and 0 <= now - last < within:
        return True
    if len(_told) >= _MOST_TOLD:
        _told.clear()
    _told[text] = now
    return False


ABSENT: Final = "no answer, and no reply to a liveness check: the node hangs or is unreachable"


def await_answer(connection: Connection, silence: float, timeout: float, there: Callable[[], bool]) -> None:
    """Wait until a response begins, and call `there` after `silence` seconds, and after pauses that grow to
    SUSPICIOUS seconds, to check that the node is alive.

    Raises ConnectError if it is not, and after `timeout` seconds.
    """
    until, pause = time.monotonic() + timeout, silence
    while (left := until - time.monotonic()) > 0:
        if connection.begins(min(pause, left)):
            return
        if left > pause and not there():
            raise ConnectError(f"{connection.endpoint}: {ABSENT}")
        pause = max(silence, min(2 * pause, SUSPICIOUS))
    raise ConnectError(f"{connection.endpoint}: no answer within {timeout:g} s")


class RetryQueue:
    """The failed steps of one prefetcher, by when to retry them; `deadline` is in seconds per step."""

    def __init__(self, router: Router, keys: RenewableKeys, deadline: float) -> None:
        self._router, self._keys, self._policy = router, keys, BackOff(deadline)
        self._due: list[tuple[float, int]] = []
        self._tried: dict[int, set[Endpoint]] = {}
        self._patience: dict[int, Patience] = {}
        self._refused: dict[int, Credential] = {}

    def __len__(self) -> int:
        """The number of steps that wait for a retry."""
        return len(self._due)

    def __repr__(self) -> str:
        return f"RetryQueue({len(self._due)} steps)"

    @property
    def next_due(self) -> float | None:
        """The monotonic time of the first retry; None if no step waits."""
        return self._due[0][0] if self._due else None

    def pop(self) -> int:
        """Remove and return the step to retry first."""
        return heapq.heappop(self._due)[1]

    def schedule_retry(self, step: int, when: float) -> None:
        """Schedule a retry of a step at a monotonic time."""
        heapq.heappush(self._due, (when, step))

    def tried_endpoints(self, step: int) -> set[Endpoint]:
        """Return the endpoints that failed for a step."""
        return self._tried.get(step, set())

    def silence_limit(self, step: int, sent: float, timeout: float) -> float:
        """Return the seconds of silence after `sent` before checking that the node of a step is alive."""
        patience, deadline = self._patience.get(step), self._policy.deadline
        return silence(timeout, deadline, deadline if patience is None else patience.ends - sent)

    def record_failure(
        self,
        step: int,
        error: MeshError,
        request: Request,
        endpoint: Endpoint,
        now: float,
        since: float | None = None,
    ) -> None:
        """Schedule a retry of a step: at once if another node is untried, else after a wait.

        `since`: when the node became unavailable, if that was noticed later. Raises the error, or
        DeadlineError, if a retry cannot help or the deadline has passed.
        """
        if since is not None:
            self._patience_with(step, since)
        if isinstance(error, ServerError) and error.blames_keys:
            self._keys_failed(step, error, now)
            return
        tried = self._tried.setdefault(step, set())
        if mark_failed(self._router, request, tried, endpoint, error):
            self.schedule_retry(step, now)
            return
        tried.clear()
        self.schedule_retry(step, now + self._patience_with(step, now).delay(error, now))

    def _keys_failed(self, step: int, error: ServerError, now: float) -> None:
        """Retry at once with renewed keys. Expired keys from a file are waited for, since their renewal may
        be late. Raises the error otherwise."""
        try:
            self._refused[step] = replacement_keys(self._keys, error, self._refused.get(step))
        except ServerError as final:
            if final.code != "ExpiredToken" or not self._keys.path:
                raise
            self.schedule_retry(step, now + self._patience_with(step, now).wait(final, now))
        else:
            self.schedule_retry(step, now)

    def _patience_with(self, step: int, now: float) -> Patience:
        return self._patience.setdefault(step, Patience(self._policy, started=now))

    def record_success(self, step: int) -> None:
        """Forget the failures of a step that has arrived."""
        self._patience.pop(step, None)
        self._tried.pop(step, None)
        self._refused.pop(step, None)
