"""A process that scrubs a damaged store and restores what it finds: run as a program, with a directory."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from meshd.config import StoreSettings
from meshd.store.replica.changes import without_local_fields
from meshd.store.store import Store
from meshd.util.clock import SystemClock

LARGE = 100_000
KEYS = {
    "small": b"s" * 4000,
    "large": b"l" * LARGE,
    "parts": b"1" * LARGE + b"2" * 3000,
    "sound": b"x" * 5000,
}
DAMAGED = ("large", "parts", "small")


def settings(place: Path) -> StoreSettings:
    return StoreSettings.at(place, small_object_bytes=8 << 10, segment_bytes=100_000, index_map_bytes=1 << 28)


async def _rest(size: int) -> None:
    await asyncio.sleep(0)


async def scrub_and_restore(store: Store) -> None:
    """Repair a version as the coordinator does, with the bytes of another node."""
    await store.scrub.start_pass()
    while await store.scrub.scrub_next_file(_rest):
        pass
    for name, stamp, _ in store.quarantine.entries():
        bucket, key = name.decode().split("\0")
        record = store.version_at(name, stamp)
        assert record is not None
        writer = store.replica_writer(bucket, key, size=record.size)
        await writer.write(KEYS[key])
        await writer.commit_at_stamp(without_local_fields(record))


def main(place: Path) -> None:
    Store.recover(settings(place))

    async def run() -> None:
        store = Store.open(settings(place), writer="s", clock=SystemClock())
        try:
            await scrub_and_restore(store)
        finally:
            store.close()

    asyncio.run(run())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
