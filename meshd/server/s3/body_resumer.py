"""Continues a GET response whose bytes cannot be read to their end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.core.read_source import FailoverRead
from meshd.store.integrity.verification import report_unsent_spans
from meshd.views.dispatch import RebuiltResultSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.core.object_io import LookupResult
    from meshd.server.direct_sender import PartialReadError
    from meshd.server.response_body import BodyResumer
    from meshd.server.services import ServerServices
    from meshd.store.records import Span
    from meshwire.s3 import operations as ops


def body_resumer(
    deps: ServerServices,
    operation: ops.GetObject,
    found: LookupResult,
    spans: Sequence[Span],
    viewed: ops.GetObject | None = None,
) -> BodyResumer:
    """Returns what continues a response whose bytes cannot be read to their end: a read of another owner, of
    the origin, or, for an object of a view (`viewed`: the request for it), of a result that is made again. It
    reports the damage."""

    def resume(torn: PartialReadError) -> FailoverRead:
        report_unsent_spans(spans, torn.sent)
        if viewed is not None:
            sources = [RebuiltResultSource(deps.views, viewed, found.record.etag)]
            name, offset = f"s3://{viewed.bucket}/{viewed.key}", found.offset + torn.sent
            return FailoverRead(sources, offset, found.length - torn.sent, name, resumed=True)
        if deps.backed is not None:
            cached = deps.backed.resume_from_origin(operation.bucket, operation.key, found, torn.sent)
            if cached is not None:
                return cached
        if deps.resume_read is None or deps.mesh.single_node:
            raise torn
        return deps.resume_read(operation.bucket, operation.key, found, torn.sent)

    return resume
