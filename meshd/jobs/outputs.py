"""Outputs of a job: which exist, the writer, and the removal of stale ones.

Law: an output is written under the rights of the job's user. One that already exists with the same source
digest is skipped. Cleanup removes only objects that this job wrote.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.jobs.authorization import BucketGrant
from meshd.jobs.output_store import OutputMetadata, OutputTarget
from meshd.jobs.source_reader import SourceReader
from meshd.store.integrity.verification import VerifiedExtents
from meshd.util import failpoints

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Mapping, Sequence

    from meshd.jobs.job_kind import JobRun, JobServices
    from meshd.jobs.output_store import BodyPiece
    from meshwire.checksums.body_checksums import BodyVerifier
    from meshwire.jobs.job_plan import JobPlan

JOB_METADATA_KEY: Final = "mesh-job"
SOURCE_DIGEST_KEY: Final = "mesh-made-of"
"""Metadata keys of an output: the job that wrote it, and the digest of its sources."""
_PAGE: Final = 1000
_AT_A_TIME: Final = 2


class OutputSpec(msgspec.Struct, frozen=True):
    """An output to write; `size` in bytes if it is known in advance.

    `made_of`: a digest of its sources, which differs for any other content of this name.
    """

    key: str
    size: int | None
    made_of: str
    content_type: str


class OutputWriter:
    """Writes the outputs of one job run."""

    def __init__(self, tools: JobServices, running: JobRun) -> None:
        """Raises S3Error NoSuchBucket if the target bucket does not exist."""
        self._outputs, self._versions, self._running = tools.outputs, tools.versions, running
        self._bucket = running.spec.target.bucket
        self._grant = BucketGrant.for_bucket(tools.access, running.caller, "s3:PutObject", self._bucket)

    def __repr__(self) -> str:
        return f"<OutputWriter to {self._bucket}>"

    async def which_exist(self, outputs: Sequence[OutputSpec]) -> list[bool]:
        """Return which outputs exist, written by this job or by an equivalent one."""
        found = await self._outputs.lookup_outputs(self._bucket, [output.key for output in outputs])
        return [
            metadata is not None and metadata.get(SOURCE_DIGEST_KEY) == output.made_of
            for output, metadata in zip(outputs, found, strict=True)
        ]

    async def output_exists(self, output: OutputSpec) -> bool:
        """Return whether one output exists."""
        return (await self.which_exist([output]))[0]

    async def write_output(
        self, output: OutputSpec, body: AsyncGenerator[BodyPiece, None], sums: OutputDigest
    ) -> None:
        """Store the body. `sums` is read after all of it was taken.

        A piece that is a memoryview must not change until the second piece after it is requested. Raises
        BatchError AccessDenied, Busy; StoreError, S3Error, and what the body raises.
        """
        self._grant.require_access(output.key)
        target = OutputTarget(self._bucket, output.key, output.size)
        async with aclosing(self._count_bytes(body)) as counted:
            await self._outputs.write_output(target, counted, lambda: self._facts(output, sums))
        await failpoints.hit_async("jobs.output.done")

    async def _count_bytes(self, body: AsyncGenerator[BodyPiece, None]) -> AsyncGenerator[BodyPiece, None]:
        async with aclosing(body):
            async for piece in body:
                yield piece
                self._running.tally.record_bytes(len(piece))

    def _facts(self, output: OutputSpec, sums: OutputDigest) -> OutputMetadata:
        return OutputMetadata(
            sums.etag,
            {"content-type": output.content_type},
            {JOB_METADATA_KEY: self._running.job_id, SOURCE_DIGEST_KEY: output.made_of},
            dict(sums.checksums),
            self._versions.owner_for_write(self._bucket, self._running.caller.identity.user_id, None),
        )


class OutputDigest:
    """ETag, checksums and size of a body, set when all of it has been read."""

    def __init__(self, etag: str = "") -> None:
        self.etag, self.size = etag, 0
        self.checksums: Mapping[str, str] = {}

    def __repr__(self) -> str:
        return f"OutputDigest({self.etag!r}, {dict(self.checksums)})"

    def set_from_verifier(self, verifier: BodyVerifier) -> None:
        """Set the values that an upload of these bytes would have."""
        digest = verifier.finish()
        self.etag, self.checksums, self.size = digest.md5_hex, digest.checksums, digest.size


async def remove_stale_outputs(tools: JobServices, running: JobRun, present: Container[str]) -> None:
    """Remove objects under the target that this job wrote earlier and that are not in `present`.

    Raises BatchError AccessDenied.
    """
    target = running.spec.target
    grant = BucketGrant.for_bucket(tools.access, running.caller, "s3:DeleteObject", target.bucket)
    after, more = "", True
    while more:
        page = await tools.outputs.list_outputs(target.bucket, target.prefix, after, _PAGE)
        stale = [
            key
            for key, record in page.entries
            if record.metadata.get(JOB_METADATA_KEY) == running.job_id and key not in present
        ]
        for key in stale:
            grant.require_access(key)
        if stale:
            await tools.outputs.remove_outputs(target.bucket, stale)
        running.tally.removed += len(stale)
        after, more = page.next_after, page.truncated


async def write_planned_outputs(
    tools: JobServices,
    running: JobRun,
    plan: JobPlan,
    write: Callable[[SourceReader, OutputWriter], Awaitable[None]],
) -> None:
    """Run `write` in two tasks, which share the outputs of the plan; then remove the stale ones."""
    running.tally.phase = "writing"
    running.tally.outputs_total, running.tally.bytes_total = len(plan), plan.total
    writer, proofs = OutputWriter(tools, running), VerifiedExtents()

    async def run() -> None:
        with closing(SourceReader(tools, running, plan, proofs)) as reader:
            await write(reader, writer)

    async with asyncio.TaskGroup() as group:
        for _ in range(_AT_A_TIME):
            group.create_task(run())
    running.tally.phase = "tidying"
    await remove_stale_outputs(tools, running, frozenset(plan.outputs))
