"""A version is removed while a newer one is not acknowledged yet."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from meshd.store.errors import ConditionFailedError
from meshd.store.records import WriteContext
from meshwire.http_values.conditional_requests import Conditions
from tests.support.mesh_nodes import decider_of, running_nodes, shared_store
from tests.support.store_calls import error_of, put_object

if TYPE_CHECKING:
    import pytest

    from meshd.store.records import Record
    from meshd.store.replica.changes import Change
    from tests.support.mesh_nodes import Running


async def _two_versions(nodes: list[Running]) -> tuple[Running, Running, Record, Record]:
    """The node that decides about `k`, the other one, and two versions that both have."""
    one = decider_of(nodes, "b", "k")
    other = next(node for node in nodes if node is not one)
    first = await put_object(one.node.replicated_store, "k", b"first", versioning="Enabled")
    second = await put_object(one.node.replicated_store, "k", b"second", versioning="Enabled")
    return one, other, first, second


def test_nobody_gets_to_know_of_a_removal_before_the_version_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        async with running_nodes(asyncio.get_running_loop(), 2, copies=2) as nodes:
            one, other, _, second = await _two_versions(nodes)
            store = shared_store(one)
            fenced = WriteContext(epoch=one.node.mesh.current_map().version)
            third = await put_object(
                one.node.store, "k", b"third", versioning="Enabled", context=fenced
            )  # told to nobody yet
            seen, tell = list[str](), store.primary.replicator.replicate_change

            async def told(change: Change, bucket: str, key: str) -> int:
                newest = await tell(change, bucket, key)
                found = other.node.store.newest_version(bucket, key)
                seen.append("" if found is None else found.version)
                return newest

            monkeypatch.setattr(store.primary.replicator, "replicate_change", told)
            await store.delete_version("b", "k", second.version)
            assert set(seen) == {third.version}
            assert other.node.store.get_version("b", "k", second.version) is None

    asyncio.run(run())


def test_a_refusal_says_nothing_before_all_know_of_the_removal_that_it_is_judged_by() -> None:
    async def run() -> None:
        async with running_nodes(asyncio.get_running_loop(), 2, copies=2) as nodes:
            one, other, first, second = await _two_versions(nodes)
            fenced = WriteContext(epoch=one.node.mesh.current_map().version)
            await one.node.store.delete_version(
                "b", "k", second.version, context=fenced
            )  # told to nobody yet
            conditions = Conditions(if_match=(second.etag,))
            await error_of(
                ConditionFailedError,
                put_object(
                    one.node.replicated_store, "k", b"third", versioning="Enabled", conditions=conditions
                ),
            )
            newest = other.node.store.newest_version("b", "k")
            assert newest is not None
            assert newest.version == first.version

    asyncio.run(run())
