"""Event recorder: writes Kubernetes events about an object, each with a one-word reason and a sentence.

Law: an event that cannot be written is dropped and delays nothing.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from typing import TYPE_CHECKING, Final

import httpx2
from lightkube import ApiError

from meshoperator import metrics
from meshoperator.planners.pod_checks import REASONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshoperator.cluster_model import Manifest
    from meshoperator.kube.client import Kube

_log = logging.getLogger(__name__)
_COMPONENT: Final = "shardmesh-operator"
_MAX_NAME: Final = 230  # characters of the object's name in the event's name, which may have 253
_WARNINGS: Final = frozenset(
    {
        *REASONS,
        "DaemonStuck",
        "DeletionForced",
        "DisksShared",
        "LoadFailed",
        "Refused",
        "Replacing",
        "SourceRefused",
        "ViewRefused",
    }
)
"""Reasons that need attention."""


class EventRecorder:
    """Writes events. `now` returns the present time as Kubernetes writes it."""

    def __init__(self, kube: Kube, now: Callable[[], str]) -> None:
        self._kube, self._now = kube, now

    async def record_event(self, about: Manifest, reason: str, message: str, *, once: str = "") -> None:
        """Write an event about an object. With `once`, a key of the event's content, nothing is written while
        an event with the same object, reason and key exists, even if an earlier operator wrote it."""
        metrics.actions.labels(reason).inc()
        metadata, now = about["metadata"], self._now()
        _log.info("%s %s: %s: %s", about["kind"], metadata["name"], reason, message)
        token = secrets.token_hex(8)
        if once:
            token = hashlib.sha256(f"{metadata.get('uid')}/{reason}/{once}".encode()).hexdigest()[:16]
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{metadata['name'][:_MAX_NAME]}.{token}",
                "namespace": metadata["namespace"],
            },
            "involvedObject": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata.get("uid", ""),
            },
            "reason": reason,
            "message": message[:1024],
            "type": "Warning" if reason in _WARNINGS else "Normal",
            "source": {"component": _COMPONENT},
            "reportingComponent": _COMPONENT,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self._kube.create(event)
        except (ApiError, httpx2.HTTPError) as error:
            _log.warning("an event could not be written and is dropped: %s", error)
