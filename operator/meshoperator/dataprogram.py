"""What the operator does beside clusters, put together: datasets, loads, views, placement, training pods.

Law: the webhook answers whoever leads; everything that writes waits until this operator does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import httpx2
from lightkube import ApiError

from meshoperator.admission import LABEL
from meshoperator.credentials import Catalogue, CredentialsLoop
from meshoperator.daemons import DaemonError, Daemons, UnreachableError
from meshoperator.datasets import DatasetLoop
from meshoperator.figuring import FiguresLoop
from meshoperator.loads import LoadLoop
from meshoperator.placements import PlacementLoop
from meshoperator.placing import Board
from meshoperator.podnotices import PodNotices
from meshoperator.resources import ResourceError
from meshoperator.views import ViewLoop
from meshoperator.webhook import Webhook

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from meshoperator.dataloops import Says
    from meshoperator.kube import Kube
    from meshoperator.meshes import Cluster
    from meshoperator.settings import OperatorSettings

_log = logging.getLogger(__name__)
_WATCH_SECONDS: Final = 240
_RENEW: Final = 600.0
"""Seconds from one look at all training pods to the next: keys are renewed long before they end."""
_LOOK: Final = 2.0
_PAUSE: Final = 1.0
_FAILURES: Final = (ApiError, httpx2.HTTPError, DaemonError, UnreachableError, ResourceError)


class DataProgram:
    """One a process. `leads` is set while this operator is the one that acts; `now`: seconds since 1970."""

    def __init__(
        self,
        kube: Kube,
        settings: OperatorSettings,
        recorder: Says,
        leads: asyncio.Event,
        now: Callable[[], float],
    ) -> None:
        self._kube, self._settings, self._leads = kube, settings, leads
        self.board = Board()
        self.daemons = Daemons(kube, now, self._endpoint)
        self._catalogue = Catalogue(kube, settings)
        self._keys = CredentialsLoop(kube, self.daemons, self._catalogue, now)
        self._notices = PodNotices(kube, settings, recorder, time.monotonic)
        self._placement = PlacementLoop(kube, settings, self.board)
        self._figures = FiguresLoop(kube, self.daemons)
        self._loops = (
            DatasetLoop(kube, self.daemons, recorder, now, self.board),
            LoadLoop(kube, self.daemons, recorder, now),
            ViewLoop(kube, self.daemons, recorder, now),
        )

    def __repr__(self) -> str:
        return f"<DataProgram {self.board.version}>"

    def passes(self) -> dict[str, Callable[[str, str], Awaitable[float | None]]]:
        """By kind."""
        return {loop.kind: loop.run for loop in self._loops}

    def work(self) -> list[Coroutine[None, None, None]]:
        """What goes on until it is cancelled."""
        found = []
        for namespace in self._settings.namespaces or (None,):
            found += [self._watch_pods(namespace), self._watch_new_pods(namespace)]
        found += [self._renew(), self._place(), self._measure(), self._notice()]
        return [*found, self._serve()] if self._settings.webhook is not None else found

    async def aclose(self) -> None:
        """Close what is open."""
        await self.daemons.aclose()

    def _endpoint(self, cluster: Cluster) -> str:
        said = self._settings.endpoint
        return said.format(name=cluster.name, namespace=cluster.namespace) if said else cluster.endpoint

    async def _serve(self) -> None:
        assert self._settings.webhook is not None
        folder = Path(self._settings.webhook_certificates)
        while True:
            try:
                async with Webhook(self._catalogue, folder, *self._settings.webhook) as hook:
                    _log.info("the webhook listens on port %d", hook.port)
                    await asyncio.Event().wait()
            except OSError as error:  # ssl.SSLError is one
                _log.error("the webhook cannot serve, pods go as they are: %s", error)
            await asyncio.sleep(5 * _PAUSE)

    async def _watch_pods(self, namespace: str | None) -> None:
        """Keys for training pods as they come."""
        while True:
            await self._leads.wait()
            try:
                async for pod in self._kube.watch("Pod", namespace, LABEL, _WATCH_SECONDS):
                    try:
                        await self._keys.run(pod)
                        await self._notices.look(pod)
                    except _FAILURES as error:
                        _log.warning("not all is done for %s yet: %s", pod["metadata"]["name"], error)
            except (ApiError, httpx2.HTTPError) as error:
                _log.warning("the watch of training pods broke off: %s", error)
            await asyncio.sleep(_PAUSE)

    async def _watch_new_pods(self, namespace: str | None) -> None:
        """Those with a misspelt label are in no other watch."""
        while True:
            await self._leads.wait()
            try:
                await self._notices.watch(namespace, self._leads)
            except (ApiError, httpx2.HTTPError) as error:
                _log.warning("the watch of new pods broke off: %s", error)
            await asyncio.sleep(_PAUSE)

    async def _renew(self) -> None:
        """All training pods, now and then; soon again while one could not be served."""
        while True:
            await self._leads.wait()
            failed = 0
            try:
                for namespace in self._settings.namespaces or (None,):
                    failed += await self._keys.run_all(namespace)
            except (ApiError, httpx2.HTTPError) as error:
                _log.warning("training pods cannot be looked at: %s", error)
                failed = 1
            await asyncio.sleep(5 * _PAUSE if failed else _RENEW)

    async def _notice(self) -> None:
        """All pods, now and then: those that were not seen when they were made."""
        while True:
            await self._leads.wait()
            try:
                await self._notices.run()
            except (ApiError, httpx2.HTTPError) as error:
                _log.warning("pods cannot be looked at for misspelt keys: %s", error)
            await asyncio.sleep(self._settings.pods_seconds)

    async def _measure(self) -> None:
        """What daemons hold, and how full their disks are, now and then."""
        while True:
            await self._leads.wait()
            try:
                await self._figures.run(self._settings.namespaces)
            except (ApiError, httpx2.HTTPError) as error:
                _log.warning("no figures: %s", error)
            await asyncio.sleep(self._settings.figures_seconds)

    async def _place(self) -> None:
        """A plan now and then, and when data has come somewhere or gone."""
        version, rest = -1, 0.0
        while True:
            await self._leads.wait()
            if version != self.board.version or rest <= 0:
                version, rest = self.board.version, self._settings.plan_seconds
                try:
                    await self._placement.run()
                except (ApiError, httpx2.HTTPError) as error:
                    _log.warning("no plan could be made: %s", error)
                    rest = 5 * _PAUSE
            await asyncio.sleep(_LOOK)
            rest -= _LOOK
