"""Write forwarding: the one way to hand a write to its owner, and the rejection of abandoned writes.

A caller supplies the message and the body; `WriteForwarder` knows the owner, sends, retries and maps errors.

Law: a write is forwarded only while nothing of it is committed here. The primary checks and commits it
as its own, and its result is the answer; a write that may have been applied is never forwarded again,
unless its caller says that it is `repeatable`.
Invariant: a node never forwards a forwarded write: it commits as primary or answers 421 with its map
version. A node that was marked away never applies a write it accepted (or that was forwarded to it)
under an earlier map version: the client was told the outcome is unknown and may have written more since.
A write that no client waits for (`WriteContext.accepted_by` is empty) is never rejected.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, Literal, TypeVar, cast

import msgspec

from meshd.errors import MeshdError
from meshd.rpc.peer_client import PeerRefusedError, PeerUnreachableError, StaleMapError
from meshd.rpc.peer_rpc import IN_QUERY, PREFIX, BodyFramingError, PeerCall, body_with_message, encode_message
from meshd.store.errors import (
    ConditionFailedError,
    ConditionMissingError,
    DiskFullError,
    InvalidPartError,
    NoSuchUploadError,
    NoSuchVersionError,
    NotPrimaryError,
    NotReplicatedError,
)
from meshd.store.records import Meta, Record, Removed, Upload  # noqa: TC001  msgspec reads annotations
from meshd.telemetry import metrics
from meshwire.http_values.conditional_requests import Conditions  # noqa: TC001  msgspec reads annotations
from meshwire.s3.bucket_settings import Acl, Versioning  # noqa: TC001  msgspec reads annotations

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator

    from meshd.cluster.cluster_view import ClusterView
    from meshd.rpc.peer_client import PeerClient
    from meshd.store.errors import StoreError
    from meshd.store.write_context import WriteContext
    from meshd.util.clock import Clock
    from meshwire.cluster import Node


_T = TypeVar("_T")
Request = TypeVar("Request")
Response = TypeVar("Response")
_FORWARD_TIMEOUT: Final = 15.0  # seconds after which a write without a primary is given up
_ANSWER_TIMEOUT: Final = 30.0  # the primary may wait for its own replicas before it answers
_PAUSE: Final = 0.05


class WriteSpec(msgspec.Struct, frozen=True):
    """The metadata of bytes that become an object or a part."""

    meta: Meta
    conditions: Conditions | None = None
    versioning: Versioning = ""


class DeleteRequest(msgspec.Struct, frozen=True, tag="delete"):
    """A forwarded `ObjectStore.delete` or, with a version, `delete_version`."""

    bucket: str
    key: str
    version: str | None = None
    conditions: Conditions | None = None
    versioning: Versioning = ""


class AmendRequest(msgspec.Struct, frozen=True, tag="amend"):
    """A forwarded `ObjectStore.amend`."""

    bucket: str
    key: str
    version: str | None
    tags: dict[str, str] | None = None
    acl: Acl | None = None


class CreateUploadRequest(msgspec.Struct, frozen=True, tag="begin"):
    """A forwarded `ObjectStore.create_upload`; `about` has the upload's metadata."""

    about: Upload

    @property
    def bucket(self) -> str:
        return self.about.bucket

    @property
    def key(self) -> str:
        return self.about.key


class CompleteUploadRequest(msgspec.Struct, frozen=True, tag="complete"):
    """A forwarded `ObjectStore.complete_upload`."""

    bucket: str
    key: str
    upload_id: str
    parts: tuple[int, ...]
    meta: Meta
    conditions: Conditions | None
    etags: tuple[str, ...]
    versioning: Versioning


class AbortUploadRequest(msgspec.Struct, frozen=True, tag="abort"):
    """A forwarded `ObjectStore.abort_upload`."""

    bucket: str
    key: str
    upload_id: str


ForwardedRequest = (
    DeleteRequest | AmendRequest | CreateUploadRequest | CompleteUploadRequest | AbortUploadRequest
)
WriteErrorKind = Literal["", "failed", "missing", "upload", "version", "part"]


class WriteResult(msgspec.Struct, frozen=True):
    """The result of a forwarded write: the fields that the operation returns, or the error in `trouble` with
    the part `number` or the failed `condition`."""

    record: Record | None = None
    marker: Record | None = None
    stamp: int = 0
    upload: Upload | None = None
    trouble: WriteErrorKind = ""
    number: int = 0
    condition: str = ""

    def raise_error(self) -> None:
        """Raises the error that answers the request, if there is one."""
        if self.trouble == "part":
            raise InvalidPartError(self.number)
        if self.trouble == "failed":
            raise ConditionFailedError(_CHANGED, self.condition)
        if self.trouble:
            kind, text = _ERRORS[self.trouble]
            raise kind(text)

    def require_record(self) -> Record:
        """Returns the version that was created or changed."""
        assert self.record is not None
        return self.record

    def require_upload(self) -> Upload:
        """Returns the upload that was created."""
        assert self.upload is not None
        return self.upload

    def as_removed(self) -> Removed:
        """Returns the result of a deletion."""
        return Removed(self.record, self.marker, self.stamp)

    def end_stamp(self) -> int:
        """Returns the stamp of an upload's end."""
        return self.stamp


