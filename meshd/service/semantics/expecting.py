"""The owners a client expects: x-amz-expected-bucket-owner, and the same of a copy's source.

Law: a request that names another owner than the bucket's is refused before anything is done.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucket-owner-condition.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from meshwire.s3 import operations as ops
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.control.buckets import BucketTable

_BUCKET: Final = "x-amz-expected-bucket-owner"
_SOURCE: Final = "x-amz-source-expected-bucket-owner"
EXPECTING: Final = frozenset({_BUCKET, _SOURCE})


def check_expected(buckets: BucketTable, operation: ops.Operation, headers: Mapping[str, str]) -> None:
    """Raise S3Error AccessDenied unless the owners are those expected. A missing bucket is not for here."""
    if _BUCKET in headers and not isinstance(operation, ops.ListBuckets | ops.CreateBucket):
        _check(buckets, operation.bucket, headers[_BUCKET])
    if _SOURCE in headers and isinstance(operation, ops.CopyObject | ops.UploadPartCopy):
        _check(buckets, operation.source.bucket, headers[_SOURCE])


def _check(buckets: BucketTable, name: str, expected: str) -> None:
    bucket = buckets.get(name)
    if bucket is not None and bucket.owner != expected.strip():
        raise S3Error("AccessDenied", "The bucket has another owner than the request expects.")
