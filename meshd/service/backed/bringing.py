"""What is to be brought to an origin, or removed there: by the node that decides about the name.

Law: here while this node decides, else the one that does is asked. Both may be asked for again: what the
origin has is not dirty any more, and what was removed is gone. Invariant: who is asked asks nobody.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from meshd.cluster.callers import require_caller
from meshd.kit.tasks import Tasks
from meshd.net.peers import PeerRefusedError, PeerUnreachableError, StaleMapError
from meshd.net.pieces import PieceError
from meshd.origin.errors import OriginDownError, OriginError, OriginMissingError
from meshd.service.backed.messages import Failed, failure, raised  # noqa: TC001  msgspec reads annotations
from meshd.store.errors import NotDeciderError, NotReplicatedError, StoreError
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from meshd.cluster.mesh import Mesh
    from meshd.control.buckets import Bucket
    from meshd.kit.clock import Clock
    from meshd.net.peers import Peers
    from meshd.service.backed.sharing import Crew
    from meshd.service.backed.succeeding import QuietAsk
    from meshd.service.caching.shelf import Shelf

BRING: Final = "/-/peer/origins/bring"
MAX_ASK_BYTES: Final = 16 << 10
_PATIENCE: Final = 15.0  # seconds until it is given up because nobody decides
_SILENCE: Final = 30.0
_TURN: Final = 10.0  # seconds after which who is asked says that it is still at it
_NEWS: Final = 1.0  # seconds to wait for a map that another node has already
_PAUSE: Final = 0.05
_UNKNOWN: Final = "it may or may not have come to its origin; try again"
What = Literal["push", "remove"]


class BringAsk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """push: what is dirty under a key goes to its origin. remove: the object goes from there."""

    what: What
    bucket: str
    key: str


class Brought(msgspec.Struct, frozen=True):
    """What came of it: done, or what was wrong, or still going on."""

    failed: Failed | None = None
    going: bool = False


encode: Final = msgspec.msgpack.Encoder().encode
_ask: Final = msgspec.msgpack.Decoder(BringAsk).decode
_brought: Final = msgspec.msgpack.Decoder(Brought).decode


def decode_ask(body: bytes) -> BringAsk:
    """Raises msgspec.MsgspecError."""
    return _ask(body)


class Bringer:
    """One a process."""

    def __init__(self, crew: Crew, shelf: Shelf, mesh: Mesh, peers: Peers, clock: Clock) -> None:
        self._crew, self._shelf, self._mesh, self._peers, self._clock = crew, shelf, mesh, peers, clock
        self._tasks = Tasks("bringing")

    def __repr__(self) -> str:
        return f"<Bringer of {self._mesh.node_id}>"

    async def push(self, bucket: Bucket, key: str) -> None:
        """Bring what is dirty under a key to its origin; done when nothing is. Raises OriginError,
        StoreError."""
        await self._anywhere(bucket, BringAsk("push", bucket.name, key))

    async def remove(self, bucket: Bucket, key: str) -> None:
        """Delete an object at its origin, and what is dirty of it. Raises OriginError, StoreError."""
        await self._anywhere(bucket, BringAsk("remove", bucket.name, key))

    async def carried_out(self, asked: BringAsk) -> Brought:
        """For another node: what this one did, or that it is at it: then it goes on, and is to be asked for
        again. Raises NotDeciderError: it does not decide about the name."""
        bucket = self._shelf.backed(asked.bucket)
        if bucket is None:
            return _failed(OriginMissingError(f"there is no bucket {asked.bucket[:80]} with an origin"))
        doing = self._tasks.spawn(self._told(bucket, asked), asked.what)
        done, _ = await asyncio.wait((doing,), timeout=_TURN)
        brought: Brought | None = doing.result() if done else Brought(going=True)
        if brought is None:
            raise NotDeciderError("another node decides about this name now; nothing was changed")
        return brought

    async def quiet(self, asked: QuietAsk, version: int) -> bool:
        """See `OriginWriter.quiet`, of whichever process it is."""
        bucket = self._shelf.backed(asked.bucket)
        if bucket is None:
            return True
        try:
            return await self._crew.of(asked.bucket, asked.key).quiet(bucket, asked.key, version)
        except OriginDownError:  # that process is being replaced
            return False

    async def aclose(self) -> None:
        await self._tasks.aclose()

    async def _anywhere(self, bucket: Bucket, asked: BringAsk) -> None:
        deadline = self._clock.monotonic() + _PATIENCE
        while self._clock.monotonic() < deadline:
            version = self._mesh.map().version
            if asked.what == "remove":  # what is pushed was committed for its caller
                require_caller(self._mesh)
            if self._mesh.is_decider(asked.bucket, asked.key):
                began = self._clock.monotonic()
                brought = await self._here(bucket, asked)
                deadline += self._clock.monotonic() - began  # an upload may have taken minutes
            else:
                brought = await self._there(version, asked)
            if brought is None:
                await self._mesh.newer_than(version, _PAUSE)
            elif brought.going:
                deadline = self._clock.monotonic() + _PATIENCE
            elif brought.failed is not None:
                raise raised(brought.failed)
            else:
                return
        raise NotReplicatedError(f"no node that decides about this name answers; {_UNKNOWN}")

    async def _here(self, bucket: Bucket, asked: BringAsk) -> Brought | None:
        """None where another node decides by now. Raises OriginError, StoreError."""
        doer = self._crew.of(asked.bucket, asked.key)
        try:
            await (doer.push if asked.what == "push" else doer.remove)(bucket, asked.key)
        except NotDeciderError:
            return None
        return Brought()

    async def _told(self, bucket: Bucket, asked: BringAsk) -> Brought | None:
        """As `_here`, errors in words."""
        try:
            return await self._here(bucket, asked)
        except (OriginError, StoreError) as error:
            return _failed(error)

    async def _there(self, version: int, asked: BringAsk) -> Brought | None:
        """What the node that decides says; None where it does not, or nobody knows. Raises
        NotReplicatedError."""
        node = self._mesh.route(asked.bucket, asked.key).decider
        if node is None:
            raise NotReplicatedError(f"every node that has this name's data is away; {_UNKNOWN}")
        try:
            async with self._peers.call(node, "POST", BRING, body=encode(asked), timeout=_SILENCE) as answer:
                brought = _brought(await answer.read())
        except StaleMapError as error:
            if error.version > version:
                await self._mesh.newer_than(version, _NEWS)
        except PeerUnreachableError:
            await self._mesh.suspect(node.node_id, version)
        except PieceError:
            pass  # cut short: it is asked again
        except PeerRefusedError as error:
            raise NotReplicatedError(
                f"node {node.node_id} decides about this name now, and could not: {error}; {_UNKNOWN}"
            ) from error
        else:
            if not brought.going:
                metrics.origin_passed.labels(asked.what).inc()
            return brought
        return None


def _failed(error: Exception) -> Brought:
    return Brought(failure(0, error))
