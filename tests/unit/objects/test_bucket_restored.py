"""A bucket that is deleted while others write to it, or create it again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from meshd.control.buckets import Bucket, BucketTable
from meshd.objects.buckets.service import BucketService
from meshd.store.records import Upload
from meshwire.errors import S3Error
from meshwire.s3.operations import DeleteBucket
from tests.support.lagging_control import LaggingControl
from tests.support.manual_clock import ManualClock
from tests.support.reference_store import MemoryStore


class _Everywhere:
    """Another node's object is found when the name is deleted."""

    def __init__(self) -> None:
        self.answers = [True, False]

    async def has_versions(self, bucket: str, *, here: bool) -> bool:
        return self.answers.pop()

    async def broadcast_deletion(self) -> None:
        pass


def test_it_is_put_back_as_another_node_had_just_changed_it() -> None:
    async def check() -> None:
        clock = ManualClock()
        control = LaggingControl(clock)
        elsewhere, everywhere = BucketTable(control.engine), _Everywhere()
        peers: Any = everywhere
        service = BucketService(BucketTable(control), MemoryStore(clock), clock, everywhere=peers)
        await elsewhere.create(Bucket("photos", "ann", 1))
        control.catch_up()
        await elsewhere.update("photos", lambda bucket: replace(bucket, versioning="Enabled"))
        with pytest.raises(S3Error, match="not empty"):
            await service.delete_bucket(DeleteBucket("photos"))
        assert not everywhere.answers
        found = elsewhere.get("photos")
        assert found is not None
        assert found.versioning == "Enabled"

    asyncio.run(asyncio.wait_for(check(), 30))


def test_uploads_of_a_bucket_that_exists_again_stay_where_that_is_not_known_yet() -> None:
    async def check() -> None:
        clock = ManualClock()
        control, store = LaggingControl(clock), MemoryStore(clock)
        service = BucketService(BucketTable(control), store, clock)
        await store.create_upload(Upload("", "photos", "key"))
        elsewhere = BucketTable(control.engine)
        await elsewhere.create(Bucket("photos", "ann", 1))
        dropping = asyncio.ensure_future(service.drop_uploads("photos"))
        await asyncio.sleep(0)
        control.catch_up()
        await dropping
        assert len(store.list_uploads("photos").uploads) == 1
        await elsewhere.delete("photos")
        control.catch_up()
        await service.drop_uploads("photos")
        assert not store.list_uploads("photos").uploads

    asyncio.run(asyncio.wait_for(check(), 30))
