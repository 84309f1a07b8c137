"""What is planned for a dataset is done at the daemons: homes of its bucket, loads, and what lets go.

Law: `homing` decides, from what is there; every step may be done twice. What a daemon refuses is said, and
holds up nothing but the move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from meshoperator.daemons import DaemonError
from meshoperator.homing import Seen, step, told
from meshoperator.placing import Kept

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshoperator.daemons import Access, Daemons
    from meshoperator.dataloops import Says
    from meshoperator.datastatuses import Figures
    from meshoperator.homing import Homing
    from meshoperator.meshes import Manifest
    from meshoperator.placing import Board, Holding

_RUNS: Final = ("queued", "running", "cancelling", "pausing")
_AGAIN: Final = 600.0  # seconds from a failed load for a move to the next


class House:
    """See the module."""

    def __init__(self, daemons: Daemons, board: Board, recorder: Says, now: Callable[[], float]) -> None:
        self._daemons, self._board, self._recorder, self._now = daemons, board, recorder, now

    def __repr__(self) -> str:
        return f"<House of {len(self._board.kept)} datasets>"

    async def keep(
        self,
        document: Manifest,
        access: Access,
        nodes: Sequence[Access],
        homes: tuple[str, ...],
        holdings: Sequence[Holding],
        figures: Figures,
        jobs: Sequence[Manifest],
    ) -> Homing:
        """The next step, taken. Raises DaemonError, UnreachableError."""
        key = document["metadata"]["namespace"], document["metadata"]["name"]
        bucket = document["spec"].get("bucket") or key[1]
        last = jobs[0] if jobs else None
        there = figures.source[1] if figures.source is not None else None
        seen = Seen(
            homes,
            self._board.planned.get(key),
            {each.node: each.bytes for each in holdings},
            there,
            unplaced=bool(self._board.why(*key)),
            brought=self._board.loaded.get(key) == homes and _went_well(last),
        )
        now = step(seen)
        change = told(homes, now)
        if change:
            body = {"homes": list(now.homes)}
            await self._daemons.ask(access, "PATCH", f"/-/buckets/{quote(bucket, safe='')}", body)
            await self._recorder.say(document, "Moving" if now.moving else "Placed", change)
        generation = document["metadata"].get("generation") or 0
        self._board.tell(*key, holdings, Kept(now.homes, now.leaving, there, generation))
        if now.load and self._may_load(key, now, last):
            await self._load(document, access, bucket, now, key)
        if now.release and not change:  # every daemon has heard of it by then
            await self._release(document, nodes, holdings, bucket, now)
        return now

    def _may_load(self, key: tuple[str, str], now: Homing, last: Manifest | None) -> bool:
        if last is not None and last["state"] in _RUNS:
            return False
        if self._board.loaded.get(key) != now.homes or last is None:
            return True
        return bool(self._now() - last["ended_ms"] / 1000 > _AGAIN)

    async def _load(
        self, document: Manifest, access: Access, bucket: str, now: Homing, key: tuple[str, str]
    ) -> None:
        """Have a whole copy brought to its new homes."""
        wanted = {"kind": "prefetch", "source": f"s3://{bucket}/"}
        try:
            await self._daemons.ask(access, "POST", "/-/jobs", wanted)
        except DaemonError as error:
            if error.status != 501:
                raise
            return  # these daemons cannot: it comes by being read
        self._board.loaded[key] = now.homes
        await self._recorder.say(document, "Bringing", f"a copy is loaded to {', '.join(now.behind)}")

    async def _release(
        self,
        document: Manifest,
        nodes: Sequence[Access],
        holdings: Sequence[Holding],
        bucket: str,
        now: Homing,
    ) -> None:
        freed = 0
        for each, held in zip(nodes, holdings, strict=True):
            if held.node in now.release:
                gone: dict[str, Any] = await self._daemons.ask(each, "DELETE", residence(bucket, ""))
                freed += gone["bytes"]
        await self._recorder.say(
            document, "Released", f"{freed} bytes on {', '.join(now.release)}, which keeps no copy any more"
        )


def _went_well(job: Manifest | None) -> bool:
    return job is not None and bool(job["state"] == "done" and not job["failed"])


def residence(bucket: str, prefix: str) -> str:
    """Where a daemon says what it holds of a bucket."""
    return f"/-/residence/{quote(bucket, safe='')}?prefix={quote(prefix, safe='')}"
