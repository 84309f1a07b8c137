"""Batch API: plans, frames, gather. JSON in; JSON or one body with Content-Length out.

A handler parses, calls the service and sends. Frames and streams of samples are sent here, to clients and to
other nodes. See `json_api` for errors and query parameters.
"""

from __future__ import annotations

import logging
import re
from contextlib import aclosing, closing, suppress
from typing import TYPE_CHECKING

from meshd.batches.sample_responses import UnreadableError
from meshd.core.api_errors import BatchError
from meshd.core.frame_address import FrameAddress, common_block
from meshd.server.abandoned_requests import cancel_when_abandoned
from meshd.server.api import reply_types
from meshd.server.api.json_api import (
    caller_of,
    check_last_part,
    entity_headers,
    hash_path,
    hold_capacity,
    parse_query,
)
from meshd.server.api.loader_reports import note_report
from meshd.server.http_route import HttpRoute
from meshd.server.openapi_operations import operation
from meshd.server.response import Reply, StreamedReply, connection_header, head_bytes
from meshd.server.sendfile import ResponseWriter, send_spans
from meshd.store.records import Span
from meshd.telemetry import metrics, tracing
from meshd.util.tenant_limits import Admission
from meshwire.frame import tensor_frame
from meshwire.http_values import mesh_headers
from meshwire.http_values.conditional_requests import UnsatisfiableRangeError, parse_range, resolve_range
from meshwire.http_values.mesh_headers import (
    FRAME_BLOCK_HEADER,
    FRAME_SERIES_HEADER,
    FRAME_SIZES_HEADER,
    HANDOVER_TICKET_HEADER,
    SAMPLE_CACHE_HEADER,
    FrameTiming,
    HandoverBlock,
    ServerTiming,
    parse_sample_cache,
    parse_series,
)
from meshwire.http_values.mesh_headers import LOCAL_HANDOVER_HEADER as HANDS
from meshwire.strict_json import checked_choice

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshd.auth.identity import Caller, Identity
    from meshd.batches.gather import GatherService
    from meshd.batches.row_descriptions import RowDescriptions
    from meshd.batches.sample_responses import StreamBody
    from meshd.batches.service import BatchService
    from meshd.core.frame_address import Frame
    from meshd.server.api.json_api import JsonApi
    from meshd.server.local_handover import LocalFrameService
    from meshd.server.request import MeshRequest
    from meshd.server.response import Header

_log = logging.getLogger(__name__)
MAX_STREAM_BYTES = 512 << 20
STREAM_BYTES = 1 << 20
"""Bytes that a stream of blobs buffers for its client, here and in the kernel."""
_ITEM_FACTOR = 30  # bytes of memory per byte of a gather's body (measured): items, records, locations
_ROW_BYTES = 1 << 11
_STREAMS = "streams of samples"
_NUMBERS = {"rank": 0, "world": 1, "batch": 256, "origin": 0}
_QUERY = (*_NUMBERS, "format", "share", "part")
_FORMATS = ("tensors", "samples", "tar")
_NUMBER = re.compile(r"[0-9]{1,18}")


