"""Scrub: reads every extent in use from the device, file by file, and verifies its checksum.

Law: read only; damaged data goes to quarantine through `quarantine`. A pass visits data files
in numerical order and saves its position, so a restart costs seconds. After each step the scrub awaits
`rest` with the number of bytes read, so that the caller can throttle it. One scrub per store, in the
coordinator.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from meshd.store.engine.file_scan import DataFileScan, DirectFile
from meshd.store.engine.mutations import Mutation
from meshd.telemetry import metrics
from meshd.util import failpoints

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from meshd.store.disks.layout import Disks
    from meshd.store.engine.group_commit import Committer
    from meshd.store.engine.write_batch import WriteBatch
    from meshd.store.index.index import Index
    from meshd.store.integrity.quarantine import DamageAttributor
    from meshd.store.records import DataFile, Extent
    from meshd.util.clock import Clock

_log = logging.getLogger(__name__)
_STATE: Final = "scrub"
_TURN_BYTES: Final = 1 << 20
_TURN_MEMBERS: Final = 200
_REMEMBER: Final = 5.0  # seconds of work that a crash may lose


class DiskDamage(msgspec.Struct, frozen=True):
    """Damage of a disk. `count`: damaged versions and parts, as the metrics last counted them; `hours` with
    damage, of the last day, since the epoch."""

    count: float = 0.0
    hours: tuple[int, ...] = ()


class ScrubState(msgspec.Struct, frozen=True):
    """The position of the scrub. `position`: the data file scrubbed last; `began` and `ended`: ms since the
    epoch, of the last pass that began and of the last completed pass. The counts belong to the current or the
    last pass. `asked`: the number of the last request for a pass that was served; `damage` of disks, by
    directory."""

    position: int = 0
    running: bool = False
    began: int = 0
    ended: int = 0
    files: int = 0
    bytes: int = 0
    extents: int = 0
    damaged: int = 0
    asked: int = 0
    damage: dict[str, DiskDamage] = {}


class SaveScrubState(Mutation):
    """Saves a ScrubState in the index."""

    exclusive = True

    def __init__(self, state: ScrubState) -> None:
        self.state = state

    def update_index(self, batch: WriteBatch, txn: Any) -> None:
        batch.index.put_meta(txn, _STATE, msgspec.to_builtins(self.state))
        failpoints.hit("store.scrub.remembered")


class _FilePass:
    """The scrub of one data file: what was read and what is damaged."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.bad: list[Extent] = []
        self.extents = 0


