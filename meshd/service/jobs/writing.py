"""What a job writes: objects that say of what they were made.

Law: an output is committed whole or not at all, under the rights of the job's maker and the target's present
settings. One that is there already, made of the same, is left alone: so a job that was killed goes on.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from meshd.kit import failpoints
from meshd.service.jobs.outputs import Facts, Target
from meshd.service.jobs.principals import Grant

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from meshd.service.jobs.kinds import Running, Tools
    from meshd.service.jobs.outputs import Lent
    from meshwire.checksums import BodyVerifier

JOB: Final = "mesh-job"
MADE_OF: Final = "mesh-made-of"
"""Metadata of an output: the job that made it, and the digest of what it is made of."""


@dataclass(frozen=True, slots=True)
class Output:
    """An object to be written; `size` in bytes where it is known before. `made_of` tells it from any other
    content of this name."""

    key: str
    size: int | None
    made_of: str
    content_type: str


class OutputWriter:
    """Writes the outputs of one job. One a job that runs."""

    def __init__(self, tools: Tools, running: Running) -> None:
        """Raises S3Error NoSuchBucket."""
        self._outputs, self._versions, self._running = tools.outputs, tools.versions, running
        self._bucket = running.spec.target.bucket
        self._grant = Grant.of(tools.access, running.caller, "s3:PutObject", self._bucket)

    def __repr__(self) -> str:
        return f"<OutputWriter to {self._bucket}>"

    async def are_there(self, outputs: Sequence[Output]) -> list[bool]:
        """Which outputs were written before, by this job or a like one."""
        found = await self._outputs.present(self._bucket, [output.key for output in outputs])
        return [
            record is not None and record.metadata.get(MADE_OF) == output.made_of
            for output, record in zip(outputs, found, strict=True)
        ]

    async def is_there(self, output: Output) -> bool:
        """The same of one."""
        return (await self.are_there([output]))[0]

    async def write(self, output: Output, body: AsyncGenerator[Lent, None], sums: Sums) -> None:
        """Store the body. `sums` are asked for once it has all been taken; a piece that is a memoryview must
        stay as it is until the one after the next is asked for. Raises BatchError AccessDenied, Busy;
        StoreError, S3Error, whatever the body raises."""
        self._grant.require(output.key)
        target = Target(self._bucket, output.key, output.size)
        async with aclosing(self._counted(body)) as counted:
            await self._outputs.write(target, counted, lambda: self._facts(output, sums))
        await failpoints.reach("jobs.output.done")

    async def _counted(self, body: AsyncGenerator[Lent, None]) -> AsyncGenerator[Lent, None]:
        async with aclosing(body):
            async for piece in body:
                yield piece
                self._running.tally.move(len(piece))

    def _facts(self, output: Output, sums: Sums) -> Facts:
        return Facts(
            sums.etag,
            {"content-type": output.content_type},
            {JOB: self._running.job_id, MADE_OF: output.made_of},
            dict(sums.checksums),
            self._versions.owner(self._bucket, self._running.caller.identity.user_id, None),
        )


class Sums:
    """ETag, checksums and size of a body, known once it has gone by."""

    def __init__(self, etag: str = "") -> None:
        self.etag, self.size = etag, 0
        self.checksums: Mapping[str, str] = {}

    def __repr__(self) -> str:
        return f"Sums({self.etag!r}, {dict(self.checksums)})"

    def take(self, verifier: BodyVerifier) -> None:
        """As an upload of these bytes would have them."""
        digest = verifier.finish()
        self.etag, self.checksums, self.size = digest.md5_hex, digest.checksums, digest.size
