"""A node is marked away a second time while it returns: what it passed on before that is given up, too."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from meshd.cluster.callers import asked_by
from meshd.control.clustermaps import ClusterMaps
from meshd.store.errors import NotReplicatedError
from meshd.testing.store_writing import put, refused
from meshwire.cluster.transitions import joined, missed, settled
from tests.component.mesh_nodes import running_nodes

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshwire.cluster import ClusterMap


def test_what_a_node_passed_on_between_two_absences_is_refused_once_it_is_up() -> None:
    async def run() -> None:
        async with running_nodes(asyncio.get_running_loop(), 3, copies=2) as nodes:
            decider = nodes[0].node.mesh.route("b", "k").decider
            assert decider is not None
            deciding = next(n for n in nodes if n.node.settings.node_id == decider.node_id)
            passing = next(n for n in nodes if n is not deciding)
            name, maps = passing.node.settings.node_id, ClusterMaps(nodes[0].node.control)

            async def change(made: Callable[[ClusterMap], ClusterMap]) -> int:
                def changed(cluster: ClusterMap | None) -> ClusterMap:
                    assert cluster is not None
                    return made(cluster)

                return (await maps.change(changed)).version

            await change(lambda cluster: missed(cluster, name))
            asked = await change(lambda cluster: joined(cluster, passing.member))
            await change(lambda cluster: missed(cluster, name))
            returned = await change(lambda cluster: joined(cluster, passing.member))
            await change(lambda cluster: settled(cluster, name))
            await put(deciding.node.shared, "k", b"new")
            with asked_by(name, asked):
                await refused(NotReplicatedError, put(deciding.node.shared, "k", b"old"))
            with asked_by(name, returned):
                await put(deciding.node.shared, "k", b"newer")

    asyncio.run(run())
