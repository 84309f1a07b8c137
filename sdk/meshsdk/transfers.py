"""File transfers: streamed upload, download and copy, in parallel parts with bounded memory.

Law: a transfer consists of idempotent requests; a failed part is retried, not the whole file.
Invariant: a file appears under its name only when it is complete (a temporary file in the same folder is
renamed), and a failed upload is aborted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, TypeVar
from urllib.parse import urlencode

from meshsdk.client import multipart_upload
from meshsdk.client.error_responses import explained, explained_range, parsed
from meshsdk.client.request import (
    Request,
    get_request,
    object_headers,
    object_path,
    write_conditions,
)
from meshsdk.client.verified_reads import (
    VERIFIED_BYTES,
    declared,
    fetch_checksum,
    fetch_first,
    with_checksum,
    write_body,
)
from meshsdk.errors import ConfigurationError, ConnectError, MeshError, NotFoundError, ServerError
from meshwire.http_values import conditional_requests
from meshwire.s3.settings_xml import parse_tagging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from meshsdk.client.http_connection import Response
    from meshsdk.client.multipart_upload import Part
    from meshsdk.client.object_info import ObjectInfo
    from meshsdk.client.s3_client import Client
    from meshsdk.client.verified_reads import ObjectChecksum
    from meshwire.checksums.body_checksums import Hasher

    Progress = Callable[[int], None]

T = TypeVar("T")
R = TypeVar("R")
MIB = 1 << 20
MAX_PARTS = 10_000
_MAX_PART = 5 << 30
_GROWS_AFTER = 1000
"""Parts of a stream after which they double: it may become larger than MAX_PARTS of the first size."""
_ANY: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Tuning:
    """Size and concurrency of transfers.

    A file larger than one part is transferred in several. Memory use is `part` × `parallel` for an upload,
    1 MiB × `parallel` for a download. A stream of unknown length has larger parts after every 1,000, because
    an object has at most 10,000.

    Attributes:
        part: bytes per request.
        parallel: number of concurrent requests.
    """

    part: int = 16 * MIB
    parallel: int = 4


COPYING = Tuning(256 * MIB, 4)
"""For copies within the store, whose bytes do not pass through this process. S3 copies at most 5 GiB per
request."""
COPYING_WHOLE = Tuning(_MAX_PART, 4)
"""In one request wherever S3 does that."""


def _silent(_: int) -> None:
    """Ignore progress; the default."""


# --- upload ---------------------------------------------------------------------------------------


def upload(
    client: Client,
    source: str | os.PathLike[str] | IO[bytes],
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
    """Store a file, or a stream of unknown length, and return the ETag.

    Files of more than one part are uploaded in parts; the object appears when all are stored, and a failed
    upload is aborted. `progress` is called with the number of bytes of each part. Raises PreconditionError
    with `if_absent` if the object exists, and with `etag` if it no longer has that ETag.

    Example:
        transfers.upload(client, Path("model.pt"), "models", "run1/model.pt")
    """
    tuning = tuning or Tuning()

    def send(file: IO[bytes], part: int, grows_after: int) -> str:
        first = _read_full(file, part)
        if len(first) < part:
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
        headers = object_headers(metadata, content_type)
        conditions = write_conditions(etag, if_absent=if_absent)
        parts = _parts(first, file, part, grows_after)
        return _upload_parts(client, parts, bucket, key, headers, tuning, progress, conditions)

    if isinstance(source, bytes | bytearray | memoryview):
        raise ConfigurationError(
            "upload takes a path or an open file; for bytes: client.put(bucket, key, data)"
        )
    if not isinstance(source, str | os.PathLike):
        return send(source, tuning.part, _GROWS_AFTER)
    with Path(source).open("rb") as file:
        size = os.fstat(file.fileno()).st_size  # 0 of a pipe, whose length is not known
        part = max(tuning.part, -(-size // MAX_PARTS))
        return send(file, part, MAX_PARTS if size else _GROWS_AFTER)


def _read_full(source: IO[bytes], size: int) -> bytes:
    """Read `size` bytes, fewer only at the end; a single read of a pipe may return less."""
    pieces = []
    while size and (piece := source.read(size)):
        pieces.append(piece)
        size -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _parts(first: bytes, source: IO[bytes], size: int, grows_after: int) -> Iterator[bytes]:
    """Yield the parts of an upload, `first` and those read from `source`: of `size` bytes, which doubles
    after each `grows_after` parts."""
    part, number, most = first, 1, max(size, _MAX_PART // size * size)
    while part:
        yield part
        part = _read_full(source, min(size << number // grows_after, most))
        number += 1


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
    upload_id = multipart_upload.create_upload(client.transport, bucket, key, headers)

    def send(number: int, data: bytes) -> Part:
        part = multipart_upload.send_part(client.transport, bucket, key, upload_id, number, data)
        progress(len(data))
        return part

    return _complete_upload(
        client, bucket, key, upload_id, tuning.parallel, send, enumerate(parts, 1), conditions
    )


def _complete_upload(
    client: Client,
    bucket: str,
    key: str,
    upload_id: str,
    parallel: int,
    send: Callable[[int, T], Part],
    parts: Iterable[tuple[int, T]],
    conditions: Mapping[str, str] = _ANY,
) -> str:
    """Store all parts with `send`, complete the upload, and return the ETag.

    The upload is aborted if a part fails, or if the existing object does not meet the `conditions`.
    """
    try:
        stored = _in_parallel(parallel, send, parts)
        return multipart_upload.complete_upload(client.transport, bucket, key, upload_id, stored, conditions)
    except BaseException:
        with contextlib.suppress(MeshError):  # report the first failure, not that of the abort
            multipart_upload.abort_upload(client.transport, bucket, key, upload_id)
        raise


def _in_parallel(workers: int, work: Callable[[int, T], R], items: Iterable[tuple[int, T]]) -> list[R]:
    """Run `work` on every item, `workers` at a time, and return the results; raises the first failure.

    No more items are taken from the iterable than workers are free for.
    """
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
            del item  # only the worker keeps the part in memory
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
    """Copy an object within the store and return the ETag of the copy.

    Objects larger than one part are copied in parts, all of the same version.

    Arguments:
        source: (bucket, key) of the object.
        target: (bucket, key) of the copy.
        size: of the source in bytes, if known; it saves a request.
        tuning: size and concurrency of the parts.
        progress: called with the number of bytes of each copied part.

    Raises NotFoundError, and PreconditionError if the source changes during the copy.
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
    upload_id = multipart_upload.create_upload(
        client.transport, *target, _copied_headers(client, source, info)
    )

    def send(number: int, first: int) -> Part:
        last = min(first + part, info.size) - 1
        headers = {
            "x-amz-copy-source": object_path(*source),
            "x-amz-copy-source-range": f"bytes={first}-{last}",
            "x-amz-copy-source-if-match": conditional_requests.quote_etag(info.etag),
        }
        stored = multipart_upload.copy_part(client.transport, *target, upload_id, number, headers)
        progress(last + 1 - first)
        return stored

    return _complete_upload(
        client, *target, upload_id, tuning.parallel, send, enumerate(range(0, info.size, part), 1)
    )


