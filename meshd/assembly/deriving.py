"""One object derived from another by a program: what a transform view is made of.

Law: a function of the address alone. What cannot be rendered is an error that names the object and the op,
never an empty object.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from meshd.assembly.assets import asset_places
from meshd.assembly.elsewhere import Lost, Part
from meshd.assembly.errors import BatchError, busy, damaged
from meshd.assembly.ledger import BadSample
from meshd.assembly.memory import MemoryFrame
from meshd.assembly.rendering import UNREAD, RowWork
from meshd.assembly.sources import cut_pieces
from meshd.kit.accounts import account
from meshd.store.errors import NotCachedError
from meshd.store.noticing import notice

if TYPE_CHECKING:
    from meshd.assembly.addressing import DerivedAddress
    from meshd.assembly.building import Kitchen
    from meshd.assembly.elsewhere import Fetched
    from meshd.assembly.rendering import Pieces, RaggedPart, Rendered, RowFailure


async def derive(kitchen: Kitchen, address: DerivedAddress) -> MemoryFrame:
    """The derived bytes in shared memory. Raises BatchError: NoSuchKey, SnapshotChanged, BadSample, OpFailed,
    Busy."""
    made = MemoryFrame(0, kitchen.memory)
    try:
        rendered = await _render(kitchen, address, made)
        try:
            _copy(rendered.parts[0], made)
        finally:
            rendered.close()
    except BaseException:
        made.close()
        raise
    made.rows = 1
    return made


async def _render(kitchen: Kitchen, address: DerivedAddress, made: MemoryFrame) -> Rendered:
    rendered = await _render_once(kitchen, address, made)
    if _is_unread(rendered):  # compacted meanwhile: the index knows
        rendered.close()
        rendered = await _render_once(kitchen, address, made)
    if _is_unread(rendered) and kitchen.elsewhere.others_hold(address.bucket, address.key):
        rendered.close()
        _notice(kitchen, address)
        rendered = await _render_once(kitchen, address, made, here=False)
    if rendered.failures:
        failure = rendered.failures[0]
        rendered.close()
        raise await _refusal(kitchen, address, failure)
    return rendered


def _is_unread(rendered: Rendered) -> bool:
    return bool(rendered.failures) and rendered.failures[0].kind in UNREAD


def _notice(kitchen: Kitchen, address: DerivedAddress) -> None:
    """Have damage of this node's own looked at."""
    record = kitchen.store.get(address.bucket, address.key)
    for extent in () if record is None else record.extents:
        notice(extent)


async def _render_once(
    kitchen: Kitchen, address: DerivedAddress, made: MemoryFrame, *, here: bool = True
) -> Rendered:
    pieces, fetched = await _source(kitchen, address, here=here)
    try:
        return await kitchen.renderer.render(
            address.digest,
            address.program,
            0,
            [RowWork(0, address.position, (pieces,))],
            frame_fd=made.fd,
            frame_bytes=0,
            targets=[None],
            assets=asset_places(kitchen.store, address.assets),
            account=account(),
        )
    finally:
        if fetched is not None:
            fetched.close()


async def _source(kitchen: Kitchen, address: DerivedAddress, *, here: bool) -> tuple[Pieces, Fetched | None]:
    """Where the object's bytes lie, and what must stay until they were read. `here`: unless what this node
    has of it is damaged, that."""
    try:
        record = kitchen.store.get(address.bucket, address.key)
    except NotCachedError:  # its bytes are at an origin
        record = None
    here = here and (record is None or not record.broken or kitchen.elsewhere.alone)
    if here and record is not None and record.etag == address.etag:
        return cut_pieces(kitchen.store.locate(record), 0, record.size), None
    name, lost = f"s3://{address.bucket}/{address.key}", Lost("NoSuchKey" if record is None else "")
    if not kitchen.elsewhere.alone:
        whole = Part(address.bucket, address.key, address.etag, -1, 0, -1)
        fetched = await kitchen.elsewhere.fetch([whole], kitchen.memory)
        place = fetched.places[0]
        if not isinstance(place, Lost):
            return ((place.path, place.offset, place.length, place.crc32c),), fetched
        fetched.close()
        lost = place
    if lost.code == "NoSuchKey":
        raise BatchError("NoSuchKey", f"{name} is gone")
    if lost.code in ("Busy", "Unreadable"):
        raise busy(f"{name} cannot be read now: {lost.message}")
    raise BatchError("SnapshotChanged", f"{name} was replaced meanwhile", help="ask again")


def _copy(part: RaggedPart, made: MemoryFrame) -> None:
    """From the transform's scratch file; both are memory."""
    length, at = part.columns[0].lengths[0], 0
    made.grow(length)
    while at < length:
        at += os.pwrite(made.fd, os.pread(part.fd, 1 << 20, at), at)


async def _refusal(kitchen: Kitchen, address: DerivedAddress, failure: RowFailure) -> BatchError:
    name = f"s3://{address.bucket}/{address.key}"
    detail = {"bucket": address.bucket, "key": address.key, "op": failure.op, "node": kitchen.node}
    if failure.kind == "read":
        return busy(f"{name} cannot be read now: {failure.message}")
    if failure.kind == "damaged":
        return damaged(name, failure.message, detail)
    if failure.kind == "op":
        message = f"the op {failure.op!r} broke on {name}: {failure.message}"
        return BatchError("OpFailed", message, help="this is a defect of the op", detail=detail)
    entry = BadSample(f"{address.bucket}/{address.key}", failure.op, failure.message, address.position, 0)
    await kitchen.ledger.record(address.digest, [entry])
    message = f"{name} cannot be transformed: {failure.op}: {failure.message}"
    return BatchError("BadSample", message, help="repair or remove the object", detail=detail)
