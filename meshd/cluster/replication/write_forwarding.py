"""Write forwarding: hands a write to the node that is primary now, and rejects writes that were abandoned.

Law: a write is forwarded only while nothing of it is committed here. The primary checks and commits it
as its own, and its result is the answer; a write that may have been applied is never forwarded again.
Invariant: a node never forwards a forwarded write: it commits as primary or answers 421 with its map
version. A node that was marked away never applies a write it accepted (or that was forwarded to it)
under an earlier map version: the client was told the outcome is unknown and may have written more since.
A write that no client waits for (`WriteContext.accepted_by` is empty) is never rejected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeVar, cast

import msgspec

from meshd.rpc.checksummed_framing import BodyFramingError
from meshd.rpc.peer_client import PREFIX, PeerRefusedError, PeerUnreachableError, StaleMapError
from meshd.rpc.peer_rpc import IN_QUERY, PeerCall, encode_message
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
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from meshd.cluster.cluster_view import ClusterView
    from meshd.rpc.peer_client import PeerClient
    from meshd.store.errors import StoreError
    from meshd.store.write_context import WriteContext
    from meshd.util.clock import Clock
    from meshwire.cluster import Node


def reject_if_abandoned(mesh: ClusterView, context: WriteContext) -> None:
    """Raises NotReplicatedError if the client may have been told meanwhile that the outcome is unknown: then
    the write must not happen any more."""
    if not context.accepted_by:
        return
    for node_id in {mesh.node_id, context.accepted_by}:
        if mesh.last_absence_version(node_id) > context.map_version:
            metrics.replication_given_up.inc()
            raise NotReplicatedError(
                f"node {node_id} was marked away since it accepted the request, so the client may have "
                "given up; nothing was changed; try again"
            )


_T = TypeVar("_T")
Request = TypeVar("Request")
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


class WriteForwarder:
    """Forwards writes to the primary. One per process."""

    def __init__(self, mesh: ClusterView, peers: PeerClient, clock: Clock) -> None:
        self._mesh, self._peers, self._clock = mesh, peers, clock

    def __repr__(self) -> str:
        return f"<WriteForwarder of {self._mesh.node_id}>"

    async def run_on_primary(
        self,
        bucket: str,
        key: str,
        here: Callable[[], Awaitable[_T]],
        there: Callable[[Node], Awaitable[WriteResult | None]],
        read: Callable[[WriteResult], _T],
        context: WriteContext,
    ) -> _T:
        """Returns the result of `here` while this node is primary, otherwise the result `read` from the reply
        of `there`. `here` raises NotPrimaryError as long as nothing was changed. Raises StoreError, and
        NotPrimaryError for a write that was forwarded already."""
        deadline = self._clock.monotonic() + _FORWARD_TIMEOUT
        while True:
            try:
                return await here()
            except NotPrimaryError:
                if self._clock.monotonic() > deadline or context.forwarded:
                    raise
            node = self._mesh.route_for(bucket, key).primary
            if node is not None and node.node_id != self._mesh.node_id:
                decided = await there(node)
                metrics.replication_writes_forwarded.labels("retry" if decided is None else "done").inc()
                if decided is not None:
                    _raise_error(decided)
                    return read(decided)

    async def forward_request(
        self, node: Node, asked: ForwardedRequest, context: WriteContext
    ) -> WriteResult | None:
        """Forwards a write without data; see `_forward`."""
        return await self._forward(node, FORWARD_REQUEST, asked, context)

    async def forward_write(
        self,
        node: Node,
        name: tuple[str, str],
        size: int,
        pieces: AsyncGenerator[bytes, None],
        written: WriteSpec,
        context: WriteContext,
        part: tuple[str, int] | None = None,
    ) -> WriteResult | None:
        """Forwards `size` bytes that become the object of this bucket and key, or the part with this upload
        id and number; see `_forward`."""
        asked = ForwardedData(*name, size, *(part or ()))
        body = _with_trailer(pieces, encode_message(written))
        return await self._forward(node, FORWARD_WRITE, asked, context, body)

    async def _forward(
        self,
        node: Node,
        call: PeerCall[Request, WriteResult],
        asked: Request,
        context: WriteContext,
        body: AsyncGenerator[bytes, None] | None = None,
    ) -> WriteResult | None:
        """Sends a write to a node; returns its result, or None if it did not act and nothing was changed.
        Raises NotReplicatedError if the outcome is unknown, or if the write was abandoned."""
        version = self._mesh.current_map().version
        try:
            reject_if_abandoned(
                self._mesh, context
            )  # under the map version that the call sends: no await in between
            return await self._peers.call_typed(node, call, asked, body=body)
        except StaleMapError as error:
            await self._mesh.wait_for_newer_map(version, 1.0 if error.version > version else _PAUSE)
        except PeerUnreachableError as error:
            await self._mesh.report_suspect(node.node_id, version)
            if error.begun:
                raise _outcome_unknown(node) from error
            await self._mesh.wait_for_newer_map(version, _PAUSE)
        except BodyFramingError as error:
            raise _outcome_unknown(node) from error
        except PeerRefusedError as error:
            if error.code == "InsufficientStorage":
                raise DiskFullError(
                    f"node {node.node_id} has no space for it; delete objects or add a disk"
                ) from error
            raise NotReplicatedError(
                f"node {node.node_id} failed as the primary of this name: {error}; the write may or may not "
                "have taken effect; try again"
            ) from error
        finally:
            if body is not None:
                await body.aclose()
        return None


def _raise_error(decided: WriteResult) -> None:
    if decided.trouble == "part":
        raise InvalidPartError(decided.number)
    if decided.trouble == "failed":
        raise ConditionFailedError(_CHANGED, decided.condition)
    if decided.trouble:
        kind, text = _ERRORS[decided.trouble]
        raise kind(text)


def _outcome_unknown(node: Node) -> NotReplicatedError:
    return NotReplicatedError(
        f"node {node.node_id} is the primary of this name and did not answer; the write may or may not "
        "have taken effect; try again"
    )


async def _with_trailer(pieces: AsyncGenerator[bytes, None], ending: bytes) -> AsyncGenerator[bytes, None]:
    try:
        async for piece in pieces:
            yield piece
    finally:
        await pieces.aclose()
    yield ending
