"""Renders one object with a program: the result of a transform view.

Law: the result depends on the address alone. If the object cannot be rendered, the error names the
object and the op; the result is never an empty object.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from meshd.batches.assembly.bad_sample_ledger import BadSample
from meshd.core.api_errors import BatchError, busy, damaged
from meshd.core.document_store import asset_places
from meshd.core.memory_frames import MemoryFrame
from meshd.core.peer_source import ObjectRange, ReadFailure
from meshd.core.sample_locations import slice_locations
from meshd.store.errors import NotCachedError
from meshd.store.integrity.verification import report_damaged_object
from meshd.transform.renderer import UNREADABLE_KINDS, RowWork

if TYPE_CHECKING:
    from meshd.batches.assembly.frame_builder import BuildContext
    from meshd.core.frame_address import DerivedAddress
    from meshd.core.peer_source import FetchedRanges
    from meshd.transform.messages import Failure
    from meshd.transform.renderer import RaggedPart, RenderResult
    from meshd.transform.source_files import Pieces


async def render_derived_object(context: BuildContext, address: DerivedAddress) -> MemoryFrame:
    """Return the derived bytes in shared memory.

    Raises BatchError: NoSuchKey, SnapshotChanged, BadSample, OpFailed, Busy.
    """
    made = MemoryFrame(0, context.memory)
    try:
        rendered = await _render(context, address, made)
        try:
            _copy(rendered.parts[0], made)
        finally:
            rendered.close()
    except BaseException:
        made.close()
        raise
    made.rows = 1
    return made


async def _render(context: BuildContext, address: DerivedAddress, made: MemoryFrame) -> RenderResult:
    rendered = await _render_once(context, address, made)
    if _is_unread(rendered):  # compaction may have moved it: look the location up again
        rendered.close()
        rendered = await _render_once(context, address, made)
    if _is_unread(rendered):
        report_damaged_object(context.store.get(address.bucket, address.key))
        if context.remote.has_peer_copies(address.bucket, address.key):
            rendered.close()
            rendered = await _render_once(context, address, made, here=False)
    if rendered.failures:
        failure = rendered.failures[0]
        rendered.close()
        raise await _refusal(context, address, failure)
    return rendered


def _is_unread(rendered: RenderResult) -> bool:
    return bool(rendered.failures) and rendered.failures[0].kind in UNREADABLE_KINDS


async def _render_once(
    context: BuildContext, address: DerivedAddress, made: MemoryFrame, *, here: bool = True
) -> RenderResult:
    pieces, fetched = await _source(context, address, here=here)
    try:
        return await context.renderer.render(
            address.digest,
            address.program,
            0,
            [RowWork(0, address.position, (pieces,))],
            frame_fd=made.fd,
            frame_bytes=0,
            targets=[None],
            assets=asset_places(context.store, address.assets),
        )
    finally:
        if fetched is not None:
            fetched.close()


async def _source(
    context: BuildContext, address: DerivedAddress, *, here: bool
) -> tuple[Pieces, FetchedRanges | None]:
    """Return the location of the bytes of the object, and the ranges to keep open until they are read.

    With `here`, use this node's copy unless it is damaged.
    """
    try:
        record = context.store.get(address.bucket, address.key)
    except NotCachedError:  # its bytes are only at the origin
        record = None
    here = here and (record is None or not record.broken or context.remote.single_node)
    if here and record is not None and record.etag == address.etag:
        length = record.size if address.length is None else address.length
        return slice_locations(context.store.locate(record), address.offset, length), None
    name, lost = f"s3://{address.bucket}/{address.key}", ReadFailure("NoSuchKey" if record is None else "")
    if not context.remote.single_node:
        length = -1 if address.length is None else address.length
        wanted = ObjectRange(address.bucket, address.key, address.etag, -1, address.offset, length)
        fetched = await context.remote.fetch_parts([wanted], context.memory)
        place = fetched.places[0]
        if not isinstance(place, ReadFailure):
            return ((place.path, place.offset, place.length, place.crc32c),), fetched
        fetched.close()
        lost = place
    if lost.code == "NoSuchKey":
        raise BatchError("NoSuchKey", f"{name} no longer exists")
    if lost.final:
        raise damaged(name, lost.message, {"bucket": address.bucket, "key": address.key}, final=True)
    if lost.code in ("Busy", "Unreadable"):
        raise busy(f"{name} cannot be read now: {lost.message}")
    raise BatchError("SnapshotChanged", f"{name} was replaced while it was read", help="retry")


def _copy(part: RaggedPart, made: MemoryFrame) -> None:
    """Copy the result from the transform's scratch file; both files are in memory."""
    length, at = part.columns[0].lengths[0], 0
    made.grow(length)
    while at < length:
        at += os.pwrite(made.fd, os.pread(part.fd, 1 << 20, at), at)


async def _refusal(context: BuildContext, address: DerivedAddress, failure: Failure) -> BatchError:
    name = f"s3://{address.bucket}/{address.key}"
    detail = {"bucket": address.bucket, "key": address.key, "op": failure.op, "node": context.node}
    if failure.kind == "read":
        return busy(f"{name} cannot be read now: {failure.message}")
    if failure.kind == "damaged":
        return damaged(name, failure.message, detail)
    if failure.kind == "op":
        message = f"the op {failure.op!r} failed on {name}: {failure.message}"
        return BatchError("OpFailed", message, help="this is a bug in the op", detail=detail)
    entry = BadSample(f"{address.bucket}/{address.key}", failure.op, failure.message, address.position, 0)
    await context.ledger.record_bad_samples(address.digest, [entry])
    message = f"{name} cannot be transformed: {failure.op}: {failure.message}"
    return BatchError("BadSample", message, help="repair or remove the object", detail=detail)