class ForwardedData(msgspec.Struct, frozen=True, omit_defaults=True):
    """`size` bytes of a body, followed by a `WriteSpec`, that become an object, or a part of an upload."""

    bucket: str
    key: str
    size: int
    upload: str = ""
    number: int = 0


FORWARD_REQUEST: Final = PeerCall(
    f"{PREFIX}replica/decide",
    request=cast("type[ForwardedRequest]", ForwardedRequest),
    response=WriteResult,
    max_bytes=8 << 20,  # a completion of 10,000 parts, and all that is said of it
    timeout=_ANSWER_TIMEOUT,
    map_wait=1.0,
)
FORWARD_WRITE: Final = PeerCall(
    f"{PREFIX}replica/write",
    request=ForwardedData,
    response=WriteResult,
    target=IN_QUERY,
    max_bytes=None,
    timeout=_ANSWER_TIMEOUT,
    map_wait=1.0,
)
_CHANGED: Final = "the object was changed or already exists; read it again"
_ERRORS: Final[dict[WriteErrorKind, tuple[type[StoreError], str]]] = {
    "missing": (ConditionMissingError, "If-Match was given, but no object has this key"),
    "upload": (NoSuchUploadError, "the upload was completed or aborted"),
    "version": (NoSuchVersionError, "the version does not exist"),
}


def result_of_error(error: StoreError) -> WriteResult | None:
    """Returns the result for an error that answers the request; None for any other error."""
    if isinstance(error, InvalidPartError):
        return WriteResult(trouble="part", number=error.number)
    if isinstance(error, ConditionFailedError):
        return WriteResult(trouble="failed", condition=error.condition)
    found = [trouble for trouble, (kind, _) in _ERRORS.items() if isinstance(error, kind)]
    return WriteResult(trouble=found[0]) if found else None


class WriteNotTakenError(MeshdError):
    """The node did not act on a write, or may do so again without harm: read the map, and send it again."""