def _copied_headers(client: Client, source: tuple[str, str], info: ObjectInfo) -> dict[str, str]:
    """Return the headers with all that a copy takes over from its source, as S3 does for a whole copy."""
    headers = object_headers(info.metadata, info.content_type or None)
    headers |= {name: info.headers[name] for name in _KEPT_HEADERS if name in info.headers}
    if info.headers.get("x-amz-tagging-count", "0") != "0":
        body = client.transport.text(Request("GET", object_path(*source), "tagging="))
        headers["x-amz-tagging"] = urlencode(parsed(parse_tagging, body))
    return headers


_KEPT_HEADERS = ("cache-control", "content-disposition", "content-encoding", "content-language", "expires")


# --- download -------------------------------------------------------------------------------------


def download(
    client: Client,
    bucket: str,
    key: str,
    path: str | os.PathLike[str],
    *,
    tuning: Tuning | None = None,
    progress: Progress = _silent,
) -> ObjectInfo:
    """Download an object to a file and return its ObjectInfo.

    The file appears under its name when it is complete, with the rights of the one that it replaces. Into a
    device or a pipe, the bytes are written one after the other. Parts are fetched concurrently, all of the
    same version. `progress` is called with the number of bytes received; the number is negative when a part
    is retried. Raises NotFoundError, PreconditionError if the object is replaced during the download, and
    ServerError if the bytes do not match the checksum of the object (see docs/disks.md).
    """
    tuning, path = tuning or Tuning(), Path(path)
    there = _status(path)
    if there is not None and stat.S_ISDIR(there.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if there is not None and not stat.S_ISREG(there.st_mode):
        return _write_through(client, bucket, key, path, progress)
    name = os.fsdecode(os.fsencode(path.name)[:200])  # of 255 bytes that a name may have
    beside = path.with_name(f".{name}.{secrets.token_hex(8)}.part")
    descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            if there is not None:
                os.fchmod(descriptor, stat.S_IMODE(there.st_mode))
            info = _fetch_verified(client, bucket, key, descriptor, tuning, progress)
        finally:
            os.close(descriptor)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return info


def _fetch_verified(
    client: Client, bucket: str, key: str, descriptor: int, tuning: Tuning, progress: Progress
) -> ObjectInfo:
    """Fetch an object into an empty file, and compare its bytes with the checksum of the object."""
    part = tuning.part
    info, checksum, first = fetch_first(client.transport, bucket, key, descriptor, part, progress)
    if checksum is None and info.size > VERIFIED_BYTES:  # not declared beside ranges by other servers
        checksum = fetch_checksum(client.transport, bucket, key, info.etag)

    def fetch(start: int, length: int) -> tuple[str, int]:
        def write(response: Response) -> str:
            hasher = checksum.hasher() if checksum else None
            write_body(response, descriptor, start, progress, hasher)
            return hasher.base64() if hasher else ""

        return client.transport.call(get_request(bucket, key, start, length, info.etag), write), length

    starts = range(part, info.size, part)
    ranges = ((start, min(part, info.size - start)) for start in starts)
    parts = _in_parallel(tuning.parallel, fetch, ranges) if starts else []
    if checksum is not None and info.size > VERIFIED_BYTES:
        size = min(part, info.size)
        found = checksum.of_file(descriptor, size) if first is None else first.base64()
        checksum.compare_parts([(found, size), *parts])
    return info


def _status(path: Path) -> os.stat_result | None:
    """Return the status of what a path leads to; None if that does not exist, or cannot be seen."""
    try:
        return path.stat()
    except OSError:
        return None


def _write_through(client: Client, bucket: str, key: str, path: Path, progress: Progress) -> ObjectInfo:
    info = client.head(bucket, key)
    with path.open("wb") as file:
        for piece in stream(client, bucket, key):
            file.write(piece)
            progress(len(piece))
    return info


def stream(
    client: Client, bucket: str, key: str, *, offset: int = 0, length: int | None = None
) -> Iterator[bytes]:
    """Iterate over the bytes of an object in pieces of at most 1 MiB, with one piece in memory.

    After a broken connection the stream continues at the same byte, with the same version of the object.
    `offset` and `length` (in bytes; None: to the end) select a range. Raises NotFoundError,
    PreconditionError if the object is replaced meanwhile, and after the last byte of a whole object
    ServerError if the bytes do not match its checksum.
    """
    etag: str | None = None
    end = None if length is None else offset + length
    checksum: ObjectChecksum | None = None
    hasher: Hasher | None = None
    while end is None or offset < end:
        begun = offset
        request = get_request(bucket, key, offset, None if end is None else end - offset, etag)
        if offset == 0 and end is None:
            request = with_checksum(request)
        try:
            response, release = client.transport.open(request)
        except NotFoundError as error:
            raise explained(error, bucket, key) from error
        except ServerError as error:
            raise explained_range(error, bucket, key, offset) from None
        if offset == 0 and end is None:
            checksum = declared(response.headers, bucket, key)
            hasher = checksum.hasher() if checksum else None
        try:
            for piece in response.pieces(MIB):
                offset += len(piece)
                if hasher is not None:
                    hasher.update(piece)
                yield bytes(piece)
        except ConnectError:
            if offset == begun:  # no progress at all: the network is down, not just this connection
                raise
            etag = conditional_requests.unquote_etag(response.headers.get("etag", ""))
        else:
            if checksum is not None and hasher is not None:
                checksum.compare(hasher.base64())
            return
        finally:
            release()
