"""What a job writes: objects that say of what they were made.

Law: an output is committed whole or not at all, under the rights of the job's maker and the target's present
settings. One that is there already, made of the same, is left alone: so a job that was killed goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from meshd.assembly.errors import BatchError
from meshd.kit import failpoints
from meshd.service.jobs.principals import Grant
from meshd.store.records import NULL, Meta
from meshwire.conditions import Conditions

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from meshd.service.jobs.kinds import Running, Tools
    from meshd.store.records import Record
    from meshwire.checksums import BodyVerifier

JOB: Final = "mesh-job"
MADE_OF: Final = "mesh-made-of"
"""Metadata of an output: the job that made it, and the digest of what it is made of."""


Lent = bytes | memoryview


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
        self._store, self._versions, self._running = tools.store, tools.versions, running
        self._stored = tools.stored
        self._bucket = running.spec.target.bucket
        self._grant = Grant.of(tools.access, running.caller, "s3:PutObject", self._bucket)

    def __repr__(self) -> str:
        return f"<OutputWriter to {self._bucket}>"

    def is_there(self, output: Output) -> bool:
        """Whether the output was written before, by this job or a like one."""
        record = self._store.get(self._bucket, output.key)
        return record is not None and record.metadata.get(MADE_OF) == output.made_of

    async def write(self, output: Output, body: AsyncGenerator[Lent, None], sums: Sums) -> Record:
        """Store the body. `sums` are asked for once it has all been taken; a piece that is a memoryview must
        stay as it is until the one after the next is asked for. Raises BatchError AccessDenied, StoreError,
        whatever the body raises."""
        self._grant.require(output.key)
        writer = self._store.writer(self._bucket, output.key, size=output.size)
        try:
            async for piece in body:
                await (writer.write(piece) if isinstance(piece, bytes) else writer.lend(piece))
                self._running.tally.move(len(piece))
            failpoints.hit("jobs.output.written")
            meta = self._meta(output, sums)
            record = await writer.commit(meta, versioning=self._versions.setting(self._bucket))
        except BaseException:
            await writer.abort()
            raise
        failpoints.hit("jobs.output.committed")
        await self._settle(output, record)
        return record

    def _meta(self, output: Output, sums: Sums) -> Meta:
        return Meta(
            sums.etag,
            {"content-type": output.content_type},
            {JOB: self._running.job_id, MADE_OF: output.made_of},
            dict(sums.checksums),
            "FULL_OBJECT",
            self._versions.owner(self._bucket, self._running.caller.identity.user_id, None),
        )

    async def _settle(self, output: Output, record: Record) -> None:
        """The bucket may have been deleted meanwhile; then what was written must go again."""
        if not self._versions.has_bucket(self._bucket):
            same = Conditions(if_match=(record.etag,))
            await self._store.delete_version(
                self._bucket, output.key, record.version or NULL, conditions=same
            )
            raise BatchError("NoSuchBucket", f"the bucket {self._bucket!r} was deleted while the job ran")
        await self._stored(self._bucket, output.key, record)


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
