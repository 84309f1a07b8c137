"""Frames of objects that other nodes hold: the same bytes, whoever has what."""

from __future__ import annotations

import asyncio
import hashlib
import os
from typing import TYPE_CHECKING

import pytest
from awscrt.checksums import crc32c

from meshd.batches.assembly import frame_builder
from meshd.batches.assembly.assembler import Assembler
from meshd.config import TransformSettings
from meshd.core.api_errors import BatchError
from meshd.core.document_store import DocumentStore
from meshd.core.frame_address import FrameAddress
from meshd.core.memory_frames import MemoryFrame
from meshd.core.peer_source import SINGLE_NODE, ReadFailure
from meshd.core.plan_record import FieldOutput, Plan
from meshd.datasets.archives.archive_service import ArchiveService, LocalArchives
from meshd.store.records import Location, Meta
from meshwire.dataset.build_snapshot import build_from_objects
from meshwire.dataset.fields import parse_fields
from meshwire.frame import tensor_frame
from meshwire.plan.plan_spec import parse_spec, plan_hash
from tests.support.manual_clock import ManualClock
from tests.support.reference_store import MemoryStore
from tests.support.single_node_objects import single_node_objects
from tests.unit.batches.test_assembly_frames import Stamper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.core.memory_frames import MemoryAccount
    from meshd.core.peer_source import FetchedRanges, ObjectRange

SAMPLES = 40


class Others:
    """Other nodes, as one store. `lost`: what befalls the parts of a key."""

    single_node = False

    def __init__(self) -> None:
        self.store = MemoryStore(ManualClock())
        self.kept: dict[str, bytes] = {}
        self.lost: dict[str, str] = {}
        self.asked: list[int] = []

    async def fetch_parts(self, parts: Sequence[ObjectRange], memory: MemoryAccount) -> FetchedRanges:
        self.asked.append(len(parts))
        return Room(self, parts, memory)

    def record_use(self, bucket: str, key: str) -> None:
        return

    async def reaches_map_version(self, version: int) -> bool:
        return True

    def is_first_replica(self, bucket: str, key: str) -> bool:
        return False

    def slots_read_here(self, bucket: str, *, first_only: bool) -> None:
        return None

    def has_peer_copies(self, bucket: str, key: str) -> bool:
        return True

    async def fetch_document(self, key: str) -> bytes | None:
        return self.kept.get(key)

    async def replicate_document(self, key: str, document: bytes, *, again: bool = False) -> None:
        self.kept[key] = document


class Room:
    def __init__(self, others: Others, parts: Sequence[ObjectRange], memory: MemoryAccount) -> None:
        self._frame = MemoryFrame(0, memory)
        self.places: list[Location | ReadFailure] = []
        for part in parts:
            record = others.store.get(part.bucket, part.key)
            code = others.lost.get(part.key, "NoSuchKey" if record is None else "")
            if code:
                self.places.append(ReadFailure(code))
                continue
            assert record is not None
            assert record.etag == part.etag
            data, at = others.store.read_range(record, part.offset, part.length), self._frame.size
            self._frame.grow(at + len(data))
            os.pwrite(self._frame.fd, data, at)
            path = f"/proc/{os.getpid()}/fd/{self._frame.fd}"
            self.places.append(Location(path, at, len(data), crc32c(data)))

    def close(self) -> None:
        self._frame.close()


class Scene:
    """A node that holds every third object, others that hold the rest."""

    def __init__(self, others: Others | None) -> None:
        self.others, self.store = others, MemoryStore(ManualClock())
        archives = ArchiveService(
            LocalArchives(self.store, list[str]().append), single_node_objects(self.store)
        )
        settings, elsewhere = TransformSettings(1, 0), SINGLE_NODE if others is None else others
        catalog = DocumentStore(self.store, elsewhere)
        self.assembler = Assembler(
            self.store, Stamper(), settings, archives, node="n1", remote=elsewhere, catalog=catalog
        )

    async def plan(self, **spec: object) -> str:
        listing = []
        for sample in range(SAMPLES):
            data, key = bytes([sample]), f"d/{sample:03d}.bin"
            here = self.others is None or sample % 3 == 0
            store = self.store if here or self.others is None else self.others.store
            writer = store.writer("b", key, size=1)
            await writer.write(data)
            etag = hashlib.md5(data, usedforsecurity=False).hexdigest()
            await writer.commit(Meta(etag))
            listing.append((key, etag, 1))
        built = build_from_objects(
            listing, source="s3://b/d/", fields=parse_fields({"image": {"ext": "bin"}})
        )
        await self.assembler.catalog.add_snapshot(built.snapshot)
        parsed = parse_spec({"seed": 3, "tail": "ragged", **spec})
        digest = plan_hash(built.snapshot.hash, parsed)
        plan = Plan(digest, built.snapshot.hash, "b", SAMPLES, parsed, {"image": FieldOutput("uint8", (4,))})
        await self.assembler.catalog.add_plan(plan)
        return digest

    async def get(self, plan: str, step: int = 0) -> bytes:
        frame = await self.assembler.get_frame(FrameAddress(plan, 1, step, batch=16))
        data = os.pread(frame.fd, frame.size, 0)
        frame.close()
        tensor_frame.verify_frame(data)
        return data


@pytest.mark.parametrize("portion", [1, 5, 64 << 20])
def test_frames_are_those_of_a_lone_node(portion: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_builder, "FETCHED_BYTES", portion)

    async def run() -> None:
        lone, scene = Scene(None), Scene(Others())
        plan = await lone.plan()
        assert await scene.plan() == plan
        for step in range(3):
            assert await scene.get(plan, step) == await lone.get(plan, step)
        assert scene.others is not None
        assert sum(scene.others.asked) == SAMPLES - len(range(0, SAMPLES, 3))
        assert (len(scene.others.asked) == 3) is (portion > 16)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("lost", "code"),
    [
        ("NoSuchKey", "SnapshotChanged"),
        ("SnapshotChanged", "SnapshotChanged"),
        ("Unreadable", "CorruptData"),
        ("Busy", "Busy"),
    ],
)
def test_what_nobody_can_give_is_said(lost: str, code: str) -> None:
    async def run() -> None:
        scene = Scene(Others())
        plan = await scene.plan()
        assert scene.others is not None
        scene.others.lost = {f"d/{sample:03d}.bin": lost for sample in range(SAMPLES)}
        with pytest.raises(BatchError) as raised:
            await scene.get(plan)
        assert raised.value.code == code
        scene.others.lost = {}
        await scene.get(plan)

    asyncio.run(run())


def test_documents_come_from_others_on_a_miss() -> None:
    async def run() -> None:
        others = Others()
        first, second = Scene(others), Scene(others)
        plan = await first.plan()
        assert set(others.kept) == {f"plans/{plan}", *(key for key in others.kept if key.startswith("snap"))}
        second.store = first.store
        assert (await second.assembler.catalog.plan(plan)).hash == plan
        others.kept.clear()
        assert second.assembler.catalog.read_document(f"plans/{plan}") is not None

    asyncio.run(run())
