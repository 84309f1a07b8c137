"""Steps of a pass that failed: when each is asked for again, and of whom not.

Law: decisions only; the reader asks. Another node is asked at once; when all were, one of them later.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from meshsdk.retrying import BackOff, Patience
from meshsdk.transport import failed

if TYPE_CHECKING:
    from meshsdk.errors import MeshError
    from meshsdk.routing import Router
    from meshsdk.settings import Endpoint
    from meshsdk.transport import Request


class Attempts:
    """Of one pass. `deadline`: seconds a step is tried for."""

    def __init__(self, router: Router, deadline: float) -> None:
        self._router, self._policy = router, BackOff(deadline)
        self._due: list[tuple[float, int]] = []
        self._tried: dict[int, set[Endpoint]] = {}
        self._patience: dict[int, Patience] = {}

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

    def failed(self, step: int, error: MeshError, request: Request, endpoint: Endpoint, now: float) -> None:
        """Another node is asked now, or this one later. Raises what it ends with where that is no use, or too
        late."""
        tried = self._tried.setdefault(step, set())
        if failed(self._router, request, tried, endpoint, error):
            self.again(step, now)
            return
        tried.clear()
        patience = self._patience.setdefault(step, Patience(self._policy, started=now))
        self.again(step, now + patience.delay(error, now))

    def worked(self, step: int) -> None:
        """It is here."""
        self._patience.pop(step, None)
        self._tried.pop(step, None)
