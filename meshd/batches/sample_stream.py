"""Streams source bytes in order, as a frame of samples or as a tar.

Law: sizes are announced before the bytes; memory is bounded by one group of blobs. A late read failure
is flagged in the trailer of a frame, and closes the connection of a tar. It never yields an empty sample
or other bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from meshd.batches.blob_reader import read_blobs
from meshd.core.remote_source import SINGLE_NODE
from meshd.store.records import Span
from meshwire.formats.tar import END, padding, tar_member_header
from meshwire.frame import sample_frames
from meshwire.frame.tensor_frame import Status

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from meshd.core.remote_source import ObjectRange, RemoteSource
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record

Chunk = bytes | memoryview | Sequence[Span]
"""Bytes, or ranges of open files."""
TAR_TYPE = "application/x-tar"
TAG_KEY = "SHARDMESH.tag"


class Blob(msgspec.Struct, frozen=True):
    """One item of a stream: `length` bytes at `offset` of an object, `data` itself, or a remote `part`.

    `error`: an error code; the blob is then empty.
    `status`: the status in the trailer if the bytes can be read.
    """

    name: str
    length: int
    record: Record | None = None
    offset: int = 0
    data: bytes = b""
    status: int = 0
    error: str = ""
    part: ObjectRange | None = None


@dataclass(frozen=True, slots=True)
class StreamBody:
    """A response body: `chunks` yields exactly `size` bytes.

    Each chunk is valid until the next one is requested.
    """

    content_type: str
    size: int
    rows: int
    chunks: AsyncGenerator[Chunk, None]


class UnreadableError(Exception):
    """Announced bytes cannot be read any more; the connection must be closed."""


def samples_body(
    store: ObjectStore,
    blobs: Sequence[Blob],
    metadata: Mapping[str, str],
    rows: int,
    *,
    names: bool = True,
    direct: bool = True,
    elsewhere: RemoteSource = SINGLE_NODE,
) -> StreamBody:
    """Return a frame of samples, with the names of the blobs if `names` is set. Raises FrameError.

    Without `direct`, large objects are compared with their checksums, too.
    """
    layout = sample_frames.sample_layout(
        [blob.length for blob in blobs], metadata, [blob.name for blob in blobs] if names else None
    )
    chunks = _sample_chunks(store, blobs, layout, elsewhere, direct=direct)
    return StreamBody(sample_frames.CONTENT_TYPE, layout.size, rows, chunks)


async def _sample_chunks(
    store: ObjectStore,
    blobs: Sequence[Blob],
    layout: sample_frames.SampleLayout,
    elsewhere: RemoteSource,
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


def tar_body(
    store: ObjectStore,
    blobs: Sequence[Blob],
    rows: int,
    tags: Sequence[str] = (),
    elsewhere: RemoteSource = SINGLE_NODE,
) -> StreamBody:
    """Return a tar of the blobs. A blob with an error becomes a member `NAME.error` that holds the code.

    `tags`: a text per blob for its pax header, "" for none; an empty sequence if no blob has one.
    """
    members = [_tar_member(blob) for blob in blobs]
    headers = [
        tar_member_header(blob.name, blob.length, pax={TAG_KEY: tag} if tag else {})
        for blob, tag in zip(members, tags or [""] * len(members), strict=True)
    ]
    rooms = [
        len(header) + blob.length + padding(blob.length)
        for header, blob in zip(headers, members, strict=True)
    ]
    chunks = _tar_chunks(store, members, headers, rooms, elsewhere)
    return StreamBody(TAR_TYPE, sum(rooms) + len(END), rows, chunks)


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
    elsewhere: RemoteSource,
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
