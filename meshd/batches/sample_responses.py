"""Streams source bytes in order, as a frame of samples or as a tar.

Law: sizes are announced before the bytes; memory is bounded by one group of blobs. A late read failure
is flagged in the trailer of a frame, and closes the connection of a tar. It never yields an empty sample
or other bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from meshd.batches.blob_reader import Blob, read_blobs
from meshd.core.peer_source import SINGLE_NODE
from meshd.store.records import Span
from meshwire.dataset.build_snapshot import LabelColumn
from meshwire.dataset.fields import sample_key
from meshwire.formats.tar import END, padding, tar_member_header
from meshwire.frame import sample_frames
from meshwire.frame.tensor_frame import Status

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    import numpy.typing as npt

    from meshd.core.peer_source import PeerSource
    from meshd.core.sample_locations import PinnedObjects
    from meshd.store.api import ObjectStore
    from meshwire.dataset.build_snapshot import Snapshot

Chunk = bytes | memoryview | Sequence[Span]
"""Bytes, or ranges of open files."""
TAR_TYPE = "application/x-tar"
TAG_KEY = "SHARDMESH.tag"


class StreamBody(msgspec.Struct, frozen=True):
    """A response body: `chunks` yields exactly `size` bytes.

    Each chunk is valid until the next one is requested.
    """

    content_type: str
    size: int
    rows: int
    chunks: AsyncGenerator[Chunk, None]


class UnreadableError(Exception):
    """Announced bytes cannot be read any more; the connection must be closed."""


async def sample_blobs(
    snapshot: Snapshot, pinned: PinnedObjects, samples: npt.NDArray[np.int64], pad: npt.NDArray[np.bool_]
) -> list[Blob]:
    """Return the blobs of samples of a snapshot: sample by sample, the fields ordered by name.

    `pad`: the rows that only fill up the last batch.
    """
    names, blobs = sorted(snapshot.fields), list[Blob]()
    for number, (sample, is_pad) in enumerate(zip(samples.tolist(), pad.tolist(), strict=True)):
        status = int(Status.PAD if is_pad else Status.OK)
        blobs += [_field_blob(snapshot, pinned, sample, name, status) for name in names]
        if number % 500 == 499:
            await asyncio.sleep(0)  # give other requests a turn
    return blobs


def _field_blob(snapshot: Snapshot, pinned: PinnedObjects, sample: int, name: str, status: int) -> Blob:
    column = snapshot.fields[name]
    stem = snapshot.sample_name(sample)
    if isinstance(column, LabelColumn):
        text = str(int(column.values_at(sample))).encode()
        labels = sum(isinstance(other, LabelColumn) for other in snapshot.fields.values())
        return Blob(f"{stem}.{'cls' if labels == 1 else name}", len(text), data=text, status=status)
    number = int(column.objects_at(sample))
    if snapshot.kind == "objects":
        ext = sample_key(snapshot.objects.keys[number])[1]
    else:
        ext = _own_extension(snapshot, name)
    length, offset = int(column.lengths_at(sample)), int(column.offsets_at(sample))
    if pinned.is_remote(number):
        return Blob(f"{stem}.{ext}", length, part=pinned.range_of(number, offset, length), status=status)
    return Blob(f"{stem}.{ext}", length, pinned.record(number), offset, status=status)


def _own_extension(snapshot: Snapshot, name: str) -> str:
    """Return the extension of a field, or its name if several fields have the same extension."""
    if snapshot.specs[name].array is not None:
        return f"{name}.row"
    if not snapshot.specs[name].ext:
        return name
    ext = snapshot.specs[name].ext[0]
    alike = sum(spec.ext[:1] == (ext,) for spec in snapshot.specs.values())
    return ext if alike == 1 else name


def samples_body(
    store: ObjectStore,
    blobs: Sequence[Blob],
    metadata: Mapping[str, str],
    rows: int,
    *,
    names: bool = True,
    direct: bool = True,
    remote: PeerSource = SINGLE_NODE,
) -> StreamBody:
    """Return a frame of samples, with the names of the blobs if `names` is set. Raises FrameError.

    Without `direct`, large objects are compared with their checksums, too.
    """
    layout = sample_frames.sample_layout(
        [blob.length for blob in blobs], metadata, [blob.name for blob in blobs] if names else None
    )
    chunks = _sample_chunks(store, blobs, layout, remote, direct=direct)
    return StreamBody(sample_frames.CONTENT_TYPE, layout.size, rows, chunks)


async def _sample_chunks(
    store: ObjectStore,
    blobs: Sequence[Blob],
    layout: sample_frames.SampleLayout,
    remote: PeerSource,
    *,
    direct: bool,
) -> AsyncGenerator[Chunk, None]:
    status = np.array([Status.FAILED if blob.error else blob.status for blob in blobs], dtype=np.uint8)
    sums = np.zeros(len(blobs), dtype=np.uint32)
    at = len(layout.head)
    yield layout.head
    starts = layout.places[:, 0].tolist()
    async for group in read_blobs(store, blobs, starts, at, direct=direct, remote=remote):
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
    remote: PeerSource = SINGLE_NODE,
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
    chunks = _tar_chunks(store, members, headers, rooms, remote)
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
    remote: PeerSource,
) -> AsyncGenerator[Chunk, None]:
    ends = list(accumulate(rooms))
    starts = [end - room + len(header) for end, room, header in zip(ends, rooms, headers, strict=True)]
    at = begun = 0
    async for group in read_blobs(store, blobs, starts, 0, remote=remote):
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
