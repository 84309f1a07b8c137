"""The name that an S3 operation concerns, by which the nodes that may answer it are chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from meshwire.s3 import operations as ops

if TYPE_CHECKING:
    from meshd.cluster.cluster_view import ClusterView

_READS: Final = (
    ops.GetObject,
    ops.GetObjectAttributes,
    ops.GetObjectTagging,
    ops.GetObjectAcl,
    ops.ListMembers,
)
_WRITES: Final = (
    ops.PutObject,
    ops.CopyObject,
    ops.DeleteObject,
    ops.PutObjectTagging,
    ops.DeleteObjectTagging,
    ops.PutObjectAcl,
    ops.CreateMultipartUpload,
    ops.UploadPart,
    ops.UploadPartCopy,
    ops.CompleteMultipartUpload,
    ops.AbortMultipartUpload,
    ops.ListParts,
)


class ObjectName(NamedTuple):
    """The name that a request concerns; `reading`: any node of its read set may answer."""

    bucket: str
    key: str
    reading: bool


def object_name_of(operation: ops.Operation) -> ObjectName | None:
    """Return the single name that an operation concerns; None for buckets and for several names."""
    if isinstance(operation, _READS):
        return ObjectName(operation.bucket, operation.key, reading=True)
    if isinstance(operation, _WRITES):
        return ObjectName(operation.bucket, operation.key, reading=False)
    return None


def may_answer(mesh: ClusterView, name: ObjectName) -> bool:
    """Whether this node may answer for a name."""
    return mesh.is_reader(name.bucket, name.key) if name.reading else mesh.is_primary(name.bucket, name.key)


class MisdirectedError(Exception):
    """By the map of this node, version `version`, another node is responsible for the name."""

    def __init__(self, version: int) -> None:
        super().__init__(f"another node is responsible by version {version} of the map")
        self.version = version
