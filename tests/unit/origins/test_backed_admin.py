"""Buckets with origins, managed on a node that is behind what other nodes have written."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec.structs import replace

from meshd.auth.identity import Identity
from meshd.control.buckets import Bucket, BucketTable
from meshd.origins.admin import BackedAdmin
from meshwire.origin import parse_origin
from tests.support.lagging_control import LaggingControl
from tests.support.manual_clock import ManualClock

ROOT = Identity("root", "root", "key", root=True)
FOLDER = {"url": "file:///data"}


class _Origins:
    """Every origin is there, and empty."""

    def origin_for(self, bucket: Bucket) -> _Origins:
        return self

    async def list(self, *_: Any) -> None:
        pass


async def _behind() -> tuple[BackedAdmin, LaggingControl, BucketTable]:
    """A node's admin, its control store, and another node's table; both nodes know the bucket `lake`."""
    clock = ManualClock()
    control, origins = LaggingControl(clock), _Origins()
    elsewhere = BucketTable(control.engine)
    await elsewhere.create(Bucket("lake", "root", 1, "here", origin=parse_origin(FOLDER)))
    control.catch_up()
    pool: Any = origins
    return BackedAdmin(BucketTable(control), pool, clock, "here"), control, elsewhere


async def _caught_up(control: LaggingControl) -> None:
    for _ in range(10):
        await asyncio.sleep(0)
    control.catch_up()


def test_a_change_keeps_what_another_node_has_just_changed() -> None:
    async def check() -> None:
        admin, _, elsewhere = await _behind()
        quota = parse_origin({**FOLDER, "quota": 7})
        await elsewhere.update("lake", lambda now: replace(now, origin=quota))
        await admin.change(ROOT, "lake", {"ttl": 5})
        found = elsewhere.get("lake")
        assert found is not None
        assert found.origin == parse_origin({**FOLDER, "quota": 7, "ttl": 5})

    asyncio.run(asyncio.wait_for(check(), 30))


def test_a_bucket_that_another_node_has_just_deleted_is_created() -> None:
    async def check() -> None:
        admin, control, elsewhere = await _behind()
        assert await elsewhere.delete("lake")
        creating = asyncio.ensure_future(admin.create(ROOT, "lake", FOLDER))
        await _caught_up(control)
        await creating
        assert elsewhere.get("lake") is not None, "it was acknowledged"

    asyncio.run(asyncio.wait_for(check(), 30))
