"""Base of the controllers of datasets, loads and views, with a finalizer that waits for the daemons.

Law: each pass starts from the current state. A pass waits for an unreachable daemon and reports it in
a condition; a deletion never waits for a mesh that is gone, nor for a daemon beyond a limit.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from meshoperator.daemon_client import DaemonError, NoMeshError, UnreachableError
from meshoperator.planners.load_planner import format_time
from meshoperator.planners.status import conditions
from meshoperator.resources import GROUP, ResourceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshoperator.cluster_model import Manifest
    from meshoperator.daemon_client import DaemonClient
    from meshoperator.kube.client import Kube

FINALIZER: Final = f"{GROUP}/daemons"
PATIENCE: Final = 600.0
"""Seconds for which a deletion waits for unreachable daemons, or for a spec that can be parsed."""
SOON, LATER = 5.0, 60.0
_MAX_MESSAGE: Final = 1024  # characters of a condition's message


class EventWriter(Protocol):
    """Writes events; `kube.event_recorder.EventRecorder` is the implementation."""

    async def record_event(self, about: Manifest, reason: str, message: str, *, once: str = "") -> None: ...


class BaseController:
    """A subclass sets `kind` and implements `sync` and `finalize`. `now` returns seconds since 1970."""

    kind: ClassVar[str]
    holds: ClassVar[bool] = True
    """Whether a deletion needs `finalize`."""

    def __init__(
        self, kube: Kube, daemons: DaemonClient, recorder: EventWriter, now: Callable[[], float]
    ) -> None:
        self._kube, self._daemons, self._recorder, self._now = kube, daemons, recorder, now

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._daemons!r}>"

    async def reconcile(self, namespace: str, name: str) -> float | None:
        """Run one pass; return the seconds until the next, or None if the object is gone. Raises ApiError."""
        document = await self._kube.get(self.kind, name, namespace)
        if document is None:
            return None
        document = {"kind": self.kind, "apiVersion": f"{GROUP}/v1alpha1", **document}
        finalizers = document["metadata"].get("finalizers") or []
        if document["metadata"].get("deletionTimestamp"):
            return await self._end(document, finalizers)
        if self.holds and FINALIZER not in finalizers:
            await self._write(document, [*finalizers, FINALIZER])
            document["metadata"].pop("resourceVersion", None)
        status, rest = await self.sync(document)
        present = document.get("status") or {}
        if status is not None and any(present.get(key) != value for key, value in status.items()):
            await self._kube.set_status(self.kind, name, namespace, status)
        return rest

    async def sync(self, document: Manifest) -> tuple[dict[str, Any] | None, float | None]:
        """Observe, do the next step, and return status fields and seconds to the next pass. Raises
        ApiError."""
        raise NotImplementedError

    async def finalize(self, document: Manifest) -> None:
        """Clean up before the object is deleted. Raises DaemonError, UnreachableError, ResourceError,
        ApiError."""

    async def record_new_error(self, document: Manifest, reason: str, message: str) -> None:
        """Record an event, unless a condition of the object already has its message."""
        before = (document.get("status") or {}).get("conditions") or ()
        if not any(each.get("message") == message[:_MAX_MESSAGE] for each in before):
            await self._recorder.record_event(document, reason, message)

    async def _end(self, document: Manifest, finalizers: list[str]) -> float | None:
        if FINALIZER not in finalizers:
            return None
        try:
            await self.finalize(document)
        except NoMeshError as error:  # e.g. a namespace is deleted, and the mesh went first
            message = f"deleted without any change in the mesh: {error}"
            await self._recorder.record_event(document, "Deleted", message)
        except (DaemonError, UnreachableError, ResourceError) as error:
            since = datetime.fromisoformat(document["metadata"]["deletionTimestamp"])
            if self._now() - since.astimezone(UTC).timestamp() < PATIENCE:
                await self._wait(document, str(error))
                return SOON
            message = (
                f"deleted without cleaning up in the mesh, which failed for {PATIENCE:.0f} s: {error}. "
                f"Remove by hand what this {self.kind} left there (its bucket, jobs or view)"
            )
            await self._recorder.record_event(document, "DeletionForced", message)
        await self._write(document, [each for each in finalizers if each != FINALIZER])
        return None

    async def _wait(self, document: Manifest, why: str) -> None:
        metadata = document["metadata"]
        found = self.conditions(document, [("Deleted", False, "WaitsForDaemons", why)])
        kept = [
            each
            for each in (document.get("status") or {}).get("conditions") or ()
            if each["type"] != "Deleted"
        ]
        status = {"conditions": [*kept, *found]}
        await self._kube.set_status(self.kind, metadata["name"], metadata["namespace"], status)

    async def _write(self, document: Manifest, finalizers: list[str]) -> None:
        """Replace the finalizers. Raises ApiError 409 if the object changed since it was read."""
        metadata = document["metadata"]
        change = {"finalizers": finalizers, "resourceVersion": metadata["resourceVersion"]}
        await self._kube.patch(self.kind, metadata["name"], metadata["namespace"], {"metadata": change})

    def conditions(
        self, document: Manifest, found: list[tuple[str, bool | None, str, str]]
    ) -> list[dict[str, Any]]:
        """Return metav1 Conditions; reasons and messages from daemons are cut to what the API accepts."""
        fitted = [
            (kind, whether, _condition_reason(reason), message[:_MAX_MESSAGE])
            for kind, whether, reason, message in found
        ]
        return conditions(document, fitted, format_time(self._now()))


def _condition_reason(reason: str) -> str:
    return reason if reason[:1].isalpha() and reason.isidentifier() else f"Status{reason}"
