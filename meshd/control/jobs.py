"""Job table: specification, owner, state and progress of each job.

Law: workers create jobs and request their cancellation; the coordinator that runs a job writes the
rest. Every write is conditional, so neither side overwrites the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from meshd.control.cached_topic import CachedTopic
from meshd.control.control_api import ABSENT, VersionConflictError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshd.control.control_api import ControlStore

TOPIC: Final = "jobs"
State = Literal["queued", "running", "done", "failed", "cancelled", "paused"]
ENDED: Final = frozenset({"done", "failed", "cancelled", "paused"})


class Principal(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whose rights a job has: those of the key it was started with, within a temporary credential's policies
    (`parent` is then the key behind it, `issued` and `rounds` say whether it was revoked since), from where
    it was started."""

    user_id: str
    access_key: str
    parent: str = ""
    session: str = ""
    policies: tuple[str, ...] = ()
    source_ip: str = ""
    secure: bool = False
    tls: str = ""
    issued: int = 0
    rounds: tuple[int, int] = (0, 0)


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far a run has come; totals are 0 until its plan is made. `there`: outputs of the same content that
    an earlier run left; `removed`: outputs of earlier runs that are none any more."""

    phase: str = ""
    outputs: int = 0
    outputs_total: int = 0
    samples: int = 0
    samples_total: int = 0
    bytes: int = 0
    bytes_total: int = 0
    written: int = 0
    there: int = 0
    removed: int = 0
    rate: float = 0.0
    """Bytes a second, lately."""
    copies: int = 1
    """So many of each output: the counts are of all of them."""


class Failure(msgspec.Struct, frozen=True):
    """What could not be read or written, and why."""

    name: str
    error: str


class Job(msgspec.Struct, frozen=True, omit_defaults=True):
    """One job; times in ms since 1970. `run` counts how often it was started; `cancel`: its end was asked
    for, with `pause` to be started again; `error`: why it failed; `node`: who runs it."""

    job_id: str
    kind: str
    spec: str
    principal: Principal
    created_ms: int
    state: State = "queued"
    run: int = 1
    cancel: bool = False
    pause: bool = False
    started_ms: int = 0
    ended_ms: int = 0
    progress: Progress = Progress()
    failed: int = 0
    failures: tuple[Failure, ...] = ()
    error: str = ""
    node: str = ""

    @property
    def ended(self) -> bool:
        return self.state in ENDED


class JobTable:
    """Jobs by id. Reads are dictionary reads."""

    def __init__(self, control: ControlStore) -> None:
        self._documents = CachedTopic(control, TOPIC, Job)

    def __repr__(self) -> str:
        return f"<JobTable {self._documents!r}>"

    def get(self, job_id: str) -> Job | None:
        return self._documents.current().get(job_id)

    async def get_fresh(self, job_id: str) -> Job | None:
        """A job that another worker or node may have started just now. Asks the engine about one that is not
        known here."""
        return await self._documents.get_fresh(job_id)

    def list_all(self) -> Mapping[str, Job]:
        """Every job by id."""
        return self._documents.current()

    async def update_job(self, job_id: str, decide: Callable[[Job | None], Job | None]) -> Job | None:
        """Replace a job by what `decide` makes of the present one (None: there is none, or leave it so),
        durably and atomically; what is there then. `decide` may be called again, and may raise."""
        while True:
            version = self._documents.version(job_id)  # read first: an older one only conflicts
            present = self.get(job_id)
            wanted = decide(present)
            if wanted is None or wanted == present:
                return present
            try:
                await self._documents.put(job_id, wanted, expect=version or ABSENT)
            except VersionConflictError:
                continue
            return wanted

    async def delete_job(self, job_id: str) -> None:
        """Remove a job's record."""
        await self._documents.delete(job_id)
