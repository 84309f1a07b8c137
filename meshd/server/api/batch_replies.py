"""Replies with frames and streams of samples, to clients and to other nodes; the statuses of batch errors."""

from __future__ import annotations

import logging
from contextlib import aclosing, closing, suppress
from typing import TYPE_CHECKING

from meshd.batches.sample_responses import UnreadableError
from meshd.core.api_errors import BatchError
from meshd.core.frame_address import common_block
from meshd.server.response import Reply, StreamedReply, connection_header, head_bytes
from meshd.server.sendfile import ResponseWriter, send_spans
from meshd.store.errors import CorruptExtentError, DiskFullError
from meshd.store.records import Span
from meshd.telemetry import metrics, tracing
from meshwire.frame import tensor_frame
from meshwire.http_values.conditional_requests import UnsatisfiableRangeError, parse_range, resolve_range
from meshwire.http_values.mesh_headers import (
    FRAME_BLOCK_HEADER,
    FRAME_SIZES_HEADER,
    HANDOVER_TICKET_HEADER,
    FrameTiming,
    HandoverBlock,
    ServerTiming,
)
from meshwire.http_values.mesh_headers import LOCAL_HANDOVER_HEADER as HANDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshd.batches.sample_responses import StreamBody
    from meshd.core.api_errors import Code
    from meshd.core.frame_address import Frame
    from meshd.server.local_handover import LocalFrameService
    from meshd.server.request import MeshRequest
    from meshd.server.response import Header
    from meshd.store.errors import StoreError

_log = logging.getLogger(__name__)
STATUS: Mapping[Code, int] = {
    "BadRequest": 400,
    "InvalidPlan": 400,
    "UnknownOp": 400,
    "AccessDenied": 403,
    "NoSuchBucket": 404,
    "NoSuchSnapshot": 404,
    "NoSuchPlan": 404,
    "NoSuchKey": 404,
    "NoSuchView": 404,
    "NoSuchJob": 404,
    "MethodNotAllowed": 405,
    "SnapshotChanged": 409,
    "ViewExists": 409,
    "BucketExists": 409,
    "CredentialsMissing": 400,
    "InUse": 409,
    "Gone": 410,
    "UnknownOpBuild": 410,
    "NoSuchAsset": 410,
    "TooLarge": 413,
    "NotOwner": 421,
    "BadSample": 422,
    "Busy": 503,
    "OpFailed": 500,
    "CorruptData": 500,
    "InternalError": 500,
    "NotImplemented": 501,
}


def store_batch_error(error: StoreError) -> BatchError:
    """Translate an error of the store into the protocol's."""
    if isinstance(error, DiskFullError):
        return BatchError(
            "Busy", "the node's disk is full", help="delete data or enlarge the disk", retry_after=60
        )
    if isinstance(error, CorruptExtentError):
        _log.error("corrupt extent, not served: %s", error)
        what = error.name or "stored bytes"
        return BatchError(
            "InternalError", f"{what}: damaged on the disk, so it is not served; run meshd fsck"
        )
    return BatchError("InternalError", f"the store failed: {type(error).__name__}")


async def send_frame(
    request: MeshRequest,
    frame: Frame,
    now: int,
    more: Sequence[Header] = (),
    frame_service: LocalFrameService | None = None,
) -> Reply:
    """Send a finished frame from its memory, or the part that a `Range` header asks for, or a ticket to fetch
    it locally; closes its handle. A range that covers nothing of it is answered by the whole."""
    handed = _offered(request, (frame,), frame_service)
    part = None if handed else _part_of(request, frame.size)
    start, size = part or (0, frame.size)
    headers = [
        *entity_headers(tensor_frame.CONTENT_TYPE, 0 if handed else size),
        ("x-mesh-rows", str(frame.rows)),
        ("x-mesh-frame", frame.result),
        ("Server-Timing", ServerTiming(frame.took, request.trace.elapsed()).to_header()),
        *more,
    ]
    if handed is not None:
        metrics.batch_rows_served.inc(frame.rows)
        return Reply(200, [*headers, *handed], b"", now)
    status = 200
    if part is not None:
        status = 206
        headers.append(("Content-Range", f"bytes {start}-{start + size - 1}/{frame.size}"))
    try:
        with tracing.stage("send"):
            spans = [Span(frame.fd, frame.offset + start, size)]
            keep_alive = await send_spans(request, status, headers, spans, now)
    finally:
        frame.close()
    if not start:  # the other parts are of the same rows
        metrics.batch_rows_served.inc(frame.rows)
    request.trace.sent += size
    return StreamedReply(status, keep_alive=keep_alive)


async def send_frames(
    request: MeshRequest,
    frames: Sequence[Frame],
    now: int,
    more: Sequence[Header],
    frame_service: LocalFrameService | None,
) -> Reply:
    """Send the finished frames of consecutive steps, one after the other, or a ticket to fetch them locally;
    closes their handles."""
    handed = _offered(request, frames, frame_service)
    size, rows = sum(frame.size for frame in frames), sum(frame.rows for frame in frames)
    took = FrameTiming(sum(frame.took.fetch for frame in frames), sum(frame.took.prepare for frame in frames))
    headers = [
        *entity_headers(tensor_frame.CONTENT_TYPE, 0 if handed else size),
        ("x-mesh-rows", str(rows)),
        ("x-mesh-frame", ",".join(frame.result for frame in frames)),
        (FRAME_SIZES_HEADER, ",".join(str(frame.size) for frame in frames)),
        ("Server-Timing", ServerTiming(took, request.trace.elapsed()).to_header()),
        *more,
    ]
    metrics.frame_series.inc()
    if handed is not None:
        metrics.batch_rows_served.inc(rows)
        return Reply(200, [*headers, *handed], b"", now)
    try:
        with tracing.stage("send"):
            spans = [Span(frame.fd, frame.offset, frame.size) for frame in frames]
            keep_alive = await send_spans(request, 200, headers, spans, now)
    finally:
        for frame in frames:
            frame.close()
    metrics.batch_rows_served.inc(rows)
    request.trace.sent += size
    return StreamedReply(200, keep_alive=keep_alive)


def _offered(
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


def entity_headers(content_type: str, size: int) -> list[Header]:
    """Return the headers that describe a body."""
    return [("Content-Type", content_type), ("Content-Length", str(size))]
