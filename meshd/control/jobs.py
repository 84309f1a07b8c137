"""Job table: specification, owner, state and progress of each job.

Law: workers create jobs and request their cancellation; the coordinator that runs a job writes the
rest. Every write is conditional, so neither side overwrites the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from meshd.control.cached_topic import CachedTopic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshd.control.control_api import ControlStore

TOPIC: Final = "jobs"
State = Literal["queued", "running", "done", "failed", "cancelled", "paused"]
ENDED: Final = frozenset({"done", "failed", "cancelled", "paused"})


class Principal(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whose rights a job has: those of the key that started it, within the policies of a temporary credential
    (`parent` is then the key behind it; `issued` and `rounds` show whether it was revoked since), and the
    client that started it."""

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
    """Progress of a run; totals are 0 until it is planned. `there`: outputs of the same content left by an
    earlier run; `removed`: outputs of earlier runs that are obsolete."""

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
    """Bytes per second, recently."""
    copies: int = 1
    """The number of copies of each output; the counts include all of them."""


class Failure(msgspec.Struct, frozen=True):
    """What could not be read or written, and why."""

    name: str
    error: str


class Job(msgspec.Struct, frozen=True, omit_defaults=True):
    """A job; times in ms since 1970. `run`: how often it was started; `cancel`: its end was requested, with
    `pause` in order to start it again; `error`: why it failed; `node`: the node that runs it; `report`: more
    about what was done, for some kinds."""

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
    report: dict[str, Any] | None = None

    @property
    def ended(self) -> bool:
        return self.state in ENDED


_decode = msgspec.json.Decoder(Job).decode


class JobTable:
    """Jobs by id. Reads are dictionary reads."""

    def __init__(self, control: ControlStore) -> None:
        self._documents = CachedTopic(control, TOPIC, _decode)

    def __repr__(self) -> str:
        return f"<JobTable {self._documents!r}>"

    def get(self, job_id: str) -> Job | None:
        return self._documents.current().get(job_id)

    async def get_latest(self, job_id: str) -> Job | None:
        """Returns a job as the engine has it, also if another worker or node has just started or ended it.
        Raises ControlError if that takes too long."""
        return await self._documents.get_latest(job_id)

    def list_all(self) -> Mapping[str, Job]:
        """Returns every job by id."""
        return self._documents.current()

    async def update_job(self, job_id: str, decide: Callable[[Job | None], Job | None]) -> Job | None:
        """Replaces a job by what `decide` returns for the current one (None: there is none; or keep it),
        durably and atomically; returns the result. `decide` may be called repeatedly, and may raise."""
        result: Job | None = None

        def change(present: Job | None) -> Job | None:
            nonlocal result
            wanted = decide(present)
            result = present if wanted is None else wanted
            return result

        await self._documents.update(job_id, change)
        return result

    async def delete_job(self, job_id: str) -> None:
        """Removes a job's record."""
        await self._documents.delete(job_id)
