"""Reads of whole objects: the checksum that the server declares, and its comparison with what arrived.

Law: compared is a CRC of a whole object, which can be combined from those of its parts; a range has none,
nor has an object whose checksum is of another kind.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from meshsdk.client.object_info import read_info
from meshsdk.client.request import Request, object_path
from meshsdk.errors import MeshError, ServerError
from meshwire.checksums.body_checksums import combine_checksums, new_hasher
from meshwire.http_values.conditional_requests import quote_etag

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
    if headers.get("x-amz-checksum-type", "FULL_OBJECT") == "FULL_OBJECT":
        for algorithm in _ALGORITHMS:
            value = headers.get(f"x-amz-checksum-{algorithm}", "")
            if value and "-" not in value:  # the checksum of the parts' checksums ends in their number
                return ObjectChecksum(bucket, key, algorithm, value)
    return None


def fetch_checksum(transport: Transport, bucket: str, key: str, etag: str) -> ObjectChecksum | None:
    """Ask for the checksum of an object that has this ETag. Raises PreconditionError if it has another."""
    request = Request("HEAD", object_path(bucket, key), "", {"if-match": quote_etag(etag)})

    def read(response: Response) -> ObjectChecksum | None:
        return declared(response.headers, bucket, key)

    return transport.call(with_checksum(request), read)


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
    total = response.headers.get("content-range", "").rpartition("/")[2]
    return read_info(response, int(total) if total.isdigit() else done)
