"""Writes that were received here, and that another node decides about by now.

Law: only while nothing of it was committed here. The node that decides judges and commits it as its own, and
what it says is the answer; what it may have carried out is never asked for again. Invariant: who is asked
asks nobody: it decides itself, or says by which map another one does (421).
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, Literal, TypeVar
from urllib.parse import urlencode

import msgspec

from meshd.cluster.callers import require_caller
from meshd.net.peers import PeerRefusedError, PeerUnreachableError, StaleMapError
from meshd.net.pieces import PieceError
from meshd.store.errors import (
    ConditionFailedError,
    ConditionMissingError,
    DiskFullError,
    InvalidPartError,
    NoSuchUploadError,
    NoSuchVersionError,
    NotDeciderError,
    NotReplicatedError,
)
from meshd.store.records import Meta, Record, Removed, Upload  # noqa: TC001  msgspec reads annotations
from meshd.telemetry import metrics
from meshwire.conditions import Conditions  # noqa: TC001  msgspec reads annotations
from meshwire.s3.settings import Acl, Versioning  # noqa: TC001  msgspec reads annotations

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator

    from meshd.cluster.mesh import Mesh
    from meshd.kit.clock import Clock
    from meshd.net.peers import Peers
    from meshd.store.errors import StoreError
    from meshwire.cluster import Node

_T = TypeVar("_T")
DECIDE: Final = "/-/peer/replica/decide"
WRITE: Final = "/-/peer/replica/write"
_PATIENCE: Final = 15.0  # seconds until a write is given up that nobody decides about
_SILENCE: Final = 30.0  # who decides may wait for its own replicas before it answers
_PAUSE: Final = 0.05
_asked: Final[ContextVar[bool]] = ContextVar("asked", default=False)


class Written(msgspec.Struct, frozen=True):
    """What is said of bytes that are to become an object, or a part."""

    meta: Meta
    conditions: Conditions | None = None
    versioning: Versioning = ""


class Deletion(msgspec.Struct, frozen=True, tag="delete"):
    """See `ObjectStore.delete`, and with a version `delete_version`."""

    bucket: str
    key: str
    version: str | None = None
    conditions: Conditions | None = None
    versioning: Versioning = ""


class Amendment(msgspec.Struct, frozen=True, tag="amend"):
    """See `ObjectStore.amend`."""

    bucket: str
    key: str
    version: str | None
    tags: dict[str, str] | None = None
    acl: Acl | None = None


class Beginning(msgspec.Struct, frozen=True, tag="begin"):
    """See `ObjectStore.create_upload`; `about` has what is said of the upload."""

    about: Upload

    @property
    def bucket(self) -> str:
        return self.about.bucket

    @property
    def key(self) -> str:
        return self.about.key


class Completion(msgspec.Struct, frozen=True, tag="complete"):
    """See `ObjectStore.complete_upload`."""

    bucket: str
    key: str
    upload_id: str
    parts: tuple[int, ...]
    meta: Meta
    conditions: Conditions | None
    etags: tuple[str, ...]
    versioning: Versioning


class Abortion(msgspec.Struct, frozen=True, tag="abort"):
    """See `ObjectStore.abort_upload`."""

    bucket: str
    key: str
    upload_id: str


Asked = Deletion | Amendment | Beginning | Completion | Abortion
Trouble = Literal["", "failed", "missing", "upload", "version", "part"]


class Decided(msgspec.Struct, frozen=True):
    """What became of it: the part of it that the call gives; or what was wrong, `number` with a part,
    `condition` with what a condition says of the object."""

    record: Record | None = None
    marker: Record | None = None
    stamp: int = 0
    upload: Upload | None = None
    trouble: Trouble = ""
    number: int = 0
    condition: str = ""

    def the_record(self) -> Record:
        """The version that was made or changed."""
        assert self.record is not None
        return self.record

    def the_upload(self) -> Upload:
        """The upload that was begun."""
        assert self.upload is not None
        return self.upload

    def removed(self) -> Removed:
        """What a deletion did."""
        return Removed(self.record, self.marker, self.stamp)

    def the_stamp(self) -> int:
        """When it ended."""
        return self.stamp


encode: Final = msgspec.msgpack.Encoder().encode
_decided: Final = msgspec.msgpack.Decoder(Decided).decode
_CHANGED: Final = "the object changed meanwhile, or exists already; read it again"
_TROUBLES: Final[dict[Trouble, tuple[type[StoreError], str]]] = {
    "missing": (ConditionMissingError, "If-Match was given, but there is no object with this key"),
    "upload": (NoSuchUploadError, "the upload was completed or aborted"),
    "version": (NoSuchVersionError, "the version is not there"),
}


def trouble_of(error: StoreError) -> Decided | None:
    """A refusal that is the answer; None for another error."""
    if isinstance(error, InvalidPartError):
        return Decided(trouble="part", number=error.number)
    if isinstance(error, ConditionFailedError):
        return Decided(trouble="failed", condition=error.condition)
    found = [trouble for trouble, (kind, _) in _TROUBLES.items() if isinstance(error, kind)]
    return Decided(trouble=found[0]) if found else None


@contextmanager
def asked_by_another() -> Iterator[None]:
    """What is not decided here within it is refused: NotDeciderError."""
    token = _asked.set(True)
    try:
        yield
    finally:
        _asked.reset(token)


class Ceding:
    """One a process."""

    def __init__(self, mesh: Mesh, peers: Peers, clock: Clock) -> None:
        self._mesh, self._peers, self._clock = mesh, peers, clock

    def __repr__(self) -> str:
        return f"<Ceding of {self._mesh.node_id}>"

    async def anywhere(
        self,
        bucket: str,
        key: str,
        here: Callable[[], Awaitable[_T]],
        there: Callable[[Node], Awaitable[Decided | None]],
        read: Callable[[Decided], _T],
    ) -> _T:
        """What `here` gives while this node decides, else what is read of what came from `there`. `here`
        raises NotDeciderError while nothing was changed. Raises StoreError."""
        deadline = self._clock.monotonic() + _PATIENCE
        while True:
            try:
                return await here()
            except NotDeciderError:
                if self._clock.monotonic() > deadline or _asked.get():
                    raise
            node = self._mesh.route(bucket, key).decider
            if node is not None and node.node_id != self._mesh.node_id:
                decided = await there(node)
                metrics.replication_ceded.labels("again" if decided is None else "decided").inc()
                if decided is not None:
                    _refuse(decided)
                    return read(decided)

    async def ask(self, node: Node, asked: Asked) -> Decided | None:
        """As `_ask`, what needs no bytes."""
        return await self._ask(node, DECIDE, encode(asked))

    async def write(
        self,
        node: Node,
        name: tuple[str, str],
        size: int,
        pieces: AsyncGenerator[bytes, None],
        written: Written,
        part: tuple[str, int] | None = None,
    ) -> Decided | None:
        """As `_ask`: `size` bytes become the object of that bucket and key, or the part of an upload's id and
        number."""
        about = {"bucket": name[0], "key": name[1], "size": size}
        if part is not None:
            about |= {"upload": part[0], "number": part[1]}
        return await self._ask(node, f"{WRITE}?{urlencode(about)}", _followed(pieces, encode(written)))

    async def _ask(
        self, node: Node, target: str, body: bytes | AsyncGenerator[bytes, None]
    ) -> Decided | None:
        """What a node decided; None when it did not, and nothing was changed. Raises NotReplicatedError when
        nobody knows, and when nobody may wait for it."""
        version = self._mesh.map().version
        try:
            require_caller(self._mesh)  # by the map that the call says: nothing is waited for in between
            async with self._peers.call(node, "POST", target, body=body, timeout=_SILENCE) as answer:
                return _decided(await answer.read())
        except StaleMapError as error:
            await self._mesh.newer_than(version, 1.0 if error.version > version else _PAUSE)
        except PeerUnreachableError as error:
            await self._mesh.suspect(node.node_id, version)
            if error.begun:
                raise _unknown(node) from error
            await self._mesh.newer_than(version, _PAUSE)
        except PieceError as error:
            raise _unknown(node) from error
        except PeerRefusedError as error:
            if error.code == "InsufficientStorage":
                raise DiskFullError(
                    f"node {node.node_id} has no room for it; delete objects or add a disk"
                ) from error
            raise NotReplicatedError(
                f"node {node.node_id} decides about this name now, and could not: {error}; it may or may not "
                "have taken place; try again"
            ) from error
        finally:
            if not isinstance(body, bytes):
                await body.aclose()
        return None


def _refuse(decided: Decided) -> None:
    if decided.trouble == "part":
        raise InvalidPartError(decided.number)
    if decided.trouble == "failed":
        raise ConditionFailedError(_CHANGED, decided.condition)
    if decided.trouble:
        kind, text = _TROUBLES[decided.trouble]
        raise kind(text)


def _unknown(node: Node) -> NotReplicatedError:
    return NotReplicatedError(
        f"node {node.node_id} decides about this name now, and went away before it answered; it may or may "
        "not have taken place; try again"
    )


async def _followed(pieces: AsyncGenerator[bytes, None], ending: bytes) -> AsyncGenerator[bytes, None]:
    try:
        async for piece in pieces:
            yield piece
    finally:
        await pieces.aclose()
    yield ending
