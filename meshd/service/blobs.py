"""Source bytes on their way out, in order: as a frame of samples, or as a tar.

Law: sizes are promised first; memory is bounded by one group of blobs; bytes are read by a thread. What
fails late is marked in a frame's trailer, and in a tar ends the connection: never an empty sample, never
other bytes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from awscrt.checksums import crc32c

from meshd.store.errors import StoreError
from meshwire import sampleframes
from meshwire.frames import Status
from meshwire.tars import END, member_header, padding

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record, Span

_log = logging.getLogger(__name__)
_GROUP = 1 << 20
TAR_TYPE = "application/x-tar"


@dataclass(frozen=True, slots=True)
class Blob:
    """`length` bytes at `offset` of an object, or `data` itself. `error`: a code; the blob is then empty.

    `status`: what the trailer says when the bytes were read.
    """

    name: str
    length: int
    record: Record | None = None
    offset: int = 0
    data: bytes = b""
    status: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A body to be sent: exactly `size` bytes come out of `chunks`."""

    content_type: str
    size: int
    rows: int
    chunks: AsyncIterator[bytes]


class UnreadableError(Exception):
    """Bytes that were promised cannot be read any more; the connection must be closed."""


def as_samples(store: ObjectStore, blobs: Sequence[Blob], metadata: Mapping[str, str], rows: int) -> Outgoing:
    """A frame of samples with the blobs' names. Raises FrameError."""
    layout = sampleframes.sample_layout(
        [blob.length for blob in blobs], metadata, [blob.name for blob in blobs]
    )
    return Outgoing(sampleframes.CONTENT_TYPE, layout.size, rows, _sample_chunks(store, blobs, layout))


async def _sample_chunks(
    store: ObjectStore, blobs: Sequence[Blob], layout: sampleframes.SampleLayout
) -> AsyncIterator[bytes]:
    status = np.array([Status.FAILED if blob.error else blob.status for blob in blobs], dtype=np.uint8)
    sums = np.zeros(len(blobs), dtype=np.uint32)
    starts = layout.places[:, 0].tolist()
    at = len(layout.head)
    yield layout.head
    async for group in _read(store, blobs):
        out = []
        for piece in group:
            gap = max(0, starts[piece.number] - at)  # up to the blob's alignment
            out += [bytes(gap), piece.data]
            at += gap + len(piece.data)
            sums[piece.number] = crc32c(piece.data, int(sums[piece.number]))
            if not piece.read:
                status[piece.number] = Status.FAILED
        yield b"".join(out)
    yield bytes(layout.trailer - at) + layout.trailer_bytes(status, sums)


def as_tar(store: ObjectStore, blobs: Sequence[Blob], rows: int) -> Outgoing:
    """A tar of the blobs; one with an error becomes a member `NAME.error` that holds its code."""
    members = [_tar_member(blob) for blob in blobs]
    headers = [member_header(blob.name, blob.length) for blob in members]
    size = sum(len(header) for header in headers) + len(END)
    size += sum(blob.length + padding(blob.length) for blob in members)
    return Outgoing(TAR_TYPE, size, rows, _tar_chunks(store, members, headers))


def _tar_member(blob: Blob) -> Blob:
    if not blob.error:
        return blob
    text = blob.error.encode()
    return Blob(f"{blob.name}.error", len(text), data=text)


async def _tar_chunks(
    store: ObjectStore, blobs: Sequence[Blob], headers: Sequence[bytes]
) -> AsyncIterator[bytes]:
    begun = 0
    async for group in _read(store, blobs):
        out = []
        for piece in group:
            while begun <= piece.number:
                out += [_padding_before(blobs, begun), headers[begun]]
                begun += 1
            if not piece.read:
                raise UnreadableError(f"{blobs[piece.number].name} cannot be read any more")
            out.append(piece.data)
        yield b"".join(out)
    rest = [
        part
        for number in range(begun, len(blobs))
        for part in (_padding_before(blobs, number), headers[number])
    ]
    yield b"".join([*rest, _padding_before(blobs, len(blobs)), END])


def _padding_before(blobs: Sequence[Blob], number: int) -> bytes:
    return bytes(padding(blobs[number - 1].length)) if number else b""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a blob, at most a group long: `offset` counts from the blob's beginning."""

    number: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """The bytes of a part; zeros when `read` is False."""

    number: int
    data: bytes
    read: bool


def _parts(blobs: Sequence[Blob]) -> Iterator[_Part]:
    for number, blob in enumerate(blobs):
        for offset in range(0, blob.length, _GROUP):
            yield _Part(number, offset, min(_GROUP, blob.length - offset))


async def _read(store: ObjectStore, blobs: Sequence[Blob]) -> AsyncIterator[list[_Piece]]:
    """All blobs' bytes in order, about a megabyte at a time. Empty blobs give nothing."""
    group: list[_Part] = []
    size = 0
    for part in _parts(blobs):
        group.append(part)
        size += part.length
        if size >= _GROUP or len(group) >= 256:
            yield await _read_group(store, blobs, group)
            group, size = [], 0
    if group:
        yield await _read_group(store, blobs, group)


async def _read_group(store: ObjectStore, blobs: Sequence[Blob], parts: Sequence[_Part]) -> list[_Piece]:
    with ExitStack() as files:
        sources = [_open(store, blobs[part.number], part, files) for part in parts]
        return await asyncio.to_thread(lambda: [_pread(*pair) for pair in zip(parts, sources, strict=True)])


def _open(store: ObjectStore, blob: Blob, part: _Part, files: ExitStack) -> Sequence[Span] | bytes | None:
    """Where a part's bytes are: open files, or the bytes themselves; None when they are gone."""
    if blob.record is None:
        return blob.data[part.offset : part.offset + part.length]
    try:
        return files.enter_context(store.reading(blob.record, blob.offset + part.offset, part.length))
    except (StoreError, OSError):
        _log.warning("an object went away while it was being sent", exc_info=True)
        return None


def _pread(part: _Part, source: Sequence[Span] | bytes | None) -> _Piece:
    if isinstance(source, bytes):
        return _Piece(part.number, source, read=True)
    try:
        data = b"".join([os.pread(span.fd, span.length, span.offset) for span in source or ()])
    except OSError:
        _log.exception("a data file cannot be read")
        data = b""
    if len(data) == part.length:
        return _Piece(part.number, data, read=True)
    return _Piece(part.number, bytes(part.length), read=False)
