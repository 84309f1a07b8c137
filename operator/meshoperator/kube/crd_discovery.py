"""CRD discovery: which of our kinds the API server serves while the operator runs.

Law: kopf watches the kinds that exist at start, ends when one disappears and misses one that appears,
because only administrators may watch definitions. A kind that appears therefore restarts the process.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

import httpx2
from lightkube import ApiError

from meshoperator.resources import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshoperator.kube.client import Kube

_log = logging.getLogger(__name__)
_LOOK: Final = 5.0
_ALL: Final = frozenset(kind.plural for kind in KINDS)


class CrdDiscovery:
    """`end`: ends this process, so that another one begins."""

    def __init__(self, kube: Kube, end: Callable[[], None], look: float = _LOOK) -> None:
        self._kube, self._end, self._look = kube, end, look
        self._served = _ALL

    def __repr__(self) -> str:
        return f"<Definitions of {len(self._served)} kinds>"

    async def load_served(self) -> None:
        """What there is when kopf begins; to be called before it does. Where it cannot be read, all is
        taken to be there: kopf will find out."""
        try:
            self._served = await self._kube.served()
        except (ApiError, httpx2.HTTPError) as error:
            _log.warning("definitions cannot be looked at: %s", error)
            return
        if missing := sorted(_ALL - self._served):
            how = "kubectl apply --server-side -f helm/shardmesh/crds/"
            _log.error(
                "there are no definitions of %s: they are not looked after; %s", ", ".join(missing), how
            )

    async def wait_for_new(self) -> None:
        """Until one comes that was not there."""
        while not self._served >= _ALL:
            await asyncio.sleep(self._look)
            try:
                now = await self._kube.served()
            except (ApiError, httpx2.HTTPError) as error:
                _log.warning("definitions cannot be looked at: %s", error)
                continue
            if come := sorted(_ALL & now - self._served):
                _log.warning("there are definitions of %s now: the operator begins anew", ", ".join(come))
                self._end()
                return
