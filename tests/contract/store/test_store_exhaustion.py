"""A process without free descriptors: nothing of it is taken for a fault of the device."""

from __future__ import annotations

import asyncio
import os
import resource
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import pytest

from meshd.config import StoreSettings
from meshd.store.engine.group_commit import Committer
from meshd.store.errors import DiskFailedError, ExhaustedError
from meshd.store.store import Store
from meshd.util.clock import SystemClock
from tests.support.store_calls import LARGE, put_object

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Meanwhile this process can open nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = os.dup(0)  # the lowest free one: below it all are taken
    os.close(least)
    resource.setrlimit(resource.RLIMIT_NOFILE, (least, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store.open(StoreSettings.at(tmp_path), writer="w0", clock=SystemClock())) as found:
        yield found


def test_no_disk_is_taken_out_of_service(store: Store) -> None:
    async def look() -> None:
        await store.disk_health.probe_disks()
        with no_descriptors():
            for _ in range(4):  # three failed probes in a row take a disk out
                await store.disk_health.probe_disks()

    asyncio.run(look())
    assert store.disk_health.has_disk
    assert store.disk_health.index_failed == ""


def test_nothing_goes_to_quarantine(store: Store) -> None:
    async def scrub() -> None:
        await put_object(store, "small", b"small" * 100)
        large = await put_object(store, "large", os.urandom(LARGE))
        await store.scrub.start_pass()
        with no_descriptors():
            while await store.scrub.scrub_next_file(_rest):
                pass
        assert store.scrub.state.damaged == 0
        assert store.get("b", "small") is not None
        assert store.read_range(large, 0, 100)

    asyncio.run(scrub())


def test_a_read_says_what_is_missing(store: Store) -> None:
    record = asyncio.run(put_object(store, "large", os.urandom(LARGE)))
    with no_descriptors(), pytest.raises(ExhaustedError, match="ulimit -n"):
        store.read_range(record, 0, 100)
    assert store.read_range(record, 0, 100)


async def _rest(size: int) -> None:
    assert size >= 0


def test_a_store_that_cannot_be_opened_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system with an open file cannot be unmounted, and the next attempt may be on another one."""
    settings = StoreSettings.at(tmp_path)
    with closing(Store.open(settings, writer="w0", clock=SystemClock())) as store:
        asyncio.run(put_object(store, "k", b"k"))  # in a segment that goes on with the next start

    def refused(committer: Committer) -> None:
        raise DiskFailedError("the index cannot be written")

    monkeypatch.setattr(Committer, "_refill_ids", refused)
    with pytest.raises(DiskFailedError):
        Store.open(settings, writer="w0", clock=SystemClock())
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    assert not [link for link in links if os.path.realpath(link).startswith(f"{tmp_path}/")]