class WriteForwarder:
    """The one way to hand a write to its owner. Stateless: callers with the same `mesh` and `peers` may share
    one, or have one each."""

    def __init__(self, mesh: ClusterView, peers: PeerClient, clock: Clock) -> None:
        self._mesh, self._peers, self._clock = mesh, peers, clock

    def __repr__(self) -> str:
        return f"<WriteForwarder of {self._mesh.node_id}>"

    def owner(self, bucket: str, key: str) -> Node | None:
        """Returns the node that is primary of a name; None if it is this one. Raises NotReplicatedError if
        there is none."""
        if self._mesh.single_node:
            return None  # whatever state the map shows for this node
        primary = self._mesh.route_for(bucket, key).primary
        if primary is None:
            raise NotReplicatedError(
                "every node with this name's data is away: no node can accept writes of it until the one "
                "that left last is back; try again shortly"
            )
        return None if primary.node_id == self._mesh.node_id else primary

    def reject_if_abandoned(self, context: WriteContext) -> None:
        """Raises NotReplicatedError if the client may have been told meanwhile that the outcome is unknown:
        then the write must not happen any more."""
        if not context.accepted_by:
            return
        for node_id in {self._mesh.node_id, context.accepted_by}:
            if self._mesh.last_absence_version(node_id) > context.map_version:
                metrics.replication_given_up.inc()
                raise NotReplicatedError(
                    f"node {node_id} was marked away since it accepted the request, so the client may have "
                    "given up; nothing was changed; try again"
                )

    async def run_on_primary(
        self,
        bucket: str,
        key: str,
        here: Callable[[], Awaitable[_T]],
        there: Callable[[Node], Awaitable[_T]],
        context: WriteContext,
        *,
        local_time_counts: bool = True,
    ) -> _T:
        """Returns the result of `here` while this node is primary, otherwise that of `there` on the primary.

        `here` raises NotPrimaryError as long as nothing was changed, `there` WriteNotTakenError (see `send`);
        both may be called again. Raises NotReplicatedError if nobody acts as primary in time, NotPrimaryError
        for a write that was forwarded already, and what the two raise. Without `local_time_counts` the
        seconds that `here` takes do not count.
        """
        deadline = self._clock.monotonic() + _FORWARD_TIMEOUT
        while True:
            version, began = self._mesh.current_map().version, self._clock.monotonic()
            try:
                return await here()
            except NotPrimaryError as error:
                now = self._clock.monotonic()
                deadline += 0.0 if local_time_counts else now - began
                if context.forwarded:
                    raise
                if now > deadline:
                    raise NotReplicatedError(
                        f"no node acted as primary within {_FORWARD_TIMEOUT:g} s: {error}"
                    ) from error
            node = self.owner(bucket, key)
            if node is None:
                await self._mesh.wait_for_newer_map(version, _PAUSE)
                continue
            with suppress(WriteNotTakenError):
                return await there(node)

    async def send(
        self,
        node: Node,
        call: PeerCall[Request, Response],
        request: Request,
        context: WriteContext,
        body: AsyncGenerator[bytes, None] | None = None,
        *,
        repeatable: bool = False,
        refused: Callable[[Node, PeerRefusedError], Exception] | None = None,
    ) -> Response:
        """Sends a write to its owner and returns the response. Raises as `attempt`, and for a refusal what
        `refused` returns: NotReplicatedError or DiskFullError by default."""
        try:
            return await self.attempt(
                node,
                lambda: self._peers.call_typed(node, call, request, body=body),
                context,
                repeatable=repeatable,
            )
        except PeerRefusedError as error:
            raise (refused or _write_failed)(node, error) from error
        finally:
            if body is not None:
                await body.aclose()

    async def attempt(
        self,
        node: Node,
        send: Callable[[], Awaitable[_T]],
        context: WriteContext,
        *,
        repeatable: bool = False,
    ) -> _T:
        """Returns the result of `send`, which sends a write to node `node`.

        Raises WriteNotTakenError after a pause if the node did not act, or may not have acted on a
        `repeatable` write; NotReplicatedError if the outcome is unknown, or if the write was abandoned; and
        PeerRefusedError.
        """
        version = self._mesh.current_map().version
        try:
            self.reject_if_abandoned(context)  # under the map version that is sent: no await in between
            return await send()
        except StaleMapError as error:
            await self._mesh.wait_for_newer_map(version, 1.0 if error.version > version else _PAUSE)
            raise WriteNotTakenError(f"node {node.node_id} is not the primary of this name") from error
        except PeerUnreachableError as error:
            await self._mesh.report_suspect(node.node_id, version)
            if error.begun and not repeatable:
                raise _outcome_unknown(node) from error
            await self._mesh.wait_for_newer_map(version, _PAUSE)
            raise WriteNotTakenError(str(error)) from error
        except BodyFramingError as error:
            if not repeatable:
                raise _outcome_unknown(node) from error
            await self._mesh.wait_for_newer_map(version, _PAUSE)
            raise WriteNotTakenError(str(error)) from error


class StoreForwarder(WriteForwarder):
    """Forwards writes of the replicated store. One per process."""

    async def forward_request(
        self, node: Node, asked: ForwardedRequest, context: WriteContext
    ) -> WriteResult:
        """Forwards a write without data; see `send`. Raises the error that the primary met."""
        with _counting():
            decided = await self.send(node, FORWARD_REQUEST, asked, context)
        decided.raise_error()
        return decided

    async def forward_write(
        self,
        node: Node,
        name: tuple[str, str],
        size: int,
        pieces: AsyncGenerator[bytes, None],
        written: WriteSpec,
        context: WriteContext,
        part: tuple[str, int] | None = None,
    ) -> Record:
        """Forwards `size` bytes that become the object of this bucket and key, or the part with this upload
        id and number; see `send`. Raises the error that the primary met."""
        asked = ForwardedData(*name, size, *(part or ()))
        body = body_with_message(pieces, encode_message(written))
        with _counting():
            decided = await self.send(node, FORWARD_WRITE, asked, context, body)
        decided.raise_error()
        return decided.require_record()


@contextmanager
def _counting() -> Iterator[None]:
    try:
        yield
    except WriteNotTakenError:
        metrics.replication_writes_forwarded.labels("retry").inc()
        raise
    metrics.replication_writes_forwarded.labels("done").inc()


def _write_failed(node: Node, error: PeerRefusedError) -> StoreError:
    if error.code == "InsufficientStorage":
        return DiskFullError(f"node {node.node_id} has no space for it; delete objects or add a disk")
    return NotReplicatedError(
        f"node {node.node_id} failed as the primary of this name: {error}; the write may or may not "
        "have taken effect; try again"
    )


def _outcome_unknown(node: Node) -> NotReplicatedError:
    return NotReplicatedError(
        f"node {node.node_id} is the primary of this name and did not answer; the write may or may not "
        "have taken effect; try again"
    )
