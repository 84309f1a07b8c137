"""Batch API: snapshots, plans, frames, gather and views. JSON in; JSON or one body with Content-Length out.

A handler parses, calls the service and sends. Every error is `{"error": {code, message, request_id, detail,
help}}`. Unknown query parameters are refused, because a typing error must not change which rows are returned.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from meshd.auth.identity import NO_CONTEXT, Caller
from meshd.core.api_errors import BatchError, busy
from meshd.core.frame_address import FrameAddress
from meshd.datasets.snapshot_statistics import snapshot_statistics
from meshd.server.api import reply_types
from meshd.server.api.batch_replies import (
    STATUS,
    entity_headers,
    send_frame,
    send_frames,
    send_stream,
    store_batch_error,
)
from meshd.server.api.loader_reports import note_report
from meshd.server.native_routes import HttpRoute
from meshd.server.openapi_operations import operation
from meshd.server.response import Reply, map_headers
from meshd.store.errors import StoreError
from meshd.telemetry import tracing
from meshd.util.tenant_limits import Admission, AdmissionRejectedError
from meshwire.dataset import build_snapshot
from meshwire.frame import tensor_frame
from meshwire.http_values import mesh_headers
from meshwire.http_values.mesh_headers import (
    FRAME_SERIES_HEADER,
    SAMPLE_CACHE_HEADER,
    parse_sample_cache,
    parse_series,
)
from meshwire.strict_json import PlanError, checked_choice, suggestion

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meshd.auth.identity import Identity
    from meshd.batches.gather import GatherService
    from meshd.batches.read_ahead.cost_estimator import ReadCostEstimator
    from meshd.batches.read_ahead.default_order import DefaultOrders
    from meshd.batches.row_draws import RowDraws, RowSources
    from meshd.batches.service import BatchService
    from meshd.cluster.cluster_view import ClusterView
    from meshd.core.frame_address import Frame
    from meshd.datasets.service import DatasetService
    from meshd.server.local_handover import LocalFrameService
    from meshd.server.request import MeshRequest, RequestTrace
    from meshd.server.response import Header
    from meshd.util.clock import Clock
    from meshd.views.definitions import ViewDefinitions

_log = logging.getLogger(__name__)
MAX_CONCURRENT_REQUESTS = 32
"""Snapshots, plans, views and op trials that one worker makes concurrently."""
MAX_STREAM_BYTES = 512 << 20
STREAM_BYTES = 1 << 20
"""Bytes that a stream of blobs buffers for its client, here and in the kernel."""
_ITEM_FACTOR = 30  # bytes of memory per byte of a gather's body (measured): items, records, locations
_ROW_BYTES = 1 << 11
_STREAMS = "streams of samples"
_HASH = re.compile(r"[0-9a-f]{64}")
_NUMBERS = {"rank": 0, "world": 1, "batch": 256, "origin": 0}
_QUERY = (*_NUMBERS, "format", "share", "part")
_FORMATS = ("tensors", "samples", "tar")
_MAX_PARAMETERS = 64
_NUMBER = re.compile(r"[0-9]{1,18}")

Handler = Callable[["MeshRequest", "Identity"], Awaitable["Reply"]]


class BatchEndpoint:
    """The batch API. One instance per worker; its only state is the work in progress, by account. In a
    cluster, replies tell the version of the map of `mesh`; they also tell where the `frame_service` for local
    handover is."""

    def __init__(
        self,
        datasets: DatasetService,
        batches: BatchService,
        gathers: GatherService,
        views: ViewDefinitions,
        read_costs: ReadCostEstimator,
        orders: DefaultOrders,
        clock: Clock,
        mesh: ClusterView | None = None,
        frame_service: LocalFrameService | None = None,
        row_sources: RowSources | None = None,
        row_draws: RowDraws | None = None,
    ) -> None:
        self._row_sources, self._row_draws = row_sources, row_draws
        self._mesh, self._local_frames = mesh, frame_service
        self._datasets, self._batches, self._gathers = datasets, batches, gathers
        self._views, self._read_costs, self._clock = views, read_costs, clock
        self._orders = orders
        self._works, self._streams = Admission(MAX_CONCURRENT_REQUESTS), Admission(MAX_STREAM_BYTES)

    def __repr__(self) -> str:
        return f"<BatchEndpoint {self._works!r}, {self._streams!r}>"

    def routes(self) -> list[HttpRoute]:
        """Return the routes; all of them require a signature."""
        guarded, bounded = self.handle_errors, self.limit_concurrency
        return [
            HttpRoute("POST", "/-/snapshots", guarded(bounded(self.create_snapshot))),
            HttpRoute("GET", "/-/snapshots/", guarded(self.get_snapshot)),
            HttpRoute("POST", "/-/snapshots/", guarded(bounded(self.post_to_snapshot))),
            HttpRoute("POST", "/-/plans", guarded(bounded(self.create_plan))),
            HttpRoute("GET", "/-/plans/", guarded(self.get_plan)),
            HttpRoute("POST", "/-/plans/", guarded(self.post_rows)),
            HttpRoute("POST", "/-/gather", guarded(self.gather)),
            HttpRoute("POST", "/-/views", guarded(bounded(self.create_view))),
            HttpRoute("GET", "/-/views", guarded(self.list_views)),
            HttpRoute("GET", "/-/views/", guarded(self.get_view)),
        ]

    def limit_concurrency(self, handler: Handler) -> Handler:
        """Bound the concurrency of a handler that holds a thread or much memory. Beyond the bound callers get
        Busy, except those who have less than an even share."""

        @wraps(handler)
        async def bound(request: MeshRequest, identity: Identity) -> Reply:
            with _admission(self._works, identity, 1, "requests of this kind"):
                return await handler(request, identity)

        return bound

    def handle_errors(self, handler: Handler) -> Handler:
        """Turn the errors of a handler into the protocol's documents."""

        @wraps(handler)
        async def guard(request: MeshRequest, identity: Identity) -> Reply:
            refuse = partial(self._refusal, request.trace)
            if request.method == "HEAD":
                return refuse(BatchError("MethodNotAllowed", "HEAD is not supported here; use GET"))
            try:
                return await handler(request, identity)
            except BatchError as error:
                return refuse(error)
            except PlanError as error:
                return refuse(BatchError("BadRequest", str(error), detail={"path": error.path}))
            except tensor_frame.FrameError as error:
                return refuse(BatchError("BadRequest", str(error)))
            except StoreError as error:
                return refuse(store_batch_error(error))

        return guard

    @operation("/-/snapshots", "Pin a dataset", accepts="json")
    async def create_snapshot(self, request: MeshRequest, identity: Identity) -> Reply:
        return self.reply_json(
            await self._datasets.create_snapshot(caller_of(request, identity), await request.read())
        )

    @operation("/-/snapshots/{snapshot}", "A snapshot as it is stored", content="bytes")
    @operation("/-/snapshots/{snapshot}/pages/{page}", "The index of a shard of a snapshot", content="bytes")
    @operation(
        "/-/snapshots/{snapshot}/statistics",
        "Samples of each class, and sizes by powers of two",
        reply=reply_types.Statistics,
    )
    async def get_snapshot(self, request: MeshRequest, identity: Identity) -> Reply:
        digest, *what = _path(request, "/-/snapshots/", 1, 2, 3)
        caller = caller_of(request, identity)
        if len(what) == 2:
            _check_end(request, what[0], "pages")
            page = await self._datasets.page_document(caller, digest, what[1])
            return self._reply(200, build_snapshot.CONTENT_TYPE, page)
        if what:
            _check_end(request, what[0], "statistics")
            snapshot = await self._datasets.snapshot(caller, digest)
            return self.reply_json(await asyncio.to_thread(snapshot_statistics, snapshot))
        document = await self._datasets.snapshot_document(caller, digest)
        return self._reply(200, build_snapshot.CONTENT_TYPE, document)

    @operation("/-/snapshots/{snapshot}/read-cost", "What an order of reading would cost", accepts="json")
    @operation("/-/snapshots/{snapshot}/order", "The order of loaders without shuffle=", accepts="json")
    async def post_to_snapshot(self, request: MeshRequest, identity: Identity) -> Reply:
        digest, what = _path(request, "/-/snapshots/", 2)
        _check_end(request, what, "read-cost", "order")
        answer = self._orders.choose if what == "order" else self._read_costs.estimate
        return self.reply_json(await answer(caller_of(request, identity), digest, await request.read()))

    @operation("/-/plans", "Register what is done with the samples of a snapshot", accepts="json")
    async def create_plan(self, request: MeshRequest, identity: Identity) -> Reply:
        return self.reply_json(
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
        parts = _path(request, "/-/plans/", 1, 2, 3, 4)
        if len(parts) == 1:
            plan = await self._batches.plan(caller_of(request, identity), parts[0])
            note_report(request.headers, plan, identity.user_id, self._now())
            return self.reply_json(plan.describe())
        if len(parts) == 2:
            _check_end(request, parts[1], "bad")
            return self.reply_json(await self._batches.bad_samples(caller_of(request, identity), parts[0]))
        if len(parts) == 4:
            return await self._describe_rows(request, identity, parts)
        return await self._get_frame(request, identity, parts)

    async def _describe_rows(self, request: MeshRequest, identity: Identity, parts: tuple[str, ...]) -> Reply:
        """Answer `/-/plans/PLAN/EPOCH/STEP/sources`, from which objects the rows of a frame are made, and
        `…/draws?row=N`, what the ops drew for one of them."""
        _check_end(request, parts[3], "sources", "draws")
        caller = caller_of(request, identity)
        if parts[3] == "draws" and self._row_draws is not None:
            query = parse_query(request, (*_NUMBERS, "row"))
            row = _number(query.get("row", "0"), "row")
            return self.reply_json(await self._row_draws.describe(caller, _address(parts, query), row))
        assert self._row_sources is not None
        address = _address(parts, parse_query(request, tuple(_NUMBERS)))
        return self.reply_json(await self._row_sources.describe(caller, address))

    async def _get_frame(self, request: MeshRequest, identity: Identity, parts: tuple[str, ...]) -> Reply:
        query = parse_query(request, _QUERY)
        form = checked_choice(query.get("format", "tensors"), "format", _FORMATS)
        address = _address(parts, query)
        if request.headers.get(mesh_headers.LOADER_REPORT_HEADER):
            plan = await self._batches.plan(caller_of(request, identity), address.plan)
            note_report(request.headers, plan, identity.user_id, self._now(), address)
        tracing.add_attributes(
            {"shardmesh.plan": parts[0], "shardmesh.epoch": address.epoch, "shardmesh.step": address.step}
        )
        if form != "tensors":
            make = self._batches.samples if form == "samples" else self._batches.tar
            rows = max(1, address.batch) // max(1, address.world)
            with _admission(self._streams, identity, STREAM_BYTES + rows * _ROW_BYTES, _STREAMS):
                return await send_stream(
                    request,
                    await make(caller_of(request, identity), address),
                    self._now(),
                    self.location_headers(),
                )
        frames = await self._tensors(request, caller_of(request, identity), address, query)
        if len(frames) > 1:
            return await send_frames(
                request, frames, self._now(), self.location_headers(), self._local_frames
            )
        return await send_frame(request, frames[0], self._now(), self.location_headers(), self._local_frames)

    async def _tensors(
        self, request: MeshRequest, caller: Caller, address: FrameAddress, query: Mapping[str, str]
    ) -> list[Frame]:
        """Return the frame of the address, and of further steps if the client asks for them."""
        kept_bytes = parse_sample_cache(request.headers.get(SAMPLE_CACHE_HEADER))
        if "part" in query:
            version = _number(query["part"], "part")
            return [await self._batches.get_part(caller, address, version, kept_bytes)]
        share = query.get("share", "")
        count = parse_series(request.headers.get(FRAME_SERIES_HEADER))
        if count == 1 or "range" in request.headers:
            return [await self._batches.get_frame(caller, address, share=share, kept_bytes=kept_bytes)]
        return await self._batches.get_frames(caller, address, count, share=share, kept_bytes=kept_bytes)

    @operation(
        "/-/plans/{plan}/rows",
        "Chosen samples, in the requested order",
        query=("epoch",),
        accepts="json",
        content="bytes",
    )
    async def post_rows(self, request: MeshRequest, identity: Identity) -> Reply:
        digest, what = _path(request, "/-/plans/", 2)
        _check_end(request, what, "rows")
        epoch = _number(parse_query(request, ("epoch",)).get("epoch", "0"), "epoch")
        frame = await self._batches.get_rows(
            caller_of(request, identity), digest, epoch, await request.read()
        )
        return await send_frame(request, frame, self._now(), self.location_headers(), self._local_frames)

    @operation("/-/gather", "Many ranges and objects in one stream", accepts="json", content="bytes")
    async def gather(self, request: MeshRequest, identity: Identity) -> Reply:
        body = await request.read()
        with _admission(self._streams, identity, STREAM_BYTES + len(body) * _ITEM_FACTOR, _STREAMS):
            outgoing = await self._gathers.gather(caller_of(request, identity), body)
            return await send_stream(request, outgoing, self._now(), self.location_headers())

    @operation("/-/views", "Create a view, or confirm that it is there", accepts="json")
    async def create_view(self, request: MeshRequest, identity: Identity) -> Reply:
        return self.reply_json(await self._views.create(caller_of(request, identity), await request.read()))

    @operation("/-/views", "The views of the caller", query=("bucket",), reply=reply_types.Views)
    async def list_views(self, request: MeshRequest, identity: Identity) -> Reply:
        bucket = parse_query(request, ("bucket",)).get("bucket", "")
        return self.reply_json({"views": self._views.list_all(caller_of(request, identity), bucket)})

    @operation("/-/views/{view}", "A view", reply=reply_types.View)
    async def get_view(self, request: MeshRequest, identity: Identity) -> Reply:
        name = request.raw_path.partition("?")[0].removeprefix("/-/views/")
        return self.reply_json(self._views.describe(caller_of(request, identity), name))

    def _now(self) -> int:
        return self._clock.now_ms() // 1000

    def reply_json(self, document: Any) -> Reply:
        """Return a JSON reply."""
        return self._reply(200, "application/json", json.dumps(document).encode())

    def _reply(self, status: int, content_type: str, body: bytes, *more: Header) -> Reply:
        headers = [*entity_headers(content_type, len(body)), *self.location_headers(), *more]
        return Reply(status, headers, body, self._now())

    def location_headers(self) -> list[Header]:
        """Return the headers that tell the SDK the cluster map's version, and jobs on this host where to get
        frames."""
        headers = [] if self._mesh is None else map_headers(self._mesh)
        return headers if self._local_frames is None else [*headers, self._local_frames.location_header]

    def _refusal(self, trace: RequestTrace, error: BatchError) -> Reply:
        trace.code, request_id = error.code, trace.request_id
        document = {
            "code": error.code,
            "message": error.message,
            "request_id": request_id,
            "detail": error.detail,
            "help": error.help,
        }
        if error.code == "InternalError":
            _log.error("%s (request %s)", error.message, request_id)
        more: list[Header] = [
            ("x-amz-request-id", request_id),
            (mesh_headers.RELEASE_HEADER, mesh_headers.RELEASE),
        ]
        if error.retry_after is not None:
            more.append(("Retry-After", str(error.retry_after)))
        body = json.dumps({"error": document}).encode()
        return self._reply(STATUS[error.code], "application/json", body, *more)


def _address(parts: tuple[str, ...], query: Mapping[str, str]) -> FrameAddress:
    numbers = {name: _number(query.get(name, str(default)), name) for name, default in _NUMBERS.items()}
    return FrameAddress(parts[0], _number(parts[1], "epoch"), _number(parts[2], "step"), **numbers)


@contextmanager
def _admission(room: Admission, identity: Identity, units: int, what: str) -> Iterator[None]:
    """Hold capacity while a request is answered. Raises BatchError Busy."""
    try:
        room.admit(identity.account, units)
    except AdmissionRejectedError as error:
        raise busy(f"this process of the node is handling too many {what}") from error
    try:
        yield
    finally:
        room.release(identity.account, units)


def caller_of(request: MeshRequest, identity: Identity) -> Caller:
    """Return the caller: the identity and the request's context."""
    return Caller(identity, getattr(request, "context", None) or NO_CONTEXT)


def _path(request: MeshRequest, prefix: str, *counts: int) -> tuple[str, ...]:
    """Return the parts of the path after `prefix`; the first part is a hash. Raises BatchError NoSuchKey,
    BadRequest.
    """
    parts = tuple(request.raw_path.partition("?")[0].removeprefix(prefix).split("/"))
    if len(parts) not in counts:
        raise BatchError("NoSuchKey", f"there is nothing at {request.raw_path[:200]}")
    if not _HASH.fullmatch(parts[0]):
        raise BatchError("BadRequest", f"{parts[0][:80]!r} is not a hash of 64 lower-case hex digits")
    return parts


def _check_end(request: MeshRequest, given: str, *known: str) -> None:
    """Raise BatchError NoSuchKey unless the last part of a path is a known one."""
    if given not in known:
        raise BatchError("NoSuchKey", f"there is nothing at {request.path[:200]}")


def parse_query(request: MeshRequest, known: tuple[str, ...]) -> dict[str, str]:
    """Return the query without its signature. Raises BatchError BadRequest for an unknown parameter."""
    raw = request.raw_path.partition("?")[2]
    if raw.count("&") > _MAX_PARAMETERS:
        raise BatchError("BadRequest", f"more than {_MAX_PARAMETERS} query parameters")
    pairs = [pair for pair in parse_qsl(raw, keep_blank_values=True) if not _of_signature(pair[0])]
    query = dict(pairs)
    if len(query) != len(pairs):
        raise BatchError("BadRequest", "a query parameter is given twice")
    for name in query:
        if name not in known:
            raise BatchError("BadRequest", f"unknown query parameter {name[:80]!r}{suggestion(name, known)}")
    return query


def _of_signature(name: str) -> bool:
    return name.lower().startswith("x-amz-")


def _number(text: str, name: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise BatchError("BadRequest", f"{name} must be a number from 0 on, got {text[:80]!r}")
    return int(text)
