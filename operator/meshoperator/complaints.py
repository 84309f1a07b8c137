"""Events about daemons that do not start: one a pod and reason, once it has lasted.

Law: what a pod is on its way through (a volume that is being attached) is not complained about. What is
remembered is lost with the process; the events' names keep them from being written twice.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from meshoperator.diagnoses import advised, stuck

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from meshoperator.dataloops import Says
    from meshoperator.meshes import Manifest
    from meshoperator.steering import Pod

_PATIENCE: Final = timedelta(minutes=1)


class Complaints:
    """`now`: the time as Kubernetes writes it."""

    def __init__(self, recorder: Says, now: Callable[[], str]) -> None:
        self._recorder, self._now = recorder, now
        self._since: dict[str, dict[tuple[str, str], datetime | None]] = {}
        """By uid of a MeshCluster: pods and reasons, and since when; None: it was said."""

    def __repr__(self) -> str:
        return f"<Complaints about {sum(map(len, self._since.values()))} daemons>"

    async def run(self, document: Manifest, pods: Iterable[Pod]) -> None:
        """Say of the pods of a MeshCluster what is to be said. Raises nothing: events may be lost."""
        metadata, now = document["metadata"], datetime.fromisoformat(self._now())
        by_name = {pod.name: pod for pod in pods}
        found = stuck(by_name.values())
        before = self._since.pop(metadata["uid"], {})
        since = {
            (by_name[name].uid, each.word): before.get((by_name[name].uid, each.word), now)
            for name, each in found.items()
        }
        if since:
            self._since[metadata["uid"]] = since
        for name, each in found.items():
            key = by_name[name].uid, each.word
            began = since[key]
            if began is not None and now - began >= _PATIENCE:
                since[key] = None
                what_to_do = advised({name: each}, metadata["namespace"])
                message = f"{name} {by_name[name].trouble}; {what_to_do}"
                await self._recorder.say(document, "DaemonStuck", message, once="/".join(key))

    def forget(self, uid: str) -> None:
        """A MeshCluster goes."""
        self._since.pop(uid, None)
