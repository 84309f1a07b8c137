"""The mover of a node: whenever the map says so it compares what it has with what it should have.

Joining, returning, a share that grew because another node left or died, repair: all one comparison
(`pulling`), which ends when a whole round finds nothing lacking; then the map is told under which version
that was (`transitions.settled`). What others own by now is let go of, once they have it.

Law: one a node, in its steward. Restartable at any point. Nothing is dropped that its owners do not hold.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from meshd.cluster.comparing import lacking
from meshd.cluster.offers import InventoryWanted
from meshd.cluster.planning import errand, unowned
from meshd.cluster.pulling import HolderLostError, Own, Pull, Tally
from meshd.control.interface import ControlError
from meshd.store.errors import StoreError
from meshd.telemetry import metrics
from meshwire.cluster import parse_map, transitions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from meshd.cluster.comparing import Scope
    from meshd.cluster.mesh import Mesh
    from meshd.cluster.offers import Offers
    from meshd.cluster.planning import Errand
    from meshd.cluster.pulling import Holder
    from meshd.control.clustermaps import ClusterMaps
    from meshd.control.interface import ControlStore
    from meshd.kit.clock import Clock
    from meshd.store.inventory import Held
    from meshd.store.store import Store
    from meshwire.cluster import ClusterMap, Node

_log = logging.getLogger("meshd.moving")
TOPIC: Final = "moves"
_TELL: Final = 1.0  # seconds between two words about progress
_STANDING: Final = 60.0
_PATIENCE: Final = 5.0
_ROUNDS: Final = 20
_PAGE: Final = 500
_SKEW: Final = 600 * 10**9
"""Ns. What was written this shortly before a comparison, nobody drops for being unknown to others."""
Doing = Literal["idle", "comparing", "repairing", "dropping", "waiting"]


class Progress(msgspec.Struct, frozen=True):
    """What a node's mover is doing: the document `moves/NODE` of the control store. `slots`: of the present
    errand; `blocked`: of those, nobody can be asked. Times in ms."""

    doing: Doing = "idle"
    version: int = 0
    slots: int = 0
    blocked: int = 0
    names: int = 0
    lacked: int = 0
    entered: int = 0
    bytes: int = 0
    failed: int = 0
    dropped: int = 0
    kept: int = 0
    why: str = ""
    began: int = 0
    updated: int = 0


@dataclass(frozen=True, slots=True)
class Sources:
    """What a mover asks: `holder` of a node, `copies` of every bucket there is, `rest` between two pieces."""

    holder: Callable[[Node], Holder]
    copies: Callable[[], Iterable[int]]
    rest: Callable[[int], Awaitable[None]]


class Mover:
    """See the module."""

    def __init__(
        self,
        store: Store,
        offers: Offers,
        mesh: Mesh,
        maps: ClusterMaps,
        control: ControlStore,
        sources: Sources,
        clock: Clock,
        *,
        repair_every: float = 6 * 3600.0,
    ) -> None:
        self._store, self._offers, self._mesh, self._maps = store, offers, mesh, maps
        self._control, self._sources, self._clock = control, sources, clock
        self._repair_every = repair_every
        self._repaired = clock.monotonic()
        self._stood = -_STANDING
        self._told = -_TELL
        self._progress = Progress()
        self._tally = Tally()
        self._let_go_at = 0

    def __repr__(self) -> str:
        return f"<Mover of {self._mesh.node_id}: {self._progress.doing}>"

    async def run(self) -> None:
        """For ever."""
        while True:
            version = self._mesh.map().version
            try:
                await self.turn()
            except HolderLostError as error:
                await self._wait(f"a holder does not answer: {error}")
            except (ControlError, transitions.TransitionError) as error:
                await self._wait(str(error))
            except StoreError as error:
                _log.exception("what is missing here cannot be stored")
                await self._wait(str(error))
            patience = 0.5 if self._progress.doing == "waiting" else _PATIENCE
            await self._mesh.newer_than(version, patience)

    async def turn(self) -> None:
        """One look at the map, and what it asks for. Raises HolderLostError, ControlError, StoreError."""
        cluster = self._mesh.map()
        me = cluster.node(self._mesh.node_id)
        if self._mesh.alone or me is None or me.state in ("away", "down"):
            return
        if cluster.owes(me.node_id):
            await self._settle(cluster)
            return
        await self._stand(me)
        if not cluster.moving and self._let_go_at != cluster.version:
            await self._let_go(cluster)
        if me.stores and self._clock.monotonic() - self._repaired > self._repair_every:
            await self.repair()

    # comparing --------------------------------------------------------------------------------------------

    async def _settle(self, cluster: ClusterMap) -> None:
        """Compare until nothing is lacking, and say so."""
        node_id, version = self._mesh.node_id, cluster.version
        await self._begin("comparing", cluster)
        for number in range(_ROUNDS):
            task = errand(cluster, node_id, self._copies(cluster))
            if task.blocked:
                await self._wait(f"of {task.blocked} slots no node that has everything answers", task.blocked)
                return
            await self._show(slots=sum(scope.count() for scope in task.holders.values()))
            before = Tally()
            before.add(self._tally)
            if number == 0:
                await self._compare_at_once(cluster, task.first)
                if task.first == task.holders and self._same(before):
                    break
                continue
            for holder, scope in task.holders.items():
                await self._compare(cluster, holder, scope)
            if self._same(before):
                break
        else:
            await self._wait("something is still lacking after many rounds")
            return

        def settle(present: ClusterMap | None) -> ClusterMap:
            assert present is not None
            return transitions.settled(present, node_id, version)

        await self._maps.change(settle)
        _log.info("has all it should have", extra={"map": version, "bytes": self._tally.bytes})
        await self._end()

    def _same(self, before: Tally) -> bool:
        now = self._tally
        return (now.lacked, now.lost, now.failed) == (before.lacked, before.lost, before.failed)

    async def _compare_at_once(self, cluster: ClusterMap, first: Mapping[str, Scope]) -> None:
        """Every slot with one holder, all holders at the same time: the bulk."""
        try:
            async with asyncio.TaskGroup() as group:
                for holder, scope in first.items():
                    group.create_task(self._compare(cluster, holder, scope))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _compare(self, cluster: ClusterMap, holder: str, scope: Scope) -> None:
        node = cluster.node(holder)
        assert node is not None
        cut = self._clock.now_ms() * 10**6 - _SKEW

        async def drop(names: list[Held]) -> None:
            await self._store.drop([_older(held, cut) for held in names])

        pull = Pull(
            self._store,
            self._offers,
            self._sources.holder(node),
            scope,
            rest=self._rest,
            tally=self._tally,
            standing=self._store.standing(),
            drop=drop,
        )
        await pull.run()

    async def repair(self) -> Tally:
        """One round with all other owners, though the map asks for none; what was lacking is here after."""
        cluster = self._mesh.map()
        task: Errand = errand(cluster, self._mesh.node_id, self._copies(cluster))
        await self._begin("repairing", cluster, slots=sum(scope.count() for scope in task.holders.values()))
        for holder, scope in task.holders.items():
            await self._compare(cluster, holder, scope)
        self._repaired = self._clock.monotonic()
        metrics.moves_repaired.inc(self._tally.entered)
        if self._tally.entered:
            _log.warning("repaired", extra={"entered": self._tally.entered, "bytes": self._tally.bytes})
        await self._end()
        return self._tally

    def _copies(self, cluster: ClusterMap) -> set[int]:
        return {cluster.copies, *(number or cluster.copies for number in self._sources.copies())}

    # letting go -------------------------------------------------------------------------------------------

    async def _let_go(self, cluster: ClusterMap) -> None:
        """Drop what others own, and have. What they lack of it stays."""
        shares = unowned(cluster, self._mesh.node_id, self._copies(cluster))
        kept = dropped = 0
        for holder, scope in shares.items():
            own = Own(self._offers, scope)
            if not await own.any():
                continue
            if self._progress.doing != "dropping":
                await self._begin("dropping", cluster, slots=sum(each.count() for each in shares.values()))
            node = cluster.node(holder)
            assert node is not None
            more = await self._let_go_to(self._sources.holder(node), scope, own)
            kept, dropped = kept + more[0], dropped + more[1]
            await self._show(kept=kept, dropped=dropped)
        if kept:
            _log.warning("not all that others own is theirs yet", extra={"kept": kept})
        else:
            self._let_go_at = cluster.version
        if self._progress.doing == "dropping":
            await self._end()

    async def _let_go_to(self, holder: Holder, scope: Scope, own: Own) -> tuple[int, int]:
        """How many names stay, and how many went."""
        kept = dropped = 0
        after = b""
        while True:
            page = await holder.inventory(InventoryWanted(scope, after, _PAGE))
            theirs = {held.name: held for held in page.names}
            gone = []
            for name, held in (await own.up_to(page.after)).items():
                if lacking(theirs.get(name), held).items:
                    kept += 1
                elif held.versions or held.uploads:
                    gone.append(held)
            for start in range(0, len(gone), _PAGE):
                await self._store.drop(gone[start : start + _PAGE])
                await self._rest(0)
            dropped += len(gone)
            after = page.after
            if not after:
                return kept, dropped

    # standing ---------------------------------------------------------------------------------------------

    async def _stand(self, me: Node) -> None:
        """While the map says, without doubt, that this node has everything, remember until when it did."""
        now = self._clock.monotonic()
        if me.state not in ("up", "draining") or now - self._stood < _STANDING:
            return
        stamp = self._clock.now_ms() * 10**6
        entry = await self._control.get("cluster/map")
        known = None if entry is None else parse_map(entry.value).node(me.node_id)
        if known is not None and (known.state, known.turned) == (me.state, me.turned):
            await self._store.stand(stamp)
            self._stood = now

    # progress ---------------------------------------------------------------------------------------------

    async def _rest(self, size: int) -> None:
        await self._sources.rest(size)
        if self._clock.monotonic() - self._told > _TELL:
            await self._show()

    async def _begin(self, doing: Doing, cluster: ClusterMap, *, slots: int = 0) -> None:
        if self._progress.doing != doing or self._progress.version != cluster.version:
            self._tally = Tally()
            self._progress = Progress(doing, cluster.version, slots, began=self._clock.now_ms())
        self._progress = msgspec.structs.replace(self._progress, why="", blocked=0)
        await self._show()

    async def _show(self, *, slots: int | None = None, kept: int = 0, dropped: int = 0) -> None:
        tally = self._tally
        self._progress = msgspec.structs.replace(
            self._progress,
            slots=self._progress.slots if slots is None else slots,
            names=tally.names,
            lacked=tally.lacked,
            entered=tally.entered,
            bytes=tally.bytes,
            failed=tally.failed,
            dropped=dropped or tally.dropped,
            kept=kept,
        )
        await self._tell()

    async def _end(self) -> None:
        self._progress = msgspec.structs.replace(self._progress, doing="idle", why="", blocked=0)
        await self._tell()

    async def _wait(self, why: str, blocked: int = 0) -> None:
        if (self._progress.doing, self._progress.why) != ("waiting", why):
            _log.warning("movement waits", extra={"why": why})
        self._progress = msgspec.structs.replace(self._progress, doing="waiting", why=why, blocked=blocked)
        await self._tell()

    async def _tell(self) -> None:
        self._told = self._clock.monotonic()
        self._progress = msgspec.structs.replace(self._progress, updated=self._clock.now_ms())
        metrics.moves_lacking.set(max(0, self._tally.lacked - self._tally.entered))
        try:
            key = f"{TOPIC}/{self._mesh.node_id}"
            await self._control.put(key, msgspec.json.encode(self._progress))
        except ControlError as error:
            _log.debug("progress is not told: %s", error)


def _older(held: Held, cut: int) -> Held:
    """Without what is new: it may not have come to everybody yet."""
    versions = tuple(each for each in held.versions if each.stamp < cut)
    uploads = tuple(each for each in held.uploads if int(each.upload_id[:16], 16) < cut)
    return msgspec.structs.replace(held, versions=versions, uploads=uploads)
