"""Multipart completion: checks the named parts; computes ETag and checksums of the whole object. Pure."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from meshd.store.engine.member_header import stamp_of_version_id
from meshd.store.records import Meta
from meshwire.checksums import body_checksums as sums
from meshwire.errors import S3Error
from meshwire.http_values import conditional_requests

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from meshd.store.records import Record, Upload
    from meshwire.s3.operations import CompleteMultipartUpload
    from meshwire.s3.result_types import PartEntry
    from meshwire.s3.xml_documents import CompletedPart

MIN_PART_BYTES = 5 << 20  # every part but the last has at least this size


def check_parts(stored: Mapping[int, PartEntry], named: Sequence[CompletedPart]) -> list[PartEntry]:
    """Return the stored parts that the client names, in order. Raises S3Error InvalidPartOrder, InvalidPart,
    BadDigest, EntityTooSmall."""
    numbers = [part.number for part in named]
    if any(later <= earlier for earlier, later in itertools.pairwise(numbers)):
        raise S3Error("InvalidPartOrder")
    chosen = [_matching(stored.get(part.number), part) for part in named]
    for part in chosen[:-1]:
        if part.size < MIN_PART_BYTES:
            raise S3Error(
                "EntityTooSmall",
                extra={
                    "ProposedSize": str(part.size),
                    "MinSizeAllowed": str(MIN_PART_BYTES),
                    "PartNumber": str(part.number),
                    "ETag": part.etag,
                },
            )
    return chosen


def _matching(stored: PartEntry | None, named: CompletedPart) -> PartEntry:
    wrong = stored is None or stored.etag != named.etag
    if stored is None or wrong or any(stored.checksums.get(a, v) != v for a, v in named.checksums.items()):
        raise S3Error("InvalidPart", extra={"PartNumber": str(named.number), "ETag": named.etag})
    unknown = named.checksums.keys() - stored.checksums.keys()
    if unknown:
        raise S3Error(
            "BadDigest",
            f"The {min(unknown)} you specified for part {named.number} did not match what we received.",
        )
    return stored


def completed_meta(
    upload: Upload, parts: Sequence[PartEntry], operation: CompleteMultipartUpload, *, through: bool = False
) -> Meta:
    """Return ETag, checksums and headers of the object. Raises S3Error BadDigest, InvalidRequest when the
    client expects other values."""
    _check_size(parts, operation.object_size)
    checksums = _whole_checksums(upload, parts)
    _check_checksums(upload, checksums, operation)
    return Meta(
        conditional_requests.multipart_etag(part.etag for part in parts),
        upload.headers,
        upload.metadata,
        checksums,
        upload.checksum_type if checksums else "",
        upload.owner,
        upload.tags,
        upload.acl,
        through=through,
    )


def _check_size(parts: Sequence[PartEntry], expected: int | None) -> None:
    size = sum(part.size for part in parts)
    if expected is not None and expected != size:
        raise S3Error(
            "InvalidRequest",
            f"The provided 'x-amz-mp-object-size' header value {expected} does not match what was computed: "
            f"{size}",
        )


def _check_checksums(
    upload: Upload, checksums: Mapping[str, str], operation: CompleteMultipartUpload
) -> None:
    kind = operation.checksum_type
    if kind is not None and kind != upload.checksum_type:
        raise S3Error(
            "InvalidRequest",
            f"The upload was created using the {upload.checksum_type} checksum mode. The complete request "
            "must use the same checksum mode.",
        )
    for algorithm, value in operation.digests.checksums.items():
        computed = checksums.get(algorithm)
        if computed is None:
            raise S3Error(
                "InvalidRequest",
                f"The upload was created using the {upload.checksum_algorithm.upper()} checksum; there is no "
                f"{algorithm.upper()} checksum to compare with.",
            )
        if value not in (computed, computed.partition("-")[0]):
            raise S3Error(
                "BadDigest", f"The {algorithm.upper()} you specified did not match the calculated checksum."
            )


def _whole_checksums(upload: Upload, parts: Sequence[PartEntry]) -> dict[str, str]:
    algorithm = upload.checksum_algorithm
    values = [part.checksums.get(algorithm, "") for part in parts]
    if not algorithm or not all(values):
        return {}
    if upload.checksum_type == "COMPOSITE":
        return {algorithm: sums.composite_checksum(algorithm, values)}
    sizes = [part.size for part in parts]
    return {algorithm: sums.combine_checksums(algorithm, list(zip(values, sizes, strict=True)))}


def find_completed(
    records: Iterable[Record | None], upload_id: str, named: Sequence[CompletedPart]
) -> Record:
    """Return the object that a completed upload became, for a repeated completion: it has these parts and is
    younger than the upload (an upload id begins with its stamp). Raises S3Error NoSuchUpload."""
    begun = stamp_of_version_id(upload_id[:16])
    try:
        etag = conditional_requests.multipart_etag(part.etag for part in named)
    except ValueError:
        etag = ""
    for record in records:
        if record is not None and record.etag == etag and begun is not None and record.stamp > begun:
            return record
    raise S3Error("NoSuchUpload")
