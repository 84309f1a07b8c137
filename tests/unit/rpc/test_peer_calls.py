"""The calls between nodes as they are declared: the wire of earlier releases, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from meshd.cluster.rebalance import sync_source
from meshd.cluster.rebalance.sync_source import RebalanceHandlers
from meshd.cluster.replication.batched_puts import FORWARD_PUTS, ForwardedPutHandler
from meshd.cluster.replication.forwarded_writes import (
    FORWARD_REQUEST,
    FORWARD_WRITE,
    AbortUploadRequest,
    ForwardedData,
    ForwardedWriteHandlers,
)
from meshd.cluster.replication.primary_handover import HAND_OVER, HandedName, HandoverHandler
from meshd.cluster.replication.replica_handlers import ReplicaHandlers
from meshd.cluster.replication.replicator import (
    APPLY_CHANGE,
    RECEIVE_BATCH,
    RECEIVE_DATA,
    ReplicaData,
)
from meshd.core import peer_messages
from meshd.core.frame_address import FrameAddress
from meshd.core.peer_messages import DocumentName
from meshd.jobs.output_store import (
    LOOKUP_OUTPUTS,
    REMOVE_OUTPUTS,
    WRITE_OUTPUT,
    JobOutputHandlers,
    OutputName,
)
from meshd.objects.buckets.service import ANNOUNCE_CHANGES, DROP_UPLOADS, BucketHandlers
from meshd.origins.cache.peer_cache import FETCH_PIECE, PeerCacheServer
from meshd.origins.listing import READ_WRITE_MARK, WriteMarks
from meshd.origins.prefetch_worker import PREFETCH, PrefetchWorker
from meshd.origins.write_back import IS_FINISHED
from meshd.origins.write_back_routing import WRITE_BACK, WriteBackHandlers
from meshd.peer_reads.listing import LIST_PAGE, LocalListings
from meshd.peer_reads.resume_read import ResumeSource
from meshd.reads.copy_source import FIND_SOURCE, READ_SOURCE, SOURCE_EXISTS, CopySourceHandlers
from meshd.reads.peer_read_service import FrameHandlers, PeerReadService
from meshd.rpc.peer_rpc import (
    IN_QUERY,
    BodyFramingError,
    MalformedResponseError,
    PeerCall,
    ResponseStream,
    registered_handlers,
)
from meshd.store.records import EntryPage
from meshd.views.transform_results import ViewResultHandlers
from meshwire.errors import S3Error

SERVICES = (
    BucketHandlers, CopySourceHandlers, ForwardedPutHandler, ForwardedWriteHandlers, FrameHandlers,
    HandoverHandler,
    JobOutputHandlers, LocalListings, PeerCacheServer, PeerReadService, PrefetchWorker, RebalanceHandlers,
    ReplicaHandlers, ResumeSource, ViewResultHandlers, WriteBackHandlers, WriteMarks,
)  # fmt: skip
WIRE: dict[str, PeerCall[Any, Any]] = {
    "POST heard": ANNOUNCE_CHANGES,
    "POST uploads/drop": DROP_UPLOADS,
    "POST listings": LIST_PAGE,
    "POST sources/find": FIND_SOURCE,
    "POST sources/read": READ_SOURCE,
    "POST sources/stat": SOURCE_EXISTS,
    "POST objects/read": peer_messages.READ_PARTS,
    "POST objects/load": peer_messages.LOAD_PARTS,
    "POST objects/rest": peer_messages.RESUME_READ,
    "POST objects/find": peer_messages.FIND_RECORDS,
    "POST objects/list": peer_messages.LIST_RECORDS,
    "POST objects/changes": peer_messages.READ_CHANGES,
    "POST archives/index": peer_messages.READ_INDEX,
    "POST pages": peer_messages.READ_PAGE,
    "POST paged-kinds": peer_messages.READ_PAGED_KINDS,
    "POST frames": peer_messages.READ_FRAME,
    "GET documents/": peer_messages.READ_DOCUMENT,
    "PUT documents/": peer_messages.STORE_DOCUMENT,
    "POST kept": peer_messages.LIST_DOCUMENTS,
    "POST views/made": peer_messages.MAKE_VIEW_RESULT,
    "POST replica/change": APPLY_CHANGE,
    "POST replica/bytes": RECEIVE_DATA,
    "POST replica/many": RECEIVE_BATCH,
    "POST replica/handover": HAND_OVER,
    "POST replica/decide": FORWARD_REQUEST,
    "POST replica/write": FORWARD_WRITE,
    "POST replica/write-many": FORWARD_PUTS,
    "POST moves/digests": sync_source.READ_DIGESTS,
    "POST moves/inventory": sync_source.READ_INVENTORY,
    "POST moves/documents": sync_source.LIST_DOCUMENTS,
    "POST moves/fetch": sync_source.FETCH_ITEMS,
    "POST origins/quiet": IS_FINISHED,
    "POST origins/bring": WRITE_BACK,
    "POST origins/lend": FETCH_PIECE,
    "POST origins/warm": PREFETCH,
    "POST origin-mark": READ_WRITE_MARK,
    "POST outputs/lookup": LOOKUP_OUTPUTS,
    "POST outputs/write": WRITE_OUTPUT,
    "POST outputs/remove": REMOVE_OUTPUTS,
}


def _registered() -> list[PeerCall[Any, Any]]:
    return [each.call for kind in SERVICES for each in registered_handlers(kind.__new__(kind))]


def test_the_wire_is_that_of_earlier_releases() -> None:
    assert {f"{call.method} {call.path.removeprefix('/-/peer/')}": call for call in WIRE.values()} == WIRE
    assert [call for call in WIRE.values() if call.pool] == [
        sync_source.READ_DIGESTS,
        sync_source.READ_INVENTORY,
        sync_source.LIST_DOCUMENTS,
        sync_source.FETCH_ITEMS,
    ]
    assert {call.pool for call in WIRE.values()} == {"", "moves"}


def test_every_call_has_one_handler() -> None:
    assert sorted(map(id, _registered())) == sorted(map(id, WIRE.values()))


@pytest.mark.parametrize(
    ("call", "request_", "target"),
    [
        (HAND_OVER, HandedName("b", "ä b/c&d"), "replica/handover?bucket=b&key=%C3%A4+b%2Fc%26d"),
        (RECEIVE_DATA, ReplicaData("b", "", 0), "replica/bytes?bucket=b&key=&size=0"),
        (FORWARD_WRITE, ForwardedData("b", "k", 7), "replica/write?bucket=b&key=k&size=7"),
        (
            FORWARD_WRITE,
            ForwardedData("b", "k", 7, "12", 3),
            "replica/write?bucket=b&key=k&size=7&upload=12&number=3",
        ),
        (WRITE_OUTPUT, OutputName("b", "a b/ü", -1), "outputs/write?bucket=b&key=a%20b%2F%C3%BC&size=-1"),
        (peer_messages.READ_DOCUMENT, DocumentName("plans/ä b?"), "documents/plans/%C3%A4%20b%3F"),
        (peer_messages.STORE_DOCUMENT, DocumentName("plans/a"), "documents/plans/a"),
        (peer_messages.STORE_DOCUMENT, DocumentName("plans/a", again=True), "documents/plans/a?again"),
    ],
)
def test_requests_in_targets(call: PeerCall[Any, Any], request_: object, target: str) -> None:
    assert call.encode_request(request_) == (f"/-/peer/{target}", b"")
    assert call.decode_request(f"/-/peer/{target}", b"") == request_


@pytest.mark.parametrize(
    ("call", "request_", "body"),
    [
        (ANNOUNCE_CHANGES, {"buckets": 7}, msgspec.msgpack.encode({"buckets": 7})),
        (DROP_UPLOADS, "b", b"\xa1b"),
        (READ_WRITE_MARK, b"b", b"b"),
        (
            FORWARD_REQUEST,
            AbortUploadRequest("b", "k", "u"),
            msgspec.msgpack.encode({"type": "abort", "bucket": "b", "key": "k", "upload_id": "u"}),
        ),
        (peer_messages.READ_FRAME, FrameAddress("p", 1, 2), msgspec.msgpack.encode(FrameAddress("p", 1, 2))),
    ],
)
def test_requests_in_bodies(call: PeerCall[Any, Any], request_: object, body: bytes) -> None:
    assert call.encode_request(request_) == (call.path, body)
    assert call.decode_request(call.path, body) == request_


def test_responses() -> None:
    assert IS_FINISHED.decode_response(b"\xc3") is True
    assert HAND_OVER.decode_response(b"") is None
    assert SOURCE_EXISTS.decode_response(b"1") == b"1"
    page = EntryPage((), truncated=False)
    assert LIST_PAGE.returning(EntryPage).decode_response(msgspec.msgpack.encode(page)) == page
    with pytest.raises(MalformedResponseError, match="malformed peer message from /-/peer/origins/quiet"):
        IS_FINISHED.decode_response(b"\x07")
    assert issubclass(MalformedResponseError, BodyFramingError)  # callers handle both alike


@pytest.mark.parametrize("call", [call for call in WIRE.values() if call.request is not bytes])
def test_malformed_requests_are_refused(call: PeerCall[Any, Any]) -> None:
    if call.target is not None and call.target is not IN_QUERY and call is not WRITE_OUTPUT:
        return  # every path is the name of a document
    for body in (b"\xc1", b"", b"\x07"):
        with pytest.raises(S3Error, match="malformed peer message: ") as refused:
            call.decode_request(call.path + "?size=x", body)
        assert refused.value.status == 400


def test_a_call_is_for_nodes() -> None:
    with pytest.raises(ValueError, match="not under"):
        PeerCall("/-/elsewhere", request=bytes, response=ResponseStream)
