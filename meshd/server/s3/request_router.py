"""Which node executes an S3 request: a single node itself; in a mesh, an owner of the name that it concerns.

A request that another node must answer is forwarded. What this node needs of other nodes for its own part,
such as the source of a copy, is looked up before the request is admitted, and used only afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

from meshd.auth.identity import RemoteRecord
from meshd.server.proxy.fan_out import AIM_MEMBERS
from meshd.server.proxy.hops import may_answer, object_name_of
from meshd.server.request_body import RequestBody, reserve_body_memory
from meshd.server.s3.response_headers import common_headers
from meshd.store.records import INTERNAL_WRITE
from meshwire.dataset.archive_keys import MEMBER_SEPARATOR
from meshwire.errors import S3Error
from meshwire.s3 import operations as ops
from meshwire.s3.parse_request import parse_request

if TYPE_CHECKING:
    from meshd.server.proxy.forwarder import Forwarder
    from meshd.server.proxy.hops import Hop, ObjectName
    from meshd.server.request import MeshRequest, RequestTrace
    from meshd.server.response import Reply
    from meshd.server.s3.admission import RequestAdmission
    from meshd.server.services import ServerServices
    from meshd.store.records import Record, WriteContext
    from meshwire.s3.parse_request import RequestHead


class PreparedRequest(NamedTuple):
    """A request that this node executes. `remote_source` is the source of a copy that other nodes store,
    `error` why there is none. `nearby_record`: of a read, the object of other nodes that may be read through
    this node's copies. `hop`: what the node that forwarded the request reports."""

    operation: ops.Operation
    remote_source: Record | None = None
    error: S3Error | None = None
    nearby_record: Record | None = None
    hop: Hop | None = None

    @property
    def remote_record(self) -> RemoteRecord | None:
        """The object that the request reads, if another node holds it: policies may ask for its tags."""
        operation = self.operation
        if self.nearby_record is not None and isinstance(operation, ops.GetObject):
            return RemoteRecord(operation.bucket, operation.key, None, self.nearby_record)
        if self.remote_source is not None and isinstance(operation, ops.CopyObject | ops.UploadPartCopy):
            source = operation.source
            return RemoteRecord(source.bucket, source.key, source.version, self.remote_source)
        return None


class RequestRouter:
    """Routes the requests of a mesh. One per process."""

    def __init__(self, services: ServerServices, admission: RequestAdmission, forwarder: Forwarder) -> None:
        self._services, self._admission, self._forwarder = services, admission, forwarder

    def __repr__(self) -> str:
        return f"<RequestRouter with {self._forwarder!r}>"

    async def forward_or_prepare(
        self, request: MeshRequest, head: RequestHead, trace: RequestTrace, write_context: WriteContext
    ) -> Reply | PreparedRequest:
        """Return the response of the responsible node, or the request as this node executes it. Raises
        S3Error, MisdirectedError and ConnectionError."""
        deps, forwarder = self._services, self._forwarder
        trace.extra_headers = common_headers(deps, head)
        operation = parse_request(head)
        trace.operation, trace.target = ops.operation_name(operation), operation
        hop = forwarder.receiver.hop_of(request)
        if hop is not None:
            await forwarder.receiver.catch_up(hop)
            trace.remote = hop.remote
            if isinstance(operation, ops.GetObject):  # the forwarding node has found the archive
                operation = deps.members.resolve_member_key(operation)
            name = object_name_of(operation)
            if name is not None and not hop.aim:
                await forwarder.receiver.require_local(name, hop)
            return (await self._prepared(operation))._replace(hop=hop)
        operation = await self._addressed(operation)
        name, aim = object_name_of(operation), ""
        if isinstance(operation, ops.ListObjects) and MEMBER_SEPARATOR in operation.prefix:
            name, aim = await self._archive_of(operation), AIM_MEMBERS
        if isinstance(operation, ops.DeleteObjects):
            with deps.control_snapshot():  # unauthorized bodies are not buffered
                self._admission.admit(head, operation, request, trace)
            await self._hold(request, head)
        if name is not None and not deps.mesh.lease_valid and may_answer(deps.mesh, name):
            await forwarder.receiver.wait_until_current(name)
        if name is not None and not deps.views.is_view(name.bucket) and not may_answer(deps.mesh, name):
            if (
                isinstance(operation, ops.GetObject)
                and deps.nearby_reader is not None
                and deps.nearby_reader.handles(operation)
            ):
                record = await deps.nearby_reader.find_record(operation)
                if record is not None:
                    return PreparedRequest(operation, nearby_record=record)
            reply = await forwarder.forward(request, head, name, trace, write_context, aim=aim)
            if reply is not None:
                trace.mark_forwarded()
                return reply
        return await self._prepared(operation)

    async def _addressed(self, operation: ops.Operation) -> ops.Operation:
        scatterer = self._services.fan_out
        return operation if scatterer is None else await scatterer.resolve_members(operation)

    async def _archive_of(self, operation: ops.ListObjects) -> ObjectName | None:
        scatterer = self._services.fan_out
        if scatterer is None or self._services.views.is_view(operation.bucket):
            return None
        return await scatterer.archive_of(operation)

    async def _prepared(self, operation: ops.Operation) -> PreparedRequest:
        """Add the source of a copy, if other nodes store it."""
        far = self._services.copy_sources
        if far is None or not isinstance(operation, ops.CopyObject | ops.UploadPartCopy):
            return PreparedRequest(operation)
        operation = cast("ops.CopyObject | ops.UploadPartCopy", await self._addressed(operation))
        source = operation.source
        if self._services.views.is_view(source.bucket) or not far.is_remote(source):
            return PreparedRequest(operation)
        try:
            record = await far.find_source(source)
        except S3Error as error:  # reported after admission, to callers who may know it
            return PreparedRequest(operation, None, error)
        return PreparedRequest(operation, record)

    async def _hold(self, request: MeshRequest, head: RequestHead) -> None:
        """Buffer a small body, since it goes to several nodes."""
        most = 2 * self._services.http.max_xml_bytes
        pieces, size = [], 0
        with reserve_body_memory(request.content_length, most):
            async for data in RequestBody(request, head, self._services.http.body_timeout).iter_raw():
                pieces.append(data)
                size += len(data)
                if size > most:
                    raise S3Error("MaxMessageLengthExceeded")
        request.held_body = b"".join(pieces)

    async def relay_undamaged(
        self, request: MeshRequest, head: RequestHead, operation: ops.GetObject, trace: RequestTrace
    ) -> Reply | None:
        """Relay the response of another owner when this node's copy is damaged; None if there is none, or all
        copies are damaged."""
        name = object_name_of(operation)
        mesh, views = self._services.mesh, self._services.views
        if name is None or views.is_view(name.bucket) or not may_answer(mesh, name):
            return None
        reply = await self._forwarder.forward(request, head, name, trace, INTERNAL_WRITE, damaged=True)
        if reply is not None:
            trace.mark_forwarded()
        return reply
