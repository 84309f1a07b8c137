"""Reads of whole objects: the checksum that the server declares, and its comparison with what arrived.

Law: compared is a CRC of a whole object, which can be combined from those of its parts; a range has none,
nor has an object whose checksum is of another kind.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from meshsdk.client.error_responses import explained
from meshsdk.client.object_info import read_head, read_info
from meshsdk.client.request import Request, get_request, object_path
from meshsdk.errors import MeshError, NotFoundError, ServerError
from meshwire.checksums.body_checksums import combine_checksums, new_hasher
from meshwire.http_values.conditional_requests import quote_etag
from meshwire.http_values.mesh_headers import WHOLE_CHECKSUM_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from meshsdk.client.http_connection import Response
    from meshsdk.client.object_info import ObjectInfo
    from meshsdk.client.transport import Transport
    from meshwire.checksums.body_checksums import Hasher

_ALGORITHMS: Final = ("crc64nvme", "crc32c", "crc32")
_MODE: Final = {"x-amz-checksum-mode": "ENABLED"}
MIB: Final = 1 << 20
VERIFIED_BYTES: Final = 128 << 10
"""Size up to which a node verifies what it reads. It sends larger objects without seeing their bytes."""


@dataclass(frozen=True, slots=True)
class ObjectChecksum:
    """The checksum of all bytes of an object: algorithm, and value in base64."""

    bucket: str
    key: str
    algorithm: str
    value: str

    def hasher(self) -> Hasher:
        """Create a hasher of the same algorithm."""
        return new_hasher(self.algorithm)

    def of_file(self, descriptor: int, size: int) -> str:
        """Return the checksum of the first `size` bytes of a file."""
        hasher = self.hasher()
        for start in range(0, size, MIB):
            hasher.update(os.pread(descriptor, min(MIB, size - start), start))
        return hasher.base64()

    def compare(self, found: str) -> None:
        """Raise ServerError, of code Damaged, if the bytes that arrived have another checksum."""
        if found != self.value:
            raise ServerError(
                f"s3://{self.bucket}/{self.key} arrived with other bytes than were stored: their "
                f"{self.algorithm} is {found}, not {self.value}. Try again; if it stays, the stored bytes "
                "are damaged: `mesh cluster scrub --wait` restores them from another node that has them",
                status=500,
                code="Damaged",
            )

    def compare_parts(self, parts: Iterable[tuple[str, int]]) -> None:
        """The same for parts in their order: checksum and size of each."""
        self.compare(combine_checksums(self.algorithm, parts))


def with_checksum(request: Request) -> Request:
    """Return the request so that its response declares the checksum of the object."""
    return replace(request, headers={**request.headers, **_MODE})


def declared(headers: Mapping[str, str], bucket: str, key: str) -> ObjectChecksum | None:
    """Return the checksum of the whole object that a response declares, if it is one that can be compared."""
    if headers.get("x-amz-checksum-type", "FULL_OBJECT") != "FULL_OBJECT":
        return None
    for prefix in ("x-amz-checksum-", WHOLE_CHECKSUM_PREFIX):
        for algorithm in _ALGORITHMS:
            value = headers.get(f"{prefix}{algorithm}", "")
            if value and "-" not in value:  # the checksum of the parts' checksums ends in their number
                return ObjectChecksum(bucket, key, algorithm, value)
    return None


def fetch_checksum(transport: Transport, bucket: str, key: str, etag: str) -> ObjectChecksum | None:
    """Ask for the checksum of an object that has this ETag. Raises PreconditionError if it has another."""
    request = Request("HEAD", object_path(bucket, key), "", {"if-match": quote_etag(etag)})

    def read(response: Response) -> ObjectChecksum | None:
        return declared(response.headers, bucket, key)

    return transport.call(with_checksum(request), read)


def fetch_first(
    transport: Transport, bucket: str, key: str, descriptor: int, part: int, progress: Callable[[int], None]
) -> tuple[ObjectInfo, ObjectChecksum | None, Hasher | None]:
    """Fetch the first `part` bytes of an object into a file.

    The ObjectInfo has its size and ETag; a node also declares its checksum. The hasher has seen the bytes, if
    the node did not verify them. Raises NotFoundError.
    """

    def write(response: Response) -> tuple[ObjectInfo, ObjectChecksum | None, Hasher | None]:
        checksum = declared(response.headers, bucket, key)
        verified = _object_size(response) <= VERIFIED_BYTES
        hasher = None if checksum is None or verified else checksum.hasher()
        return write_body(response, descriptor, 0, progress, hasher), checksum, hasher

    try:
        return transport.call(with_checksum(get_request(bucket, key, 0, part, None)), write)
    except NotFoundError as error:
        raise explained(error, bucket, key) from error
    except ServerError as error:
        if error.status != 416:  # an empty object has no first byte
            raise
        return transport.call(Request("HEAD", object_path(bucket, key)), read_head), None, None


def write_body(
    response: Response,
    descriptor: int,
    start: int,
    progress: Callable[[int], None],
    hasher: Hasher | None = None,
) -> ObjectInfo:
    """Write the body of a response into a file from `start` on, and return what the response says."""
    done = 0
    if start and response.status != 206:
        raise MeshError(
            "the server ignores byte ranges: pass a larger part= to fetch the object in one request"
        )
    try:
        for piece in response.pieces(MIB):
            os.pwrite(descriptor, piece, start + done)
            if hasher is not None:
                hasher.update(piece)
            done += len(piece)
            progress(len(piece))
    except BaseException:
        progress(-done)  # the part will be requested again
        raise
    return read_info(response, _object_size(response) or done)


def _object_size(response: Response) -> int:
    """Return the size in bytes of the object of which a response has a range or all; 0 if it does not say."""
    total = response.headers.get("content-range", "").rpartition("/")[2]
    return int(total) if total.isascii() and total.isdigit() else response.length or 0
