"""File transfers: streamed upload, download and copy, in parallel parts with bounded memory.

Law: a transfer consists of single idempotent requests; a failed part is retried, not the whole file.
Invariant: a file appears under its name only when it is complete (written beside it, then renamed), and
a failed upload is aborted.
"""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, TypeVar

from meshsdk.client.s3_client import (
    crc64,
    explained,
    get_request,
    object_headers,
    object_path,
    query_string,
    read_etag,
    read_info,
    write_conditions,
)
from meshsdk.client.transport import Request, parsed
from meshsdk.errors import ConnectError, MeshError, NotFoundError
from meshwire.http_values import conditional_requests
from meshwire.s3 import xml_documents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from meshsdk.client.http_connection import Buffer, Response
    from meshsdk.client.s3_client import Client, ObjectInfo
    from meshwire.s3.results import CopyResult

    Progress = Callable[[int], None]

T = TypeVar("T")
R = TypeVar("R")
MIB = 1 << 20
MAX_PARTS = 10_000
_ANY: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Tuning:
    """`part` bytes a request; files of more than one part go in several, `parallel` at once: memory is
    `part` × `parallel` for an upload, 1 MiB × `parallel` for a download."""

    part: int = 16 * MIB
    parallel: int = 4


COPYING = Tuning(256 * MIB, 4)
"""Of copies within the store, whose bytes do not pass through here. S3 copies 5 GiB at once at most."""


def _silent(_: int) -> None:
    """No one watches."""


# --- up -------------------------------------------------------------------------------------------


