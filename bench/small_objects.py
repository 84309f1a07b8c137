"""What small objects take on disk: `python -m bench.small_objects`.

Bytes of data files and index for each object, by how they were put: in batches as `mesh cp` does, by 16
clients at once, and one after the other, then before and after compaction. It counts bytes, so a busy
machine gives the same figures; only who meets whom in a group of commits varies.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import random
import tempfile
import zlib
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from awscrt.checksums import crc32c

from bench.tables import verdict
from meshd.config import StoreSettings
from meshd.store.index.index import Index
from meshd.store.records import Meta, NewObject
from meshd.store.store import Store
from tests.support.manual_clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Iterable

_BATCH = 1000
_MOST = 700
"""The bar: bytes on disk for each object of 8 bytes, after compaction."""


def _new(key: str, size: int) -> NewObject:
    """As boto3 puts it: an MD5 as ETag, a content type, and a CRC-32 of the whole object."""
    data = key.encode()[-size:].rjust(size, b".")
    crc = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
    about = {"content-type": "binary/octet-stream"}
    meta = Meta(hashlib.md5(data).hexdigest(), about, {}, {"crc32": crc}, "FULL_OBJECT", "root")
    return NewObject(key, meta, data, crc32c(data))


async def _put(store: Store, objects: Iterable[NewObject]) -> None:
    for new in objects:
        writer = store.writer("small", new.key, size=len(new.data))
        await writer.write(new.data)
        await writer.commit(new.meta)


async def _fill(store: Store, objects: list[NewObject], at_once: int) -> None:
    if at_once == 0:
        for at in range(0, len(objects), _BATCH):
            await store.put_many("small", objects[at : at + _BATCH])
        return
    pending = iter(objects)
    await asyncio.gather(*[_put(store, pending) for _ in range(at_once)])


async def _compact(store: Store, clock: ManualClock) -> None:
    for file in store.compactor.candidates(0.5):
        await store.compactor.compact(file)
    clock.advance(61)
    await store.compactor.purge()


def _bytes(settings: StoreSettings) -> tuple[int, int]:
    """Return the bytes of data files and of the index."""
    with closing(Index.open(settings, readonly=True)) as index:
        data = sum(path.stat().st_size for path in settings.data_dir.glob("extents/*/*.tar"))
        return data, index.size()


def _told(objects: list[NewObject], at_once: int) -> tuple[list[str], float]:
    """Return what the objects take before and after compaction, and that in bytes each."""
    clock = ManualClock()
    told, taken = list[str](), 0.0
    with tempfile.TemporaryDirectory() as place:
        settings = StoreSettings.at(Path(place), index_map_bytes=4 << 30)
        for compacts in (False, True):
            with closing(Store.open(settings, writer="w0", clock=clock)) as store:
                asyncio.run(_compact(store, clock) if compacts else _fill(store, objects, at_once))
            data, index = (each / len(objects) for each in _bytes(settings))
            taken = data + index
            told.append(f"{data:,.0f} + {index:,.0f} = {taken:,.0f}")
    return told, taken


def main() -> None:
    """Print a line for each way of putting objects, before and after compaction."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, default=200_000)
    parser.add_argument("--size", type=int, default=8, help="bytes of data of each object")
    parser.add_argument("--at-once", type=int, nargs="*", default=[0, 16, 1], help="clients; 0: batches")
    given = parser.parse_args()
    for at_once in given.at_once:
        for order in ("in order of key", "in random order"):
            keys = [f"train/{number:08d}.bin" for number in range(given.objects)]
            if order == "in random order":
                random.Random(1).shuffle(keys)
            (before, after), taken = _told([_new(key, given.size) for key in keys], at_once)
            how = f"{at_once} at once" if at_once else "batches"
            bar = verdict(taken, _MOST if given.size == 8 else None, at_most=True)
            print(f"{how}, {order}: {before}; after compaction {after} bytes each {bar}", flush=True)


if __name__ == "__main__":
    main()
