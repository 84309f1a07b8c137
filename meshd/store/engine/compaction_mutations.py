"""Mutations of compaction: move a member, rewrite a tombstone, retire and forget files, prune tombstones.

Law: a member is moved only if it is still in use when its move is committed; else its copy is dead space.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from meshd.store.engine.member_header import cancels_others
from meshd.store.engine.mutations import Mutation, replace_version, write_manifest
from meshd.store.index.index import object_key
from meshd.util import failpoints

if TYPE_CHECKING:
    from meshd.store.engine.member_header import Member
    from meshd.store.engine.write_batch import StagedMember, WriteBatch
    from meshd.store.records import Extent, Record

_TOMBSTONES_PER_BATCH: Final = 2000


@dataclass(slots=True)
class Piece:
    """A member to move, and its bytes."""

    member: Member
    old: Extent
    data: bytes

    def append_to(self, batch: WriteBatch) -> StagedMember:
        member = msgspec.structs.replace(self.member, moves=self.member.moves + 1)
        return batch.append_member(member, int(member.stamp), (self.data,), len(self.data))


class MoveMember(Mutation):
    """Rewrites a member and points its user to the copy. If the user is gone, the copy is dead space."""

    def __init__(self, piece: Piece) -> None:
        self.piece = piece
        self.data_bytes = len(piece.data)
        self.staged: StagedMember | None = None

    def write_data(self, batch: WriteBatch, txn: Any | None) -> None:
        self.staged = self.piece.append_to(batch)
        failpoints.hit("store.compact.placed")

    def update_index(self, batch: WriteBatch, txn: Any) -> None:
        assert self.staged is not None
        batch.keep_unused_file(self.piece.old.file)
        if not self._repoint_user(batch, txn, self.piece.old, self.staged.extent):
            batch.discard_member(self.staged)

    def _repoint_user(self, batch: WriteBatch, txn: Any, old: Extent, new: Extent) -> bool:
        member, index = self.piece.member, batch.index
        if member.kind in ("object", "marker"):
            record = index.versions.version_using_extent(txn, member, old)
            if record is None or record.manifest is not None:
                return False
            moved = msgspec.structs.replace(record, extents=(new,), moves=member.moves + 1)
            replace_version(batch, txn, object_key(member.bucket, member.key), moved, record)
        elif member.kind == "part":
            part = index.uploads.get_part(txn, member.upload, member.part)
            if part is None or part.extents != (old,):
                return False
            moved_part = msgspec.structs.replace(part, extents=(new,), moves=member.moves + 1)
            index.uploads.put_part(txn, member.upload, moved_part)
            batch.release_extents((old,))
            batch.retain_extents((new,))
        else:
            upload = index.uploads.get_upload(txn, member.bucket, member.key, member.upload)
            if member.kind != "upload" or upload is None or upload.place != old:
                return False
            index.uploads.put_upload(txn, msgspec.structs.replace(upload, place=new, moves=member.moves + 1))
            batch.release_extents((old,))
            batch.retain_extents((new,))
        return True


class MoveManifestedExtent(Mutation):
    """Moves an extent of an object with a manifest, or the manifest itself; writes a new manifest either
    way."""

    exclusive = True

    def __init__(self, piece: Piece) -> None:
        self.piece = piece
        self.data_bytes = len(piece.data)
        self.record: Record | None = None
        self.existing: Record | None = None

    def check(self, batch: WriteBatch, txn: Any) -> None:
        record = batch.index.versions.version_using_extent(txn, self.piece.member, self.piece.old)
        if record is not None and record.manifest is not None:
            self.existing = record

    def write_data(self, batch: WriteBatch, txn: Any | None) -> None:
        existing, piece = self.existing, self.piece
        if existing is None:  # overwritten meanwhile: a removal that this member records must survive
            if cancels_others(piece.member):
                RewriteTombstoneMember(piece.member).write_data(batch, txn)
            return
        extents = existing.extents
        if piece.old != existing.manifest:
            new = piece.append_to(batch).extent
            extents = tuple(new if extent == piece.old else extent for extent in extents)
        moved = msgspec.structs.replace(existing, extents=extents, manifest=None, moves=existing.moves + 1)
        upload = piece.member.upload if cancels_others(piece.member) else ""
        self.record = write_manifest(batch, piece.member.bucket, piece.member.key, moved, upload)

    def update_index(self, batch: WriteBatch, txn: Any) -> None:
        if self.record is not None and self.existing is not None:
            batch.keep_unused_file(self.piece.old.file)
            name = object_key(self.piece.member.bucket, self.piece.member.key)
            replace_version(batch, txn, name, self.record, self.existing)


class RewriteTombstoneMember(Mutation):
    """Rewrites a member that cancels others."""

    def __init__(self, member: Member) -> None:
        kind = "aborted" if member.upload else "deleted"
        self.member = msgspec.structs.replace(member, kind=kind, crc32c=0)

    def write_data(self, batch: WriteBatch, txn: Any | None) -> None:
        batch.append_member(self.member, int(self.member.stamp), (), 0)


class RetireFile(Mutation):
    """Retires a file that nothing uses; returns True if it is retired or gone."""

    exclusive = True

    def __init__(self, file: int) -> None:
        self.file = file

    def update_index(self, batch: WriteBatch, txn: Any) -> bool:
        info = batch.index.files.get_file(txn, self.file)
        if info is None:
            return True  # its last user was removed meanwhile, and the file with it
        if info.refs or info.state == "open":
            return False
        batch.index.files.put_file(txn, self.file, msgspec.structs.replace(info, state="retired"))
        failpoints.hit("store.compact.retired")
        return True


class ForgetRetiredFiles(Mutation):
    """Drops retired files from the index; returns their paths, to be unlinked."""

    exclusive = True

    def __init__(self, files: list[int]) -> None:
        self.files = files

    def update_index(self, batch: WriteBatch, txn: Any) -> list[str]:
        paths = []
        for file in self.files:
            info = batch.index.files.get_file(txn, file)
            if info is not None and info.state == "retired":
                batch.index.files.delete_file(txn, file)
                paths.append(batch.disks.path(info.disk, file))
        return paths


class PruneTombstones(Mutation):
    """Drops one batch of tombstones below a stamp; returns where the next batch begins, b"" after the
    last."""

    exclusive = True

    def __init__(self, before: int, start: bytes) -> None:
        self.before, self.start = before, start

    def update_index(self, batch: WriteBatch, txn: Any) -> bytes:
        return batch.tombstones(txn).prune(txn, self.before, self.start, _TOMBSTONES_PER_BATCH)
