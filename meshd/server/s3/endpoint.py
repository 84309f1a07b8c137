"""The S3 endpoint: parse, route, authenticate, authorize, call the service, render the response.

It knows no storage and makes no decision about objects. The client gets exactly one response in S3's format
with a request id, or a closed connection if the response had already started. A single node executes every
request itself; in a mesh, an owner of the name does, and other nodes forward the request to it. What a node
needs of others for its own part, such as the source of a copy, is looked up before the request is admitted,
and used only afterwards.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from meshd.auth.identity import ANONYMOUS_IDENTITY, RemoteRecord
from meshd.control.control_api import ControlError
from meshd.core.api_errors import control_error_to_s3, retry_if_written_back, to_s3_error
from meshd.core.read_source import ReadLostError
from meshd.objects.object_reader import ReplacedError
from meshd.server.direct_sender import PartialReadError
from meshd.server.proxy.fan_out import AIM_MEMBERS
from meshd.server.proxy.forwarder import AlreadyAnsweredError
from meshd.server.proxy.hops import (
    HOP_HEADER,
    ClockSkewError,
    LocalDamageError,
    MisdirectedError,
    clock_skew_reply,
    damaged_reply,
    may_answer,
    object_name_of,
    stale_map_reply,
)
from meshd.server.request import RequestTrace, request_head
from meshd.server.request_body import RequestBody, reserve_body_memory
from meshd.server.response import Reply, StreamedReply, send_reply
from meshd.server.s3.body_resumer import body_resumer
from meshd.server.s3.dispatch import OperationDispatcher
from meshd.server.s3.request_auth import S3Call, VirtualHosts
from meshd.server.s3.response_headers import common_headers, object_response_head
from meshd.server.sendfile import send_groups, send_spans
from meshd.server.sendfile_preload import load_first_window, load_into_page_cache
from meshd.store.errors import CorruptExtentError, DiskFailedError, StoreError
from meshd.store.records import INTERNAL_WRITE, WriteContext
from meshd.telemetry import tracing
from meshd.views.dispatch import AssembledRead
from meshwire.dataset.archive_paths import MEMBER_SEPARATOR
from meshwire.errors import S3Error
from meshwire.s3 import operations as ops
from meshwire.s3.parse_request import parse_request
from meshwire.s3.responses import render, render_error

if TYPE_CHECKING:
    from meshd.auth.identity import Identity, RequestContext
    from meshd.core.object_io import LookupResult
    from meshd.server.proxy.forwarder import Forwarder
    from meshd.server.proxy.hops import Hop
    from meshd.server.request import MeshRequest
    from meshd.server.s3.request_auth import Authenticator, RequestAdmission
    from meshd.server.services import ServerServices
    from meshd.store.records import Record
    from meshwire.s3.parse_request import RequestHead

log = logging.getLogger(__name__)

# Smaller responses are read and written in one piece; larger ones use sendfile.
SMALL_BYTES = 128 << 10
# How often an object is looked up again that writers replace before its file is opened.
_FINDS = 8
_ANONYMOUS_OVERRIDES = "Request specific response headers cannot be used for anonymous GET requests."
# Refused while too many clients leave their responses unread, since these would have to be buffered.
_LONG_ANSWERS = (ops.ListObjects, ops.ListObjectVersions, ops.ListMultipartUploads, ops.ListParts)


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
            return (await self._prepare(operation))._replace(hop=hop)
        operation = await self._resolve_members(operation)
        name, aim = object_name_of(operation), ""
        if isinstance(operation, ops.ListObjects) and MEMBER_SEPARATOR in operation.prefix:
            if deps.fan_out is not None and not deps.views.is_view(operation.bucket):
                name = await deps.fan_out.archive_of(operation)
            aim = AIM_MEMBERS
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
        return await self._prepare(operation)

    async def _resolve_members(self, operation: ops.Operation) -> ops.Operation:
        scatterer = self._services.fan_out
        return operation if scatterer is None else await scatterer.resolve_members(operation)

    async def _prepare(self, operation: ops.Operation) -> PreparedRequest:
        """Add the source of a copy, if other nodes store it."""
        far = self._services.copy_sources
        if far is None or not isinstance(operation, ops.CopyObject | ops.UploadPartCopy):
            return PreparedRequest(operation)
        operation = cast("ops.CopyObject | ops.UploadPartCopy", await self._resolve_members(operation))
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
        self,
        request: MeshRequest,
        head: RequestHead,
        operation: ops.GetObject,
        trace: RequestTrace,
        error: LocalDamageError,
    ) -> Reply:
        """Relay the response of another owner when this node's copy is damaged. Raises S3Error if there is
        none, or all copies are damaged."""
        name = object_name_of(operation)
        mesh, views = self._services.mesh, self._services.views
        if name is not None and not views.is_view(name.bucket) and may_answer(mesh, name):
            reply = await self._forwarder.forward(request, head, name, trace, INTERNAL_WRITE, damaged=error)
            if reply is not None:
                trace.mark_forwarded()
                return reply
        raise error.client_error from error


class S3Endpoint:
    """Answers every request that is not for a native route. One per process."""

    def __init__(
        self, deps: ServerServices, admission: RequestAdmission, authenticator: Authenticator
    ) -> None:
        self._deps, self._admission = deps, admission
        self._execute = OperationDispatcher(deps, admission, authenticator)
        self._router = None if deps.forwarder is None else RequestRouter(deps, admission, deps.forwarder)
        self._hosts = VirtualHosts(deps.http.domains)

    async def handle(self, request: MeshRequest) -> Reply:
        """Answer one request."""
        headers, started = request.headers, self._deps.clock.monotonic()
        span = tracing.start_request(headers, started, forwarded=HOP_HEADER in headers)
        trace = RequestTrace(self._deps.clock, self._deps.audit, request.remote, span)
        tracing.enter(span)
        return await send_reply(request, trace, self._reply(request, trace), self._deps.mesh)

    async def _reply(self, request: MeshRequest, trace: RequestTrace) -> Reply:
        """Return the response, or an error. Raises only ConnectionError and CancelledError: the client is
        gone."""
        try:
            head = request_head(
                request,
                self._deps.http.max_header_bytes,
                self._hosts.bucket_of(request.headers.get("host", "")),
            )
            return await self._answer(request, head, trace)
        except ClockSkewError:
            return clock_skew_reply(self._now())
        except S3Error as error:
            return self._refuse(request, trace, error)
        except AlreadyAnsweredError as answered:
            return answered.reply
        except MisdirectedError as error:
            return stale_map_reply(error.version, self._now())
        except ConnectionError:
            raise
        except ControlError as error:
            return self._refuse(request, trace, control_error_to_s3(error))
        except Exception:
            log.exception("request %s (%s) failed", trace.request_id, trace.operation)
            return self._refuse(request, trace, S3Error("InternalError"))

    async def _answer(self, request: MeshRequest, head: RequestHead, trace: RequestTrace) -> Reply:
        deps = self._deps
        write_context = WriteContext(deps.mesh.node_id, deps.mesh.lease_confirmed_version)
        elsewhere: PreparedRequest | None = None
        hop: Hop | None = None
        if not deps.mesh.single_node and self._router is not None:
            answer = await self._router.forward_or_prepare(request, head, trace, write_context)
            if isinstance(answer, Reply):
                return answer
            elsewhere, hop = answer, answer.hop
            if hop is not None:
                write_context = WriteContext(hop.sender, hop.map_version)
        with deps.control_snapshot():
            trace.extra_headers = common_headers(deps, head)
            operation = parse_request(head) if elsewhere is None else elsewhere.operation
            trace.operation, trace.target = ops.operation_name(operation), operation
            may_be_member = not isinstance(operation, ops.GetObject) or MEMBER_SEPARATOR in operation.key
            resolve = deps.members.resolve_member_key if elsewhere is None and may_be_member else None
            remote = None if elsewhere is None else elsewhere.remote_record
            admitted = self._admission.admit(head, operation, hop or request, trace, resolve, remote)
            operation, signer, context = admitted.operation, admitted.signer, admitted.context
        if (
            isinstance(operation, ops.GetObject)
            and operation.overrides
            and signer.identity is ANONYMOUS_IDENTITY
        ):
            raise S3Error("InvalidRequest", _ANONYMOUS_OVERRIDES)
        try:
            if elsewhere is not None and elsewhere.error is not None:
                raise elsewhere.error
            if isinstance(operation, ops.GetObject):
                if elsewhere is not None and elsewhere.nearby_record is not None:
                    return await self._get_nearby(request, elsewhere, signer.identity, context, trace)
                get = partial(self._get, request, operation, signer.identity, context, trace)
                try:
                    return await retry_if_written_back(get)
                except LocalDamageError as error:
                    if hop is not None:
                        return damaged_reply(self._now(), final=error.final)
                    if self._router is None or deps.mesh.single_node:
                        raise error.client_error_of_only_copy() from error
                    return await self._router.relay_undamaged(request, head, operation, trace, error)
            body = RequestBody(request, head, deps.http.body_timeout, signer.claim, signer.verified)
            far = None if elsewhere is None else elsewhere.remote_source
            call = S3Call(head, operation, signer, body, context, trace, request, write_context, far, hop)
            return await self._carry_out(call, trace, pressed=request.pressed)
        except S3Error as error:
            raise deps.access.mask_missing_key(signer.identity, operation, error, context) from error

    async def _get_nearby(
        self,
        request: MeshRequest,
        asked: PreparedRequest,
        identity: Identity,
        context: RequestContext,
        trace: RequestTrace,
    ) -> Reply:
        """Answer with an object of other nodes through this node's copies."""
        deps, operation, record = self._deps, cast("ops.GetObject", asked.operation), asked.nearby_record
        assert deps.nearby_reader is not None
        assert record is not None
        opened = await deps.nearby_reader.open_object(operation, record)
        found = opened.found
        if found.head.tag_count and not deps.access.may_count_tags(identity, operation, context):
            opened = opened._replace(found=found._replace(head=found.head._replace(tag_count=0)))
        return await self._send_spans(request, operation, opened, trace)

    async def _carry_out(self, call: S3Call, trace: RequestTrace, *, pressed: bool) -> Reply:
        if pressed and isinstance(call.operation, _LONG_ANSWERS):
            raise S3Error("SlowDown", headers={"retry-after": "1"})
        try:
            trace.result = result = await self._execute(call)
        finally:
            trace.received += call.body.received
        rendered = render(call.operation, result, trace.request_id)
        return Reply(rendered.status, [*rendered.headers, *trace.extra_headers], rendered.body, self._now())

    async def _find(
        self, asked: ops.GetObject, operation: ops.GetObject
    ) -> tuple[ops.GetObject, LookupResult]:
        """Return what to answer and where it is stored: for a view, the object that holds the result."""
        if operation.member is not None:
            return operation, await self._deps.members.find_member(operation)
        try:
            return operation, self._deps.reader.find_object(operation)
        except S3Error as error:
            if operation is asked or error.code != "NoSuchKey":
                raise
        operation = cast("ops.GetObject", await self._deps.views.redirect(asked))  # it was evicted in between
        return operation, self._deps.reader.find_object(operation)

    async def _get(
        self,
        request: MeshRequest,
        asked: ops.GetObject,
        identity: Identity,
        context: RequestContext,
        trace: RequestTrace,
    ) -> Reply:
        opened: ops.GetObject | AssembledRead = asked
        if asked.member is None and not self._deps.bucket_table.is_plain(asked.bucket):
            opened = await self._open_elsewhere(asked)
        if isinstance(opened, AssembledRead):
            return await self._send_spans(request, asked, opened, trace)
        for _ in range(_FINDS - 1):
            with suppress(ReplacedError):  # nothing has been sent yet
                return await self._get_once(request, asked, opened, identity, context, trace)
        return await self._get_once(request, asked, opened, identity, context, trace)

    async def _open_elsewhere(self, asked: ops.GetObject) -> ops.GetObject | AssembledRead:
        """Return the read of an object of a bucket with an origin or of a view; the operation, perhaps
        redirected, if this node's store has the bytes."""
        if self._deps.backed is not None:
            streamed = await self._deps.backed.open_object(asked)
            if streamed is not None:
                return streamed
        return await self._deps.views.open_read(asked)

    async def _get_once(
        self,
        request: MeshRequest,
        asked: ops.GetObject,
        operation: ops.GetObject,
        identity: Identity,
        context: RequestContext,
        trace: RequestTrace,
    ) -> Reply:
        reader = self._deps.reader
        operation, found = await self._find(asked, operation)
        if found.head.tag_count and not self._deps.access.may_count_tags(identity, asked, context):
            found = found._replace(head=found.head._replace(tag_count=0))
        status, headers = object_response_head(operation, found, trace)
        if operation.head or not found.length:
            return Reply(status, headers, b"", self._now())
        try:
            with reader.open_range(operation, found) as spans:
                if found.length > SMALL_BYTES or request.pressed:
                    viewed = asked if asked.bucket != operation.bucket else None
                    rest = body_resumer(self._deps, operation, found, spans, viewed)
                    cold = self._deps.cold_reader
                    begun = await load_first_window(spans, cold)
                    with tracing.stage("send"):
                        keep_alive = await send_spans(
                            request, status, headers, spans, self._now(), rest, cold, begun
                        )
                else:
                    await load_into_page_cache(spans)
                    # Read through the store, which verifies bytes that are few enough to be verified during
                    # the read.
                    return Reply(status, headers, reader.read_range(operation, found), self._now())
        except (PartialReadError, ReadLostError) as error:  # the connection is cut
            log.warning("a response was cut off", extra={"request": trace.request_id, "why": str(error)})
            raise ConnectionAbortedError(str(error)) from error
        except (CorruptExtentError, DiskFailedError) as error:
            again = await self._deps.views.rebuild_result(asked, found.record.etag)
            if again is None:
                raise LocalDamageError(error, f"{operation.bucket}/{operation.key}") from error
            return Reply(status, headers, again[found.offset :][: found.length], self._now())
        except StoreError as error:
            raise to_s3_error(error) from error
        trace.sent += found.length
        return StreamedReply(status, keep_alive=keep_alive)

    async def _send_spans(
        self, request: MeshRequest, asked: ops.GetObject, assembled: AssembledRead, trace: RequestTrace
    ) -> Reply:
        found = assembled.found
        status, headers = object_response_head(asked, found, trace)
        if asked.head or not found.length:
            return Reply(status, headers, b"", self._now())
        try:
            read = assembled.read
            with tracing.stage("send"):
                keep_alive = await send_groups(
                    request,
                    status,
                    headers,
                    read.groups(),
                    self._now(),
                    read.record_truncation,
                    self._deps.cold_reader,
                )
        except StoreError as error:
            raise to_s3_error(error) from error
        trace.sent += found.length
        return StreamedReply(status, keep_alive=keep_alive)

    def _refuse(self, request: MeshRequest, trace: RequestTrace, error: S3Error) -> Reply:
        trace.code = error.code
        resource = request.raw_path.partition("?")[0]
        rendered = render_error(error, trace.request_id, resource, head=request.method == "HEAD")
        return Reply(rendered.status, [*rendered.headers, *trace.extra_headers], rendered.body, self._now())

    def _now(self) -> int:
        return self._deps.clock.now_ms() // 1000