class BatchEndpoint:
    """The batch API. One instance per worker; its only state is the streams in progress, by account."""

    def __init__(
        self, batches: BatchService, gathers: GatherService, rows: RowDescriptions, api: JsonApi
    ) -> None:
        self._batches, self._gathers, self._rows, self._api = batches, gathers, rows, api
        self._streams = Admission(MAX_STREAM_BYTES)

    def __repr__(self) -> str:
        return f"<BatchEndpoint {self._streams!r}>"

    def routes(self) -> list[HttpRoute]:
        """Return the routes; all of them require a signature."""
        guarded, bounded = self._api.handle_errors, self._api.limit_concurrency
        return [
            HttpRoute("POST", "/-/plans", guarded(bounded(self.create_plan))),
            HttpRoute("GET", "/-/plans/", guarded(self.get_plan)),
            HttpRoute("POST", "/-/plans/", guarded(self.post_rows)),
            HttpRoute("POST", "/-/gather", guarded(self.gather)),
        ]

    @operation("/-/plans", "Register what is done with the samples of a snapshot", accepts="json")
    async def create_plan(self, request: MeshRequest, identity: Identity) -> Reply:
        return self._api.reply_json(
            await self._batches.register_plan(caller_of(request, identity), await request.read())
        )

    @operation("/-/plans/{plan}", "A plan with its spec", reply=reply_types.PlanDescription)
    @operation("/-/plans/{plan}/bad", "Samples that could not be used", reply=list[reply_types.BadSample])
    @operation(
        "/-/plans/{plan}/{epoch}/{step}",
        "The batch of a rank at a step, as safetensors",
        query=_QUERY,
        content="bytes",
    )
    @operation(
        "/-/plans/{plan}/{epoch}/{step}/sources",
        "The sample and the bytes behind each row of a batch",
        query=tuple(_NUMBERS),
        reply=reply_types.Sources,
    )
    @operation(
        "/-/plans/{plan}/{epoch}/{step}/draws",
        "What the ops drew for a row of a batch",
        query=(*_NUMBERS, "row"),
        reply=reply_types.Draws,
    )
    async def get_plan(self, request: MeshRequest, identity: Identity) -> Reply:
        parts = hash_path(request, "/-/plans/", 1, 2, 3, 4)
        if len(parts) == 1:
            plan = await self._batches.plan(caller_of(request, identity), parts[0])
            note_report(request.headers, plan, identity.user_id, self._api.now())
            return self._api.reply_json(plan.describe())
        if len(parts) == 2:
            check_last_part(request, parts[1], "bad")
            return self._api.reply_json(
                await self._batches.bad_samples(caller_of(request, identity), parts[0])
            )
        if len(parts) == 4:
            return await self._describe_rows(request, identity, parts)
        return await self._get_frame(request, identity, parts)

    async def _describe_rows(self, request: MeshRequest, identity: Identity, parts: tuple[str, ...]) -> Reply:
        """Answer `/-/plans/PLAN/EPOCH/STEP/sources`, from which objects the rows of a frame are made, and
        `…/draws?row=N`, what the ops drew for one of them."""
        check_last_part(request, parts[3], "sources", "draws")
        caller = caller_of(request, identity)
        if parts[3] == "draws":
            query = parse_query(request, (*_NUMBERS, "row"))
            row = _number(query.get("row", "0"), "row")
            address = _address(parts, query)
            return self._api.reply_json(await self._rows.describe_draws(caller, address, row))
        address = _address(parts, parse_query(request, tuple(_NUMBERS)))
        return self._api.reply_json(await self._rows.describe_sources(caller, address))

    async def _get_frame(self, request: MeshRequest, identity: Identity, parts: tuple[str, ...]) -> Reply:
        query = parse_query(request, _QUERY)
        form = checked_choice(query.get("format", "tensors"), "format", _FORMATS)
        address = _address(parts, query)
        if request.headers.get(mesh_headers.LOADER_REPORT_HEADER):
            plan = await self._batches.plan(caller_of(request, identity), address.plan)
            note_report(request.headers, plan, identity.user_id, self._api.now(), address)
        tracing.add_attributes(
            {"shardmesh.plan": parts[0], "shardmesh.epoch": address.epoch, "shardmesh.step": address.step}
        )
        if form != "tensors":
            make = self._batches.samples if form == "samples" else self._batches.tar
            rows = max(1, address.batch) // max(1, address.world)
            with hold_capacity(self._streams, identity, STREAM_BYTES + rows * _ROW_BYTES, _STREAMS):
                return await send_stream(
                    request,
                    await make(caller_of(request, identity), address),
                    self._api.now(),
                    self._api.location_headers(),
                )
        with cancel_when_abandoned(request.connection):
            frames = await self._tensors(request, caller_of(request, identity), address, query)
        return await self._send(request, frames)

    async def _send(self, request: MeshRequest, frames: Sequence[Frame]) -> Reply:
        """Send frames with the headers of this node; see `send_frames`."""
        api = self._api
        return await send_frames(request, frames, api.now(), api.location_headers(), api.frame_service)

    async def _tensors(
        self, request: MeshRequest, caller: Caller, address: FrameAddress, query: Mapping[str, str]
    ) -> list[Frame]:
        """Return the frame of the address, and of further steps if the client asks for them."""
        kept_bytes = parse_sample_cache(request.headers.get(SAMPLE_CACHE_HEADER))
        if "part" in query:
            version = _number(query["part"], "part")
            return [await self._batches.get_part(caller, address, version, kept_bytes)]
        shared = bool(query.get("share"))
        count = parse_series(request.headers.get(FRAME_SERIES_HEADER))
        if count == 1 or "range" in request.headers:
            return [await self._batches.get_frame(caller, address, shared=shared, kept_bytes=kept_bytes)]
        return await self._batches.get_frames(caller, address, count, shared=shared, kept_bytes=kept_bytes)

    @operation(
        "/-/plans/{plan}/rows",
        "Chosen samples, in the requested order",
        query=("epoch",),
        accepts="json",
        content="bytes",
    )
    async def post_rows(self, request: MeshRequest, identity: Identity) -> Reply:
        digest, what = hash_path(request, "/-/plans/", 2)
        check_last_part(request, what, "rows")
        epoch = _number(parse_query(request, ("epoch",)).get("epoch", "0"), "epoch")
        caller = caller_of(request, identity)
        body = await request.read()
        with cancel_when_abandoned(request.connection):
            frame = await self._batches.get_rows(caller, digest, epoch, body)
        return await self._send(request, [frame])

    @operation("/-/gather", "Many ranges and objects in one stream", accepts="json", content="bytes")
    async def gather(self, request: MeshRequest, identity: Identity) -> Reply:
        body = await request.read()
        with hold_capacity(self._streams, identity, STREAM_BYTES + len(body) * _ITEM_FACTOR, _STREAMS):
            outgoing = await self._gathers.gather(caller_of(request, identity), body)
            return await send_stream(request, outgoing, self._api.now(), self._api.location_headers())


