"""Peer handlers for job outputs of other nodes, written and removed under names that this node owns.

Law: only for names that this node owns; otherwise the response is 421 with this node's map version, and
nothing was changed. The node that runs the job has authorized it.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

from meshd.jobs.outputs import REMOVE_OUTPUTS, WRITE_OUTPUT, OutputBodyParser, OutputTarget
from meshd.rpc.peer_rpc import handler

if TYPE_CHECKING:
    from meshd.cluster.cluster_view import ClusterView
    from meshd.jobs.outputs import LocalOutputStore, OutputName, RemoveOutputs
    from meshd.rpc.peer_rpc import CallContext


class JobOutputHandlers:
    """Writes and removes outputs for other nodes. One per process."""

    def __init__(self, own: LocalOutputStore, mesh: ClusterView) -> None:
        self._own, self._mesh = own, mesh

    @handler(WRITE_OUTPUT)
    async def write_output(self, name: OutputName, context: CallContext) -> None:
        self._mesh.require_primary(name.bucket, name.key)
        target = OutputTarget(name.bucket, name.key, None if name.size < 0 else name.size)
        body = OutputBodyParser(context.iter_body())
        async with aclosing(body.pieces()) as pieces:
            await self._own.write_output(target, pieces, body.metadata)

    @handler(REMOVE_OUTPUTS)
    async def remove_outputs(self, asked: RemoveOutputs, context: CallContext) -> None:
        for key in asked.keys:
            self._mesh.require_primary(asked.bucket, key)
        await self._own.remove_outputs(asked.bucket, asked.keys)
