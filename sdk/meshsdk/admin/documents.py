"""Stored plans and snapshots: list, show, and remove before they expire.

Law: one request per call; every response becomes a frozen value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from meshsdk.client.request import Request
from meshsdk.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meshsdk.client.transport import Transport

Kind = Literal["plans", "snapshots"]


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A stored plan or snapshot.

    Attributes:
        hash: its name.
        buckets: the buckets it is made from.
        made_of: of a snapshot its source, of a plan its snapshot's hash.
        bytes, nodes: its size, and how many nodes have it.
        used_ms: when it was created or last used, ms since 1970.
        expires_ms: when it expires if nothing uses it; None if something refers to it, or if
            documents do not expire here.
        kept_by: what refers to it: views, jobs, plans.
        told: the complete response of the server.
    """

    hash: str
    buckets: tuple[str, ...]
    made_of: str
    bytes: int
    nodes: int
    used_ms: int
    expires_ms: int | None
    kept_by: tuple[str, ...]
    told: Mapping[str, Any]


def list_documents(transport: Transport, kind: Kind) -> Iterator[StoredDocument]:
    """Yield the documents that the caller may see, in order of their hashes."""
    after = ""
    while True:
        query = f"after={after}&limit=1000" if after else "limit=1000"
        page = transport.json(Request("GET", f"/-/documents/{kind}", query))
        yield from map(_document, page[kind])
        after = page["next"]
        if not after:
            return


def show_document(transport: Transport, kind: Kind, digest: str) -> StoredDocument:
    """Return one document. Raises NotFoundError."""
    return _document(transport.json(Request("GET", f"/-/documents/{kind}/{digest}")))


def remove_document(transport: Transport, kind: Kind, digest: str, *, force: bool = False) -> tuple[str, ...]:
    """Remove a document on every node; with `force` also one used within the last day. Returns the nodes
    that are away, which remove it when they return. Raises NotFoundError, ServerError InUse."""
    answer = transport.json(Request("DELETE", f"/-/documents/{kind}/{digest}", "force=1" if force else ""))
    return tuple(answer["silent"])


def _document(answer: Mapping[str, Any]) -> StoredDocument:
    try:
        return StoredDocument(
            str(answer["hash"]),
            tuple(answer["buckets"]),
            str(answer.get("source") or answer["snapshot"]),
            int(answer["bytes"]),
            int(answer["nodes"]),
            int(answer["used_ms"]),
            None if answer["expires_ms"] is None else int(answer["expires_ms"]),
            tuple(answer["kept_by"]),
            dict(answer),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MeshError(
            f"cannot parse the server's document ({error!r}); upgrade the older of SDK and server"
        ) from error
