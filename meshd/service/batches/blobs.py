"""Source bytes on their way out, in order: as a frame of samples, or as a tar.

Law: sizes are promised first; memory is bounded by one group of blobs. What fails late is marked in a frame's
trailer, and in a tar ends the connection: never an empty sample, never other bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from meshd.assembly.elsewhere import ALONE
from meshd.service.batches.blobreading import read_blobs
from meshd.store.records import Span
from meshwire import sampleframes
from meshwire.frames import Status
from meshwire.tars import END, member_header, padding

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from meshd.assembly.elsewhere import Elsewhere, Part
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record

Chunk = bytes | memoryview | Sequence[Span]
"""Bytes, or ranges of open files."""
TAR_TYPE = "application/x-tar"
TAG_KEY = "SHARDMESH.tag"


class Blob(msgspec.Struct, frozen=True):
    """`length` bytes at `offset` of an object, or `data` itself, or a `part` that other nodes hold.
    `error`: a code; the blob is then empty.

    `status`: what the trailer says when the bytes were read.
    """

    name: str
    length: int
    record: Record | None = None
    offset: int = 0
    data: bytes = b""
    status: int = 0
    error: str = ""
    part: Part | None = None


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A body to be sent: exactly `size` bytes come out of `chunks`, each valid until the next is asked
    for."""

    content_type: str
    size: int
    rows: int
    chunks: AsyncGenerator[Chunk, None]


class UnreadableError(Exception):
    """Bytes that were promised cannot be read any more; the connection must be closed."""


def as_samples(
    store: ObjectStore,
    blobs: Sequence[Blob],
    metadata: Mapping[str, str],
    rows: int,
    *,
    names: bool = True,
    direct: bool = True,
    elsewhere: Elsewhere = ALONE,
) -> Outgoing:
    """A frame of samples, with the blobs' names if wanted. Without `direct` large objects are compared with
    their checksums, too. Raises FrameError."""
    layout = sampleframes.sample_layout(
        [blob.length for blob in blobs], metadata, [blob.name for blob in blobs] if names else None
    )
    chunks = _sample_chunks(store, blobs, layout, elsewhere, direct=direct)
    return Outgoing(sampleframes.CONTENT_TYPE, layout.size, rows, chunks)


async def _sample_chunks(
    store: ObjectStore,
    blobs: Sequence[Blob],
    layout: sampleframes.SampleLayout,
    elsewhere: Elsewhere,
    *,
    direct: bool,
) -> AsyncGenerator[Chunk, None]:
    status = np.array([Status.FAILED if blob.error else blob.status for blob in blobs], dtype=np.uint8)
    sums = np.zeros(len(blobs), dtype=np.uint32)
    at = len(layout.head)
    yield layout.head
    starts = layout.places[:, 0].tolist()
    async for group in read_blobs(store, blobs, starts, at, direct=direct, elsewhere=elsewhere):
        for number in group.failed:
            status[number] = Status.FAILED
        for number, value in group.sums.items():
            sums[number] = value
        at = group.end
        yield group.spans or group.data
    yield bytes(layout.trailer - at) + layout.trailer_bytes(status, sums)


def as_tar(
    store: ObjectStore,
    blobs: Sequence[Blob],
    rows: int,
    tags: Sequence[str] = (),
    elsewhere: Elsewhere = ALONE,
) -> Outgoing:
    """A tar of the blobs; one with an error becomes a member `NAME.error` that holds its code. `tags`: for
    each blob a text that its pax header carries, "" for none; or nothing at all."""
    members = [_tar_member(blob) for blob in blobs]
    headers = [
        member_header(blob.name, blob.length, pax={TAG_KEY: tag} if tag else {})
        for blob, tag in zip(members, tags or [""] * len(members), strict=True)
    ]
    rooms = [
        len(header) + blob.length + padding(blob.length)
        for header, blob in zip(headers, members, strict=True)
    ]
    chunks = _tar_chunks(store, members, headers, rooms, elsewhere)
    return Outgoing(TAR_TYPE, sum(rooms) + len(END), rows, chunks)


def _tar_member(blob: Blob) -> Blob:
    if not blob.error:
        return blob
    text = blob.error.encode()
    return Blob(f"{blob.name}.error", len(text), data=text)


async def _tar_chunks(
    store: ObjectStore,
    blobs: Sequence[Blob],
    headers: Sequence[bytes],
    rooms: Sequence[int],
    elsewhere: Elsewhere,
) -> AsyncGenerator[Chunk, None]:
    ends = list(accumulate(rooms))
    starts = [end - room + len(header) for end, room, header in zip(ends, rooms, headers, strict=True)]
    at = begun = 0
    async for group in read_blobs(store, blobs, starts, 0, elsewhere=elsewhere):
        if group.failed:
            raise UnreadableError(f"{blobs[group.failed[0]].name} cannot be read any more")
        while begun < len(headers) and starts[begun] <= group.end:
            head = starts[begun] - len(headers[begun]) - at
            group.data[head : starts[begun] - at] = headers[begun]
            begun += 1
        at = group.end
        yield group.data
    tail = bytearray(ends[-1] - at if ends else 0)
    for number in range(begun, len(headers)):
        head = starts[number] - len(headers[number]) - at
        tail[head : starts[number] - at] = headers[number]
    yield bytes(tail) + END
