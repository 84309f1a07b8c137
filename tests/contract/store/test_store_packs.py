"""Small objects lie in packs: few bytes each, readable with tar and unzip, and damage costs what it hits."""

from __future__ import annotations

import asyncio
import re
import subprocess
import zipfile
from contextlib import closing
from io import BytesIO
from typing import TYPE_CHECKING, Any

import pytest

from meshd.config import StoreSettings
from meshd.store.engine import packs, write_batch
from meshd.store.index.index import Index
from meshd.store.records import DataFile
from meshd.store.store import Store
from meshd.store.tools.fsck import check_store
from meshd.store.tools.index_rebuild import rebuild_index
from tests.support.manual_clock import ManualClock
from tests.support.store_calls import new_object, put_object

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable
    from pathlib import Path

COUNT = 3_000
ABOUT: dict[str, Any] = {
    "headers": {"content-type": "binary/octet-stream"},
    "checksums": {"crc32": "AAAAAA=="},
    "checksum_type": "FULL_OBJECT",
    "owner": "somebody",
}


@pytest.fixture
def settings(tmp_path: Path) -> StoreSettings:
    return StoreSettings.at(tmp_path, index_map_bytes=1 << 28)


def run(
    settings: StoreSettings,
    doing: Callable[[Store], Coroutine[Any, Any, None]],
    clock: ManualClock | None = None,
) -> None:
    with closing(Store.open(settings, writer="s", clock=clock or ManualClock())) as store:
        asyncio.run(doing(store))


def bodies(count: int = COUNT) -> dict[str, bytes]:
    return {f"train/{number:07d}": b"%08d" % number for number in range(count)}


async def put_all(store: Store) -> None:
    new = [new_object(key, data, **ABOUT) for key, data in bodies().items()]
    for at in range(0, COUNT, 1000):
        await store.put_many("b", new[at : at + 1000])


def files(settings: StoreSettings) -> list[Path]:
    return sorted(settings.data_dir.glob("extents/*/*.tar"))


def data_bytes(settings: StoreSettings) -> int:
    return sum(path.stat().st_size for path in files(settings))


def contents(store: Store) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    while entries := store.list("b", after=max(found, default="")).entries:
        found |= {key: store.read_range(record, 0, record.size) for key, record in entries}
    return found


def untarred(paths: Iterable[Path]) -> dict[str, bytes]:
    """What tar and unzip find, by name; Python's own zipfile also compares checksums."""
    found: dict[str, bytes] = {}
    for path in paths:
        names = subprocess.run(
            ["tar", "-tf", str(path)], capture_output=True, check=True, text=True, timeout=60
        ).stdout.splitlines()
        for name in names:
            assert re.fullmatch(r"b/train/[0-9]{7}\.@[0-9]+\.zip", name)
            taken = subprocess.run(
                ["tar", "-xOf", str(path), name], capture_output=True, check=True, timeout=60
            ).stdout
            with zipfile.ZipFile(BytesIO(taken)) as opened:
                assert f".@{len(opened.infolist())}.zip" in name
                found |= {each: opened.read(each) for each in opened.namelist()}
    return found


def test_small_objects_take_few_bytes_and_others_can_read_them(settings: StoreSettings) -> None:
    run(settings, put_all)
    with closing(Index.open(settings, readonly=True)) as index:
        assert index.size() + data_bytes(settings) <= 700 * COUNT
    assert untarred(files(settings)) == {f"b/{key}": data for key, data in bodies().items()}
    assert check_store(settings).clean
    with closing(Index.open(settings, readonly=True)) as index, index.read_transaction() as txn:
        before = list(index.all_records(txn))
    assert rebuild_index(settings).problems == []
    with closing(Index.open(settings, readonly=True)) as index, index.read_transaction() as txn:
        assert list(index.all_records(txn)) == before
    assert check_store(settings).clean


@pytest.mark.parametrize("earlier", [False, True], ids=["a pack each", "by an earlier release"])
def test_compaction_packs_what_was_put_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, earlier: bool
) -> None:
    """Once: what cannot get smaller is left alone."""
    settings = StoreSettings.at(tmp_path, index_map_bytes=1 << 28, segment_bytes=250_000)
    monkeypatch.setattr(packs, "_WORTHWHILE", 100_000)
    clock = ManualClock()

    async def put_singly(store: Store) -> None:
        for key, data in bodies(500).items():
            await put_object(store, key, data, **ABOUT)

    async def compacted(store: Store) -> None:
        large = store.compactor.candidates(0.5)
        for file in large:
            assert await store.compactor.compact(file)
        assert not store.compactor.candidates(0.5)
        clock.advance(61)
        assert await store.compactor.purge() == len(large) > 2
        assert contents(store) == bodies(500)

    with monkeypatch.context() as patches:
        if earlier:
            patches.setattr(write_batch, "is_packed", lambda *_: False)
            patches.setattr(write_batch, "DataFile", lambda *fields, framing: DataFile(*fields))
        run(settings, put_singly, clock)
    before = data_bytes(settings)
    assert check_store(settings).clean
    run(settings, compacted, clock)
    assert data_bytes(settings) < before / 2
    assert check_store(settings).clean
    assert rebuild_index(settings).problems == []


@pytest.mark.parametrize(
    ("at", "lost"), [(100, 0), (600, 1), (-600, 1)], ids=["the pack's header", "the first entry", "the last"]
)
def test_damage_of_a_pack_costs_the_entry_that_it_hits(settings: StoreSettings, at: int, lost: int) -> None:
    async def doing(store: Store) -> None:
        await store.put_many("b", [new_object(key, data, **ABOUT) for key, data in bodies(20).items()])
        await put_object(store, "behind", bytes(10_000))

    run(settings, doing)
    (path,) = files(settings)
    raw = bytearray(path.read_bytes())
    last = raw.rindex(packs.OPENING)
    raw[at if at > 0 else last + 40] ^= 0x55
    path.write_bytes(raw)
    found = check_store(settings)
    assert {problem.kind for problem in found.problems} == {"header"}
    assert len(found.problems) == 1 + lost
    assert len(rebuild_index(settings).problems) == 1
    with closing(Store.open(settings, writer="s", clock=ManualClock())) as store:
        assert len(contents(store)) == 21 - lost
