"""A version is removed while a newer one is not acknowledged yet."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from meshd.cluster.replicating import ReplicatedStore
from meshd.store.epochs import decided_by
from meshd.store.errors import ConditionFailedError
from meshd.testing.store_writing import put, refused
from meshwire.conditions import Conditions
from tests.component.mesh_nodes import running_nodes

if TYPE_CHECKING:
    import pytest

    from meshd.store.changes import Change


def test_nobody_gets_to_know_of_a_removal_before_the_version_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        async with running_nodes(asyncio.get_running_loop(), 2, copies=2) as nodes:
            decider = nodes[0].node.mesh.route("b", "k").decider
            assert decider is not None
            one = next(node.node for node in nodes if node.node.settings.node_id == decider.node_id)
            other = next(node.node for node in nodes if node.node is not one)
            store = one.shared
            assert isinstance(store, ReplicatedStore)
            await put(store, "k", b"first", versioning="Enabled")
            second = await put(store, "k", b"second", versioning="Enabled")
            with decided_by(one.mesh.map().version):
                third = await put(one.store, "k", b"third", versioning="Enabled")  # told to nobody yet
            seen, tell = list[str](), store.tell

            async def told(change: Change, bucket: str, key: str) -> int:
                newest = await tell(change, bucket, key)
                found = other.store.newest(bucket, key)
                seen.append("" if found is None else found.version)
                return newest

            monkeypatch.setattr(store, "tell", told)
            await store.delete_version("b", "k", second.version)
            assert set(seen) == {third.version}
            assert other.store.get_version("b", "k", second.version) is None

    asyncio.run(run())


def test_a_refusal_says_nothing_before_all_know_of_the_removal_that_it_is_judged_by() -> None:
    async def run() -> None:
        async with running_nodes(asyncio.get_running_loop(), 2, copies=2) as nodes:
            decider = nodes[0].node.mesh.route("b", "k").decider
            assert decider is not None
            one = next(node.node for node in nodes if node.node.settings.node_id == decider.node_id)
            other = next(node.node for node in nodes if node.node is not one)
            first = await put(one.shared, "k", b"first", versioning="Enabled")
            second = await put(one.shared, "k", b"second", versioning="Enabled")
            with decided_by(one.mesh.map().version):
                await one.store.delete_version("b", "k", second.version)  # told to nobody yet
            conditions = Conditions(if_match=(second.etag,))
            await refused(
                ConditionFailedError,
                put(one.shared, "k", b"third", versioning="Enabled", conditions=conditions),
            )
            newest = other.store.newest("b", "k")
            assert newest is not None
            assert newest.version == first.version

    asyncio.run(run())
