"""Steps of a pass that failed: when each is asked for again, and of whom not.

Law: decisions only; the reader asks. Another node is asked at once; when all were, one of them later.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from meshsdk.errors import ServerError
from meshsdk.retrying import BackOff, Patience, silence
from meshsdk.transport import failed, other_keys

if TYPE_CHECKING:
    from meshsdk.errors import MeshError
    from meshsdk.keyfiles import RenewedKeys
    from meshsdk.routing import Router
    from meshsdk.settings import Endpoint
    from meshsdk.transport import Request
    from meshwire.sigv4 import Credential


class Attempts:
    """Of one pass. `deadline`: seconds a step is tried for."""

    def __init__(self, router: Router, keys: RenewedKeys, deadline: float) -> None:
        self._router, self._keys, self._policy = router, keys, BackOff(deadline)
        self._due: list[tuple[float, int]] = []
        self._tried: dict[int, set[Endpoint]] = {}
        self._patience: dict[int, Patience] = {}
        self._refused: dict[int, Credential] = {}

    def __len__(self) -> int:
        """Steps that wait for their time."""
        return len(self._due)

    def __repr__(self) -> str:
        return f"Attempts({len(self._due)} steps to be asked for again)"

    @property
    def next(self) -> float | None:
        """When the first of them is to be asked for."""
        return self._due[0][0] if self._due else None

    def pop(self) -> int:
        """The first of them."""
        return heapq.heappop(self._due)[1]

    def again(self, step: int, when: float) -> None:
        """A step is to be asked for at a time."""
        heapq.heappush(self._due, (when, step))

    def tried(self, step: int) -> set[Endpoint]:
        """Who was asked for it in vain."""
        return self._tried.get(step, set())

    def silence(self, step: int, sent: float, timeout: float) -> float:
        """Seconds after which a node that was asked for it at `sent`, and says nothing, is asked whether it
        is there."""
        patience, deadline = self._patience.get(step), self._policy.deadline
        return silence(timeout, deadline, deadline if patience is None else patience.ends - sent)

    def failed(
        self,
        step: int,
        error: MeshError,
        request: Request,
        endpoint: Endpoint,
        now: float,
        since: float | None = None,
    ) -> None:
        """Another node is asked now, or this one later. `since`: when it began to be away, if that was
        noticed later. Raises what it ends with where that is no use, or too late."""
        if since is not None:
            self._patience_with(step, since)
        if isinstance(error, ServerError) and error.blames_keys:
            self._keys_failed(step, error, now)
            return
        tried = self._tried.setdefault(step, set())
        if failed(self._router, request, tried, endpoint, error):
            self.again(step, now)
            return
        tried.clear()
        self.again(step, now + self._patience_with(step, now).delay(error, now))

    def _keys_failed(self, step: int, error: ServerError, now: float) -> None:
        """Asked again at once with keys that were renewed. Where they come from a file and their time is
        over, they are waited for: whoever renews it is late."""
        try:
            self._refused[step] = other_keys(self._keys, error, self._refused.get(step))
        except ServerError as final:
            if final.code != "ExpiredToken" or not self._keys.path:
                raise
            self.again(step, now + self._patience_with(step, now).wait(final, now))
        else:
            self.again(step, now)

    def _patience_with(self, step: int, now: float) -> Patience:
        return self._patience.setdefault(step, Patience(self._policy, started=now))

    def worked(self, step: int) -> None:
        """It is here."""
        self._patience.pop(step, None)
        self._tried.pop(step, None)
        self._refused.pop(step, None)
