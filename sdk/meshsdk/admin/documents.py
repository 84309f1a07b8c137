"""Stored plans and snapshots: list, show, and remove before they expire.

Law: one request a call; every answer becomes a frozen value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from meshsdk.client.transport import Request
from meshsdk.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meshsdk.client.transport import Transport

Kind = Literal["plans", "snapshots"]


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A plan or snapshot that is kept.

    Attributes:
        hash: its name.
        buckets: of what it is made of.
        made_of: of a snapshot its source, of a plan its snapshot's hash.
        bytes, nodes: its size, and how many nodes have it.
        used_ms: when it was made or used last, ms since 1970.
        expires_ms: when it goes if nobody uses it; None: something names it, or nothing expires here.
        kept_by: what names it: views, jobs, plans.
        told: all the server said.
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
    """Those the caller may see, in order of their hashes."""
    after = ""
    while True:
        query = f"after={after}&limit=1000" if after else "limit=1000"
        page = transport.json(Request("GET", f"/-/documents/{kind}", query))
        yield from map(_document, page[kind])
        after = page["next"]
        if not after:
            return


def show_document(transport: Transport, kind: Kind, digest: str) -> StoredDocument:
    """One of them. Raises NotFoundError."""
    return _document(transport.json(Request("GET", f"/-/documents/{kind}/{digest}")))


def remove_document(transport: Transport, kind: Kind, digest: str, *, force: bool = False) -> tuple[str, ...]:
    """Remove one on every node; `force`: also one used within the last day. The nodes that are away: they
    follow when they are back. Raises NotFoundError, ServerError InUse."""
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
            f"what the server keeps is not understood ({error!r}): upgrade the older of SDK and server"
        ) from error
