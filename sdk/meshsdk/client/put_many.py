"""Many small objects in few requests: tars, which the node unpacks.

Law: the objects of one request are stored together or not at all, by each node that is the primary of some;
a node that does not unpack is noticed by its answer, and then gets them one by one.
"""

from __future__ import annotations

import io
import mimetypes
import tarfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from meshsdk.client.request import Request, crc64, object_headers, object_path
from meshsdk.errors import ConfigurationError, ServerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from meshsdk.client.http_connection import Buffer, Response
    from meshsdk.client.transport import Transport

SMALL_BYTES: Final = 1 << 20
"""Largest object that is sent with others: above it, a request of its own costs little."""
_BATCH_BYTES: Final = 8 << 20
_BATCH_OBJECTS: Final = 4000
_HEADER_BYTES: Final = 2048  # of a member with its media type, and its padding
_METADATA: Final = {"snowball-auto-extract": "true"}

NamedBytes = tuple[str, "Buffer"]


def put_many(
    transport: Transport,
    put_one: Callable[[str, Buffer, str | None], object],
    bucket: str,
    objects: Iterable[NamedBytes] | Mapping[str, Buffer],
) -> int:
    """See `Client.put_many`. `put_one` stores a key, its bytes and media type by a request of its own."""
    count = 0
    for batch in _batches(bucket, objects):
        if len(batch) == 1 or not _put_batch(transport, bucket, batch):
            for key, data in batch:
                put_one(key, data, mimetypes.guess_type(key)[0])
        count += len(batch)
    return count


def _batches(bucket: str, objects: Iterable[NamedBytes] | Mapping[str, Buffer]) -> Iterator[list[NamedBytes]]:
    """Yields objects in groups of bounded size; a large one is a group of its own. Of one key sent twice, the
    later object comes in a later group. Raises ConfigurationError for a key that cannot be one: a tar cuts
    names at a NUL."""
    batch, keys, size = list[NamedBytes](), set[str](), 0
    for named in objects.items() if isinstance(objects, Mapping) else objects:
        key, data, length = _check_item(named)
        object_path(bucket, key)
        if length > SMALL_BYTES or not _is_member_name(key):
            if key in keys:
                yield batch
                batch, keys, size = [], set(), 0
            yield [(key, data)]
            continue
        needed = length + _HEADER_BYTES
        if batch and (size + needed > _BATCH_BYTES or len(batch) == _BATCH_OBJECTS or key in keys):
            yield batch
            batch, keys, size = [], set(), 0
        batch.append((key, data))
        keys.add(key)
        size += needed
    if batch:
        yield batch


def _check_item(named: Any) -> tuple[str, Buffer, int]:
    """Return a key, its bytes and their number. Raises ConfigurationError for anything else."""
    message = "put_many takes pairs of a key and its bytes, such as [('a.txt', b'…')]; got "
    match named:
        case (str() as key, data):
            try:
                return key, data, memoryview(data).nbytes
            except TypeError:
                hint = f": text must be encoded, {key!r:.40}, text.encode()" if isinstance(data, str) else ""
                found = f"for the key {key!r:.80} a {type(data).__name__}{hint}"
                raise ConfigurationError(message + found) from None
    raise ConfigurationError(message + repr(named)[:80])


def _is_member_name(key: str) -> bool:
    """Whether a node takes a member of this name for this key. A slash at the end of a long name, or of one
    beyond ASCII, is lost when a tar is read."""
    return not key.startswith(("/", "./")) and not key.endswith("/") and ".." not in key.split("/")


def _put_batch(transport: Transport, bucket: str, batch: Sequence[NamedBytes]) -> bool:
    """Send objects as a tar; False if the node does not unpack it. Raises MeshError."""
    body = _tar_of(batch)
    headers = object_headers(_METADATA, None) | {"x-amz-checksum-crc64nvme": crc64(body)}
    # Named as the first of them, so that no other name needs a right; a node of an earlier release stores
    # the tar under it, until the object itself takes its place.
    request = Request("PUT", object_path(bucket, batch[0][0]), "", headers, body, None)
    try:
        return transport.call(request, _read_count) == len(batch)
    except ServerError as error:
        if error.code != "NotImplemented":  # as in a bucket with an origin
            raise
        return False


def _read_count(response: Response) -> int:
    response.read()
    return int(response.headers.get("x-mesh-objects", "0"))


def _tar_of(batch: Sequence[NamedBytes]) -> bytes:
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for key, data in batch:
            info = tarfile.TarInfo(key)
            info.size = memoryview(data).nbytes
            kind = mimetypes.guess_type(key)[0]
            if kind is not None:
                info.pax_headers = {"minio.metadata.content-type": kind}
            tar.addfile(info, io.BytesIO(data))
    return body.getvalue()