def upload(
    client: Client,
    source: Path | IO[bytes],
    bucket: str,
    key: str,
    *,
    metadata: Mapping[str, str] | None = None,
    content_type: str | None = None,
    tuning: Tuning | None = None,
    progress: Progress = _silent,
    if_absent: bool = False,
    etag: str | None = None,
) -> str:
    """Stores a file or a stream (of any, unknown length); `progress` gets the bytes of each part. Gives the
    ETag. With `if_absent`, PreconditionError if it exists; with `etag`, unless it still has that.
    """
    tuning = tuning or Tuning()
    if isinstance(source, Path):
        with source.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            grown = max(tuning.part, -(-size // MAX_PARTS))
            tuned = Tuning(grown, tuning.parallel)
            return upload(
                client,
                file,
                bucket,
                key,
                metadata=metadata,
                content_type=content_type,
                tuning=tuned,
                progress=progress,
                if_absent=if_absent,
                etag=etag,
            )
    first = _read_full(source, tuning.part)
    if len(first) < tuning.part:
        stored = client.put(
            bucket,
            key,
            first,
            metadata=metadata,
            content_type=content_type,
            if_absent=if_absent,
            etag=etag,
        )
        progress(len(first))
        return stored
    headers, conditions = object_headers(metadata, content_type), write_conditions(etag, if_absent=if_absent)
    parts = _parts(first, source, tuning.part)
    return _upload_parts(client, parts, bucket, key, headers, tuning, progress, conditions)


def _read_full(source: IO[bytes], size: int) -> bytes:
    """`size` bytes, fewer only at the end (a pipe hands out what it has)."""
    pieces = []
    while size and (piece := source.read(size)):
        pieces.append(piece)
        size -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _parts(first: bytes, source: IO[bytes], size: int) -> Iterator[bytes]:
    part = first
    while part:
        yield part
        part = _read_full(source, size)


def _upload_parts(
    client: Client,
    parts: Iterable[bytes],
    bucket: str,
    key: str,
    headers: Mapping[str, str],
    tuning: Tuning,
    progress: Progress,
    conditions: Mapping[str, str],
) -> str:
    upload_id = _create_upload(client, bucket, key, headers)

    def send(number: int, data: bytes) -> tuple[int, str, str]:
        checksum = crc64(data)
        etag = _put_part(client, bucket, key, upload_id, number, data, checksum)
        progress(len(data))
        return number, etag, checksum

    return _finished(client, bucket, key, upload_id, tuning.parallel, send, enumerate(parts, 1), conditions)


def _finished(
    client: Client,
    bucket: str,
    key: str,
    upload_id: str,
    parallel: int,
    send: Callable[[int, T], tuple[int, str, str]],
    parts: Iterable[tuple[int, T]],
    conditions: Mapping[str, str] = _ANY,
) -> str:
    """The ETag of the object, once `send` has stored all parts; the upload is aborted if one fails, or what
    is there does not meet the `conditions`."""
    try:
        stored = _in_parallel(parallel, send, parts)
        return _complete(client, bucket, key, upload_id, stored, conditions)
    except BaseException:
        with contextlib.suppress(MeshError):  # the first failure is the one to tell
            query = query_string(uploadId=upload_id)
            client.transport.text(Request("DELETE", object_path(bucket, key), query))
        raise


def _create_upload(client: Client, bucket: str, key: str, headers: Mapping[str, str]) -> str:
    checked = {**headers, "x-amz-checksum-algorithm": "CRC64NVME", "x-amz-checksum-type": "FULL_OBJECT"}
    request = Request("POST", object_path(bucket, key), "uploads=", checked)
    return parsed(xml_documents.parse_create_upload_result, client.transport.text(request)).upload_id


def _put_part(
    client: Client, bucket: str, key: str, upload_id: str, number: int, data: Buffer, checksum: str
) -> str:
    query = query_string(partNumber=number, uploadId=upload_id)
    headers = {"x-amz-checksum-crc64nvme": checksum}
    return client.transport.call(
        Request("PUT", object_path(bucket, key), query, headers, data, None), read_etag
    )


def _complete(
    client: Client,
    bucket: str,
    key: str,
    upload_id: str,
    stored: Iterable[tuple[int, str, str]],
    conditions: Mapping[str, str],
) -> str:
    parts = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>{conditional_requests.quote_etag(etag)}</ETag>"
        f"<ChecksumCRC64NVME>{checksum}</ChecksumCRC64NVME></Part>"
        for number, etag, checksum in sorted(stored)
    )
    body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
    request = Request(
        "POST",
        object_path(bucket, key),
        query_string(uploadId=upload_id),
        {"content-type": "application/xml", **conditions},
        body,
        None,
    )
    return client.transport.call(request, _read_completed)


def _read_completed(response: Response) -> str:
    return parsed(xml_documents.parse_complete_result, response.read()).etag


def _in_parallel(workers: int, work: Callable[[int, T], R], items: Iterable[tuple[int, T]]) -> list[R]:
    """`work` of every item, `workers` at once and no more items taken than that; raises the first failure."""
    gate = threading.Semaphore(workers)
    failed = threading.Event()

    def run(number: int, item: T) -> R:
        try:
            return work(number, item)
        except BaseException:
            failed.set()
            raise
        finally:
            gate.release()

    with ThreadPoolExecutor(workers, thread_name_prefix="mesh-transfer") as pool:
        futures = []
        gate.acquire()
        for number, item in items:
            if failed.is_set():
                break
            futures.append(pool.submit(run, number, item))
            del item  # a part is held by its worker only
            gate.acquire()
        return [future.result() for future in futures]


# --- within the store ------------------------------------------------------------------------------


def copy(
    client: Client,
    source: tuple[str, str],
    target: tuple[str, str],
    size: int | None = None,
    *,
    tuning: Tuning = COPYING,
    progress: Progress = _silent,
) -> str:
    """Copies (bucket, key) to another; what is larger than a part, in parts of one version. `size` in bytes
    saves a question, if it is known. Gives the ETag.

    Raises PreconditionError when the source changes meanwhile.
    """
    if size is None or size > tuning.part:
        info = client.head(*source)
        if info.size > tuning.part:
            return _copy_parts(client, source, target, info, tuning, progress)
        size = info.size
    etag = client.copy(*source, *target)
    progress(size)
    return etag


def _copy_parts(
    client: Client,
    source: tuple[str, str],
    target: tuple[str, str],
    info: ObjectInfo,
    tuning: Tuning,
    progress: Progress,
) -> str:
    part = max(tuning.part, -(-info.size // MAX_PARTS))
    upload_id = _create_upload(client, *target, object_headers(info.metadata, info.content_type or None))

    def send(number: int, first: int) -> tuple[int, str, str]:
        last = min(first + part, info.size) - 1
        headers = {
            "x-amz-copy-source": object_path(*source),
            "x-amz-copy-source-range": f"bytes={first}-{last}",
            "x-amz-copy-source-if-match": conditional_requests.quote_etag(info.etag),
        }
        query = query_string(partNumber=number, uploadId=upload_id)
        request = Request("PUT", object_path(*target), query, headers)
        made = client.transport.call(request, _read_copied)
        progress(last + 1 - first)
        return number, made.etag, made.checksums["crc64nvme"]

    return _finished(
        client, *target, upload_id, tuning.parallel, send, enumerate(range(0, info.size, part), 1)
    )


def _read_copied(response: Response) -> CopyResult:
    return parsed(xml_documents.parse_copy_result, response.read())


# --- down -----------------------------------------------------------------------------------------


def download(
    client: Client,
    bucket: str,
    key: str,
    path: Path,
    *,
    tuning: Tuning | None = None,
    progress: Progress = _silent,
) -> ObjectInfo:
    """Stores an object as a file, renamed into place when whole; parts of one version, several at once."""
    tuning = tuning or Tuning()
    beside = path.with_name(f".{path.name[:200]}.{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            info = _fetch_first(client, bucket, key, file.fileno(), tuning, progress)
            starts = range(tuning.part, info.size, tuning.part)

            def fetch(start: int, length: int) -> None:
                _fetch_range(client, bucket, key, file.fileno(), start, length, info.etag, progress)

            _in_parallel(
                tuning.parallel, fetch, ((start, min(tuning.part, info.size - start)) for start in starts)
            )
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return info


def _fetch_first(
    client: Client, bucket: str, key: str, descriptor: int, tuning: Tuning, progress: Progress
) -> ObjectInfo:
    """The first part, which says how large the object is and which version of it."""
    try:
        return client.transport.call(
            get_request(bucket, key, 0, tuning.part, None),
            lambda response: _write_body(response, descriptor, 0, progress),
        )
    except NotFoundError as error:
        raise explained(error, bucket, key) from error
    except MeshError as error:
        if getattr(error, "status", 0) != 416:  # an empty object has no first byte
            raise
        return client.head(bucket, key)


def _fetch_range(
    client: Client,
    bucket: str,
    key: str,
    descriptor: int,
    start: int,
    length: int,
    etag: str,
    progress: Progress,
) -> None:
    request = get_request(bucket, key, start, length, etag)
    client.transport.call(request, lambda response: _write_body(response, descriptor, start, progress))


def _write_body(response: Response, descriptor: int, start: int, progress: Progress) -> ObjectInfo:
    done = 0
    if start and response.status != 206:
        raise MeshError("the server ignores byte ranges: give a larger part= to fetch the object in one")
    try:
        for piece in response.pieces(MIB):
            os.pwrite(descriptor, piece, start + done)
            done += len(piece)
            progress(len(piece))
    except BaseException:
        progress(-done)  # it will be asked for again
        raise
    total = response.headers.get("content-range", "").rpartition("/")[2]
    return read_info(response, int(total) if total.isdigit() else done)


def stream(
    client: Client, bucket: str, key: str, *, offset: int = 0, length: int | None = None
) -> Iterator[bytes]:
    """The object's bytes in pieces of 1 MiB, at most one in memory; goes on where a connection broke off,
    with the same version of the object.
    """
    etag: str | None = None
    end = None if length is None else offset + length
    while end is None or offset < end:
        begun = offset
        left = None if end is None else end - offset
        reader = _Streamed(client, bucket, key, offset, left, etag)
        try:
            for piece in reader:
                offset += len(piece)
                yield piece
        except ConnectError:
            if offset == begun:  # not one piece further: the network is gone, not this connection
                raise
            etag = reader.etag
        else:
            return


class _Streamed:
    """The pieces of one GET, on a connection of its own."""

    def __init__(
        self, client: Client, bucket: str, key: str, offset: int, length: int | None, etag: str | None
    ) -> None:
        self.etag: str | None = None
        self._client = client
        self._bucket, self._key = bucket, key
        self._request = get_request(bucket, key, offset, length, etag)

    def __iter__(self) -> Iterator[bytes]:
        response, release = self._open()
        try:
            self.etag = conditional_requests.unquote_etag(response.headers.get("etag", ""))
            for piece in response.pieces(MIB):
                yield bytes(piece)
        finally:
            release()

    def _open(self) -> tuple[Response, Callable[[], None]]:
        try:
            return self._client.transport.open(self._request)
        except NotFoundError as error:
            raise explained(error, self._bucket, self._key) from error
