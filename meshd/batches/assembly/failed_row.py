"""FailedRow: a row of a frame that could not be rendered, as errors and the ledger of bad samples name it.

Law: an error says which sample of which object is at fault, and how to look at it and to make its row again.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Final

import msgspec

from meshd.batches.assembly.bad_sample_ledger import BadSample
from meshd.core.api_errors import BatchError
from meshwire.dataset.archive_paths import is_read_directly

if TYPE_CHECKING:
    from meshd.core.plan_record import Plan
    from meshd.transform.messages import Failure
    from meshwire.dataset.build_snapshot import Snapshot

_WRONG_OP: Final = "check with ds.preflight() that the ops fit what the samples are; otherwise "


class FailedRow(msgspec.Struct, frozen=True):
    """`node`: where it failed; `position`: of the row in the epoch; `sample`: the row's own, or the one that
    is mixed into it."""

    plan: Plan
    snapshot: Snapshot
    epoch: int
    node: str
    failure: Failure
    position: int
    sample: int

    @property
    def name(self) -> str:
        """The name of the sample."""
        return self.snapshot.sample_name(self.sample)

    @property
    def field(self) -> str:
        """The field that failed."""
        return list(self.plan.outputs)[self.failure.field]

    @property
    def object_name(self) -> tuple[str, str]:
        """Bucket and key of the object with the bytes of the field."""
        number = int(self._column.objects_at(self.sample))
        return self.snapshot.objects.bucket_of(number), self.snapshot.objects.keys[number]

    @property
    def url(self) -> str:
        """The address of that object."""
        return "s3://{}/{}".format(*self.object_name)

    @property
    def _column(self) -> Any:
        return self.snapshot.fields[self.field]

    def entry(self) -> BadSample:
        """Return its entry in the ledger."""
        return BadSample(self.name, self.failure.op, self.failure.message, self.position, self.epoch)

    def bad_sample_error(self, why: str, *, every: bool = False) -> BatchError:
        """Return the error of a bad sample. `every`: so many others are bad that the op may be wrong."""
        failure, advice = self.failure, _WRONG_OP if every else ""
        return BatchError(
            "BadSample",
            f"the sample {self.name} is bad: {failure.op} of {self.field!r}: {failure.message}{why}",
            help=f"{advice}look at it with: mesh cat {self._part()} > sample; replay its row "
            f"with: {self._command()}; repair or remove the object, raise max_bad, or set on_bad",
            detail=self.detail(),
        )

    def op_error(self) -> BatchError:
        """Return the error of an op that is at fault."""
        return BatchError(
            "OpFailed",
            f"the op {self.failure.op!r} failed on the sample {self.name}: {self.failure.message}",
            help=f"this is a bug in the op, not in the data; replay its row with: {self._command()}",
            detail=self.detail(),
        )

    def detail(self) -> dict[str, Any]:
        """Return the facts that errors carry. `replay`: the frame with only this row, the batch of one that
        begins at its position."""
        frame = f"/-/plans/{self.plan.hash}/{self.epoch}/0?batch=1&origin={self.position}"
        return {
            "key": self.name,
            "url": self.url,
            "node": self.node,
            "op": self.failure.op,
            "field": self.field,
            "error": self.failure.message,
            "position": self.position,
            "epoch": self.epoch,
            "replay": f"GET {frame}",
        }

    def _part(self) -> str:
        """Return the arguments of `mesh cat` for the bytes of the sample, or for the object that has them."""
        column, objects = self._column, self.snapshot.objects
        number, length = int(column.objects_at(self.sample)), int(column.lengths_at(self.sample))
        if length == objects.sizes[number] or not is_read_directly(objects.keys[number]):
            return shlex.quote(self.url)
        return f"--offset {int(column.offsets_at(self.sample))} --length {length} {shlex.quote(self.url)}"

    def _command(self) -> str:
        return f"mesh replay {self.plan.hash} {self.position} --epoch {self.epoch}"
