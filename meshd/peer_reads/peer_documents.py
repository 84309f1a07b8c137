"""Remote documents: read, replicate and inventory shared documents of the reserved bucket on other nodes.

A document counts as written when enough nodes hold it that one may be lost. A document that a silent
node may hold is Busy, never missing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from meshd.core.api_errors import busy
from meshd.core.peer_messages import (
    LIST_DOCUMENTS,
    READ_DOCUMENT,
    STORE_DOCUMENT,
    DocumentName,
    InventoryRequest,
)
from meshd.documents.gc_policy import DocumentUsage
from meshd.errors import MeshdError
from meshd.peer_reads.replica_selection import UNREACHABLE_STATES
from meshd.rpc.peer_client import PeerRefusedError, PeerUnreachableError

if TYPE_CHECKING:
    from meshd.documents.inventory import PeerInventories
    from meshd.peer_reads.replica_selection import ReplicaSelector
    from meshwire.cluster import Node

_MIN_REPLICAS: Final = 2
"""Nodes that must have a document before it counts as written, if the mesh has that many."""
_AT_ONCE: Final = 4
"""Nodes that are asked for a document concurrently."""


class PeerDocuments:
    """A PeerDocumentSource. One instance per process."""

    def __init__(self, selector: ReplicaSelector) -> None:
        self._selector, self._mesh = selector, selector.mesh

    def __repr__(self) -> str:
        return f"<PeerDocuments from {self._mesh.node_id}>"

    @property
    def single_node(self) -> bool:
        """Whether there are no other nodes."""
        return self._mesh.single_node

    async def fetch_document(self, key: str) -> bytes | None:
        """Fetch a document from any node; see `PeerDocumentSource`."""
        silent = ""
        others = self._selector.document_nodes()
        for start in range(0, len(others), _AT_ONCE):
            asked = [self._get(node, key) for node in others[start : start + _AT_ONCE]]
            for answer in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(answer, bytes):
                    return answer
                if isinstance(answer, MeshdError):
                    silent = str(answer)
                elif answer is not None:
                    raise answer
        if silent:
            raise busy(f"another node may have {key}, but does not answer: {silent}")
        return None

    async def fetch_from_all_nodes(self, key: str) -> list[bytes]:
        """Return the documents of all nodes that answer, for a key under which each node has a document of
        its own."""
        asked = [self._get(node, key) for node in self._selector.document_nodes()]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, bytes)]

    async def _get(self, node: Node, key: str) -> bytes | None:
        try:
            return await self._selector.peers.call_typed(node, READ_DOCUMENT, DocumentName(key))
        except PeerRefusedError as error:
            if error.status == 404:
                return None
            raise
        except PeerUnreachableError as error:
            self._selector.report_unreachable(node, error)
            raise

    async def replicate_document(self, key: str, document: bytes, *, again: bool = False) -> None:
        """Store a document on the storing nodes; see `PeerDocumentSource`."""
        name, others = DocumentName(key, again), self._selector.document_nodes()
        own = self._mesh.current_map().node(self._mesh.node_id)
        needed = min(_MIN_REPLICAS, len(others) + 1) - int(own is not None and own.stores)
        tasks = [self._put(node, name, document) for node in others]
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        wrong = [answer for answer in answers if isinstance(answer, BaseException)]
        if len(answers) - len(wrong) < needed:
            raise busy(f"too few nodes could keep {key}: {wrong[0]}")

    async def list_inventories(self, prefix: str) -> PeerInventories:
        """Return the inventory of every other node under a prefix, whatever its role, and the ids of the
        nodes that could not be asked. Nodes that are `down` count as neither."""
        there = [node for node in self._mesh.current_map().nodes if node.node_id != self._mesh.node_id]
        asked = [node for node in there if node.state not in UNREACHABLE_STATES]
        answers = await asyncio.gather(*[self._table(node, prefix) for node in asked])
        silent = [node.node_id for node, found in zip(asked, answers, strict=True) if found is None]
        silent += [node.node_id for node in there if node.state == "away"]
        return [found for found in answers if found is not None], silent

    async def _table(self, node: Node, prefix: str) -> dict[str, DocumentUsage] | None:
        found: dict[str, DocumentUsage] = {}
        after, more = "", True
        try:
            while more:
                request = InventoryRequest(prefix, after)
                answer = await self._selector.peers.call_typed(node, LIST_DOCUMENTS, request)
                found |= {key: DocumentUsage(size, made, used) for key, size, made, used in answer.rows}
                after, more = answer.after, bool(answer.after)
        except MeshdError as error:
            self._selector.report_unreachable(node, error)
            return None
        return found

    async def _put(self, node: Node, name: DocumentName, document: bytes) -> None:
        try:
            await self._selector.peers.call_typed(node, STORE_DOCUMENT, name, body=document)
        except PeerUnreachableError as error:
            self._selector.report_unreachable(node, error)
            raise