class Scrub:
    """Scrubs the store, pass after pass; see the module."""

    def __init__(
        self,
        index: Index,
        disks: Disks,
        committer: Committer,
        damage_attributor: DamageAttributor,
        clock: Clock,
        run: Callable[..., Awaitable[Any]],
    ) -> None:
        self._index, self._disks, self._committer = index, disks, committer
        self._damage_attributor = damage_attributor
        self._clock, self._run = clock, run
        self._remembered = clock.monotonic()
        found = index.get_meta(_STATE)
        self.state = ScrubState() if found is None else msgspec.convert(found, ScrubState)
        self.born = clock.now_ms()
        """When this process opened the store, in ms since the epoch."""

    def __repr__(self) -> str:
        return f"<Scrub at file {self.state.position:x}>"

    async def start_pass(self, asked: int | None = None) -> None:
        """Starts a pass from the first file and abandons a pass in progress."""
        old = self.state
        self.state = ScrubState(
            running=True,
            began=self._clock.now_ms(),
            ended=old.ended,
            asked=old.asked if asked is None else asked,
            damage=old.damage,
        )
        await self._save_state()

    async def save_damage(self, damage: dict[str, DiskDamage]) -> None:
        """Saves the damage of disks. Raises StoreError."""
        if damage != self.state.damage:
            self.state = msgspec.structs.replace(self.state, damage=damage)
            await self._save_state()

    async def scrub_next_file(self, throttle: Callable[[int], Awaitable[None]]) -> bool:
        """Scrubs the next data file; returns False if there is none and the pass is complete. Raises
        StoreError."""
        found = self._next_file()
        if found is None:
            self.state = msgspec.structs.replace(self.state, running=False, ended=self._clock.now_ms())
            await self._save_state()
            metrics.scrub_passes.inc()
            return False
        file, info = found
        if info.state != "retired" and info.refs and info.disk in self._disks.roots:
            await self._scrub_file(file, info, throttle)
        self.state = msgspec.structs.replace(self.state, position=file, files=self.state.files + 1)
        if self._clock.monotonic() - self._remembered > _REMEMBER:
            await self._save_state()
        return True

    async def _save_state(self) -> None:
        await self._committer.submit(SaveScrubState(self.state))
        self._remembered = self._clock.monotonic()

    def _next_file(self) -> tuple[int, DataFile] | None:
        with self._index.read_transaction() as txn:
            return next(self._index.files.files_after(txn, self.state.position), None)

    async def _scrub_file(
        self, file: int, info: DataFile, throttle: Callable[[int], Awaitable[None]]
    ) -> None:
        file_pass = _FilePass()
        steps = self._verify_file(file, info, file_pass)
        while (size := await self._run(partial(next, steps, -1))) >= 0:
            metrics.scrub_bytes.inc(size)
            self.state = msgspec.structs.replace(self.state, bytes=self.state.bytes + size)
            await throttle(size)
        self.state = msgspec.structs.replace(self.state, extents=self.state.extents + file_pass.extents)
        if file_pass.bad:
            quarantined = await self._damage_attributor.attribute_damage(file_pass.bad)
            self.state = msgspec.structs.replace(self.state, damaged=self.state.damaged + quarantined)

    # blocking ---------------------------------------------------------------------------------------------

    def _verify_file(self, file: int, info: DataFile, file_pass: _FilePass) -> Iterator[int]:
        """Verifies the file's extents; yields the bytes read, about every MiB."""
        path = self._disks.path(info.disk, file)
        try:
            with DataFileScan(info.disk, file, path) as scan, DirectFile(path) as direct:
                members = self._members(scan, info)
                size = count = 0
                for extent, live in members:
                    count += 1
                    if live:
                        for piece in self._compare(direct, extent, file_pass):
                            size += piece
                            if size >= _TURN_BYTES:
                                yield size
                                size = count = 0
                    if count >= _TURN_MEMBERS:
                        yield size
                        size = count = 0
                yield size
                if scan.damage or self._has_unseen_uses(file, len(file_pass.seen)):
                    yield from self._verify_unlisted(direct, file, file_pass)
        except OSError as error:
            if self._is_in_use(file):
                _log.error("cannot read a data file", extra={"path": path, "why": str(error)})
                file_pass.bad += [
                    extent for extent in self._indexed_extents(file) if extent.offset not in file_pass.seen
                ]

    def _members(self, scan: DataFileScan, info: DataFile) -> Iterator[tuple[Extent, bool]]:
        """Yields the extents and whether they are in use. A large object file always counts as used: copies
        may share it, and it does not know their names."""
        own = info.kind == "own"
        for found in scan.members(None if own else info.end):
            if own:
                yield found.extent, True
            elif found.member.kind == "upload":
                yield found.extent, self._is_upload(found.member.bucket, found.member.key, found)
            else:
                yield (
                    found.extent,
                    self._damage_attributor.use_of_member(found.member, found.extent) is not None,
                )

    def _is_upload(self, bucket: str, key: str, found: Any) -> bool:
        with self._index.read_transaction() as txn:
            upload = self._index.uploads.get_upload(txn, bucket, key, found.member.upload)
        return upload is not None and upload.place == found.extent

    @staticmethod
    def _compare(direct: DirectFile, extent: Extent, file_pass: _FilePass) -> Iterator[int]:
        file_pass.extents += 1
        file_pass.seen.add(extent.offset)
        try:
            yield from direct.compare_extent(extent, file_pass.bad)
        except OSError:
            file_pass.bad.append(extent)

    def _has_unseen_uses(self, file: int, seen: int) -> bool:
        """Returns True if the index knows of more uses than the file's headers showed."""
        with self._index.read_transaction() as txn:
            info = self._index.files.get_file(txn, file)
        return info is not None and info.kind == "segment" and info.refs > seen

    def _is_in_use(self, file: int) -> bool:
        with self._index.read_transaction() as txn:
            info = self._index.files.get_file(txn, file)
        return info is not None and info.state != "retired"

    def _indexed_extents(self, file: int) -> list[Extent]:
        """Returns the extents in a file according to the index. Scans the whole index."""
        claimed: dict[Extent, None] = {}
        with self._index.read_transaction() as txn:
            for _, record in self._index.all_records(txn):
                claimed.update((extent, None) for extent in record.used_extents if extent.file == file)
            for _, part in self._index.uploads.all_parts(txn):
                claimed.update((extent, None) for extent in part.extents if extent.file == file)
        return list(claimed)

    def _verify_unlisted(self, direct: DirectFile, file: int, file_pass: _FilePass) -> Iterator[int]:
        for extent in self._indexed_extents(file):
            if extent.offset not in file_pass.seen:
                yield from self._compare(direct, extent, file_pass)