def _address(parts: tuple[str, ...], query: Mapping[str, str]) -> FrameAddress:
    numbers = {name: _number(query.get(name, str(default)), name) for name, default in _NUMBERS.items()}
    return FrameAddress(parts[0], _number(parts[1], "epoch"), _number(parts[2], "step"), **numbers)


def _number(text: str, name: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise BatchError("BadRequest", f"{name} must be a number from 0 on, got {text[:80]!r}")
    return int(text)


async def send_frames(
    request: MeshRequest,
    frames: Sequence[Frame],
    now: int,
    more: Sequence[Header] = (),
    frame_service: LocalFrameService | None = None,
) -> Reply:
    """Send the finished frames of consecutive steps from their memory, one after the other, or a ticket to
    fetch them locally; closes their handles. Of a single frame, send the part that a `Range` header asks for;
    a range that covers nothing of it is answered by the whole."""
    handed = _offer_frames(request, frames, frame_service)
    whole, rows = sum([frame.size for frame in frames]), sum([frame.rows for frame in frames])
    part = _part_of(request, whole) if handed is None and len(frames) == 1 else None
    start, size = part or (0, whole)
    took = frames[0].took
    if len(frames) > 1:
        times = [frame.took for frame in frames]
        took = FrameTiming(sum([each.fetch for each in times]), sum([each.prepare for each in times]))
        more = [(FRAME_SIZES_HEADER, ",".join([str(frame.size) for frame in frames])), *more]
        metrics.frame_series.inc()
    headers = [
        *entity_headers(tensor_frame.CONTENT_TYPE, 0 if handed else size),
        ("x-mesh-rows", str(rows)),
        ("x-mesh-frame", ",".join([frame.result for frame in frames])),
        ("Server-Timing", ServerTiming(took, request.trace.elapsed()).to_header()),
        *more,
    ]
    if handed is not None:
        metrics.batch_rows_served.inc(rows)
        return Reply(200, [*headers, *handed], b"", now)
    spans, status = [Span(frame.fd, frame.offset, frame.size) for frame in frames], 200
    if part is not None:
        spans, status = [spans[0].sub_span(start, size)], 206
        headers.append(("Content-Range", f"bytes {start}-{start + size - 1}/{whole}"))
    try:
        with tracing.stage("send"):
            keep_alive = await send_spans(request, status, headers, spans, now)
    finally:
        for frame in frames:
            frame.close()
    if not start:  # the other parts are of the same rows
        metrics.batch_rows_served.inc(rows)
    request.trace.sent += size
    return StreamedReply(status, keep_alive=keep_alive)


def _offer_frames(
    request: MeshRequest, frames: Sequence[Frame], frame_service: LocalFrameService | None
) -> list[Header] | None:
    """Return the headers by which a client on this host fetches the frames; None if their bytes are sent."""
    asked = request.headers.get(HANDS, "")
    if frame_service is None or not asked:
        return None
    blocks = request.headers.get(FRAME_BLOCK_HEADER) == "1"
    ticket = frame_service.offer_frames(frames, asked, blocks=blocks)
    if ticket is None:
        return None
    headers = [(HANDOVER_TICKET_HEADER, ticket.to_header())]
    if block := common_block(frames):
        offsets = tuple(frame.offset for frame in frames)
        headers.append((FRAME_BLOCK_HEADER, HandoverBlock(block.size, offsets).to_header()))
    return headers


def _part_of(request: MeshRequest, size: int) -> tuple[int, int] | None:
    """Return (offset, length) in bytes of the part of a body of `size` bytes that is asked for."""
    wanted = parse_range(request.headers.get("range"))
    if wanted is None:
        return None
    with suppress(UnsatisfiableRangeError):
        return resolve_range(wanted, size)
    return None


async def send_stream(
    request: MeshRequest, outgoing: StreamBody, now: int, more: Sequence[Header] = ()
) -> Reply:
    """Send blobs as they are read. If data becomes unreadable, the connection is closed."""
    headers = [
        *entity_headers(outgoing.content_type, outgoing.size),
        ("x-mesh-rows", str(outgoing.rows)),
        *more,
    ]
    keep_alive = request.keep_alive
    connection = connection_header(request, keep_alive)
    head = head_bytes(200, headers, now, connection=connection)
    try:
        with tracing.stage("send"), closing(ResponseWriter(request)) as outlet:
            await outlet.write_data(head)
            await _pump(outlet, outgoing)
    except BaseException as error:
        if request.transport is not None:
            request.transport.abort()
        if isinstance(error, UnreadableError):
            _log.warning("%s", error)
            raise ConnectionAbortedError(str(error)) from error
        raise
    metrics.batch_rows_served.inc(outgoing.rows)
    request.trace.sent += outgoing.size
    return StreamedReply(200, keep_alive=keep_alive)


async def _pump(outlet: ResponseWriter, outgoing: StreamBody) -> None:
    """Write every chunk at the client's pace."""
    left = outgoing.size
    async with aclosing(outgoing.chunks) as chunks:
        async for chunk in chunks:
            if isinstance(chunk, (bytes, memoryview)):
                left -= len(chunk)
                await outlet.write_data(chunk)
            else:
                left -= sum(span.length for span in chunk)
                await outlet.write_data(b"", chunk)
    if left:
        raise UnreadableError(f"{left} bytes fewer than announced")
