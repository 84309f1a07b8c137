"""Messages of a warm-up: what a job asks each node to do, and how far the node is.

A request is repeated as long as the job runs; the first one begins the node's task, and each response has
the totals of the task so far.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from meshd.core.api_errors import Code  # noqa: TC001  msgspec reads the annotations
from meshd.rpc.peer_rpc import PREFIX, PeerCall
from meshd.rpc.process_rpc import Method

Text = Annotated[str, Meta(max_length=4096)]
MAX_FAILURES: Final = 100
MAX_REASONS: Final = 50


class WarmUpRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Warm up the samples that `plan` reads in `epoch`.

    `session`: names the job's run; `account`: whose share of the processes' time to use. `version`: of the
    cluster map. `own`: only the samples whose rows this node builds under it. `bucket`, `prefix`: only
    samples in these objects. `limit`: bytes that the plan's results may take on the node, None if the node
    decides; `rate`: source bytes a second, 0 for no limit. `stop`: end the task.
    """

    session: Annotated[str, Meta(max_length=64)]
    account: Annotated[str, Meta(max_length=256)]
    plan: Annotated[str, Meta(max_length=64)]
    epoch: int = 0
    version: int = 0
    own: bool = False
    bucket: Text = ""
    prefix: Text = ""
    limit: int | None = None
    rate: Annotated[int, Meta(ge=0)] = 0
    stop: bool = False


class WarmUpStatus(msgspec.Struct, omit_defaults=True):
    """The totals of a task. `run`: another one if the task had to begin again.

    Each of `samples` is one of: `stored` now, `there` before, left out (`left`, by reason), or broken
    (`bad`, by reason). `bytes`: of their sources; `kept_bytes`: stored now; `seconds`: of processors.
    `refused`: why this node keeps nothing of the plan. `code`, `error`: why the task failed. `failures`:
    (name, reason) of the first broken samples.
    """

    run: str = ""
    done: bool = False
    refused: str = ""
    code: Code | Literal[""] = ""
    error: str = ""
    samples_total: int = 0
    bytes_total: int = 0
    samples: int = 0
    bytes: int = 0
    stored: int = 0
    there: int = 0
    kept_bytes: int = 0
    seconds: float = 0.0
    left: dict[str, int] = {}
    bad: dict[str, int] = {}
    failures: list[tuple[str, str]] = []

    def count_left(self, why: str, samples: int = 1) -> None:
        """Count samples that were left out."""
        if samples:
            self.left[why] = self.left.get(why, 0) + samples

    def count_bad(self, name: str, why: str) -> None:
        """Count a broken sample."""
        known = why in self.bad or len(self.bad) < MAX_REASONS
        reason = why if known else "other reasons"
        self.bad[reason] = self.bad.get(reason, 0) + 1
        if len(self.failures) < MAX_FAILURES:
            self.failures.append((name, why))


WARM_UP: Final = PeerCall(
    f"{PREFIX}batches/warm-up",
    request=WarmUpRequest,
    response=WarmUpStatus,
    map_wait=1.0,
    errors="batch",
)
WARM_UP_HERE: Method[WarmUpRequest, WarmUpStatus] = Method("warm-up", WarmUpRequest, WarmUpStatus)
"""The same call, from a worker to its coordinator."""
