"""Carrying: a comparison with one holder, made in a process of its own on behalf of the node's mover.

Law: the asker says which map it goes by, and gets the tally as it grows; when either side goes away the
comparison is broken off, as it may be at any time. Seam: `Carrying`.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final, Literal, Protocol

import msgspec

from meshd.cluster.comparing import Scope  # noqa: TC001  msgspec reads annotations
from meshd.cluster.pulling import HolderLostError, Pull, Tally
from meshd.cluster.releasing import SKEW, older
from meshd.errors import MeshdError
from meshd.net.unixmessages import StreamClosedError, connect
from meshd.store.errors import DiskFailedError, DiskFullError, StoreError
from meshwire.cluster import parse_map

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from meshd.cluster.mesh import Mesh
    from meshd.cluster.offers import Offers
    from meshd.cluster.pulling import Holder
    from meshd.kit.clock import Clock
    from meshd.net.unixmessages import MessageStream
    from meshd.store.inventory import Held
    from meshd.store.store import Store
    from meshwire.cluster import ClusterMap, Node

_log = logging.getLogger("meshd.moving")
_TELL: Final = 0.1  # seconds between two words about the tally
_PATIENCE: Final = 10.0  # seconds for the asker's map to arrive here too
Outcome = Literal["", "done", "holder", "full", "disk", "store", "other"]


class CarryingError(MeshdError):
    """The process that fetches went away, or failed: to be tried again."""


class Carrying(Protocol):
    """What compares: in this process (`Carrier`), or in another (`FarCarrier`)."""

    async def compare(self, cluster: ClusterMap, holder: str, scope: Scope, tally: Tally) -> None:
        """Under this map, with this node; what was done is counted in `tally`. Raises HolderLostError,
        StoreError, MeshdError."""


class Carrier:
    """Compares in this process. `holder` of a node; `rest` is awaited after each piece of work."""

    def __init__(
        self,
        store: Store,
        offers: Offers,
        mesh: Mesh,
        holder: Callable[[Node], Holder],
        rest: Callable[[int], Awaitable[None]],
        clock: Clock,
    ) -> None:
        self._store, self._offers, self._mesh = store, offers, mesh
        self._holder, self._rest, self._clock = holder, rest, clock

    def __repr__(self) -> str:
        return f"<Carrier of {self._mesh.node_id}>"

    async def compare(self, cluster: ClusterMap, holder: str, scope: Scope, tally: Tally) -> None:
        cut = self._clock.now_ms() * 10**6 - SKEW

        async def drop(names: list[Held]) -> None:
            if self._mesh.map().counts != cluster.counts:
                return  # the sides may not mean the same names
            await self._store.drop([older(held, cut) for held in names])

        node = cluster.node(holder)
        assert node is not None
        pull = Pull(
            self._store,
            self._offers,
            self._holder(node),
            scope,
            rest=self._rest,
            tally=tally,
            standing=self._store.standing(),
            drop=drop,
        )
        await pull.run()

    async def serve(self, wanted: Carry, stream: MessageStream) -> None:
        """Carry out what came on `stream`, and say there how far it is, until the asker goes away."""
        tally = Tally()
        work = asyncio.ensure_future(self._heed(wanted, tally))
        gone = asyncio.ensure_future(stream.receive())
        try:
            while not work.done():
                await asyncio.wait((work, gone), timeout=_TELL, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    return
                if not work.done():
                    await stream.send(Told(tally))
            await stream.send(Told(tally, *work.result()))
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _heed(self, wanted: Carry, tally: Tally) -> tuple[Outcome, str]:
        cluster = parse_map(wanted.cluster)
        try:
            if self._mesh.map().version < cluster.version:
                await self._mesh.newer_than(cluster.version - 1, _PATIENCE)
            await self.compare(cluster, wanted.holder, wanted.scope, tally)
        except HolderLostError as error:
            return "holder", str(error)
        except DiskFullError as error:
            return "full", str(error)
        except DiskFailedError as error:
            return "disk", str(error)
        except StoreError as error:
            return "store", str(error)
        except MeshdError as error:
            return "other", str(error)
        except Exception as error:
            _log.exception("movement failed; it is tried again")
            return "other", f"movement failed: {type(error).__name__}"
        return "done", ""


class Carry(msgspec.Struct, frozen=True, tag="carry"):
    """Compare with this holder, under this map (as its JSON)."""

    cluster: str
    holder: str
    scope: Scope


class Told(msgspec.Struct, frozen=True):
    """All that was done so far; `outcome` "" while it goes on."""

    tally: Tally
    outcome: Outcome = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class MoverDoor:
    """The way to the process that carries, which is started when somebody comes."""

    path: Path

    async def enter(self) -> MessageStream:
        """A connection; it is served once that process runs. Raises OSError."""
        return await connect(self.path)


class FarCarrier:
    """Compares in the process behind `door`. `told` is awaited when it says how far it is."""

    def __init__(self, door: MoverDoor, told: Callable[[], Awaitable[None]]) -> None:
        self._door, self._told = door, told

    def __repr__(self) -> str:
        return f"<FarCarrier {self._door.path}>"

    async def compare(self, cluster: ClusterMap, holder: str, scope: Scope, tally: Tally) -> None:
        known = Tally()
        try:
            stream = await self._door.enter()
        except OSError as error:
            raise CarryingError(f"the process that fetches cannot be reached: {error}") from error
        try:
            await stream.send(Carry(cluster.to_json().decode(), holder, scope))
            told = Told(known)
            while not told.outcome:
                body, _ = await stream.receive()
                told = msgspec.convert(body, Told)
                _add(tally, known, told.tally)
                known = told.tally
                await self._told()
        except StreamClosedError as error:
            raise CarryingError("the process that fetches ended; it is started again") from error
        finally:
            stream.close()
        if told.outcome != "done":
            raise _ERRORS[told.outcome](told.why)


_ERRORS: Final[dict[Outcome, type[Exception]]] = {
    "holder": HolderLostError,
    "full": DiskFullError,
    "disk": DiskFailedError,
    "store": StoreError,
    "other": CarryingError,
}


def _add(tally: Tally, before: Tally, now: Tally) -> None:
    """What was done between two looks."""
    for field in fields(Tally):
        more = getattr(now, field.name) - getattr(before, field.name)
        setattr(tally, field.name, getattr(tally, field.name) + more)
