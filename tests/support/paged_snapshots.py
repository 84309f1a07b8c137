"""Snapshots of files of lines and of archives, whose pages are in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from meshwire.dataset.build_paged_snapshot import build_from_pages
from meshwire.dataset.fields import parse_source
from meshwire.dataset.member_pages import write_member_page
from meshwire.dataset.page_document import page_document_facts
from meshwire.dataset.paged_snapshot import PagedSnapshot, PageParts, read_snapshot
from meshwire.formats.json_lines import index_lines, line_page_facts
from meshwire.formats.page_formats import open_page
from meshwire.formats.record_index import write_record_page

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from meshwire.dataset.archive_index import ShardIndex
    from meshwire.dataset.build_snapshot import Snapshot, SnapshotBuild
    from meshwire.dataset.fields import FieldSpec
    from meshwire.dataset.paged_columns import Page
    from meshwire.dataset.snapshot import SnapshotKind
    from meshwire.formats.record_index import RecordIndex


class MemoryPages:
    """The pages of some shards, opened when first used."""

    def __init__(self) -> None:
        self.documents: dict[bytes, bytes] = {}
        self.opened: dict[bytes, Page] = {}

    def __repr__(self) -> str:
        return f"<MemoryPages, {len(self.documents)}>"

    def build(
        self, files: Sequence[tuple[str, str, bytes]], source: str, fields: Mapping[str, FieldSpec]
    ) -> SnapshotBuild:
        """Build the snapshot of files of lines: (key, ETag, content) each."""
        found = []
        for key, etag, content in files:
            document = index_lines([content]).to_bytes()
            facts = line_page_facts(document, len(content))
            self.documents[facts.digest] = document
            found.append((key, etag, facts))
        return build_from_pages(found, kind="lines", source=source, fields=fields, open_pages=self.open_pages)

    def build_tars(
        self, shards: Iterable[tuple[str, str, int, ShardIndex]], source: str, fields: Mapping[str, FieldSpec]
    ) -> SnapshotBuild:
        """Build the snapshot of archives: (key, ETag, size in bytes, index) each."""
        found, parts = [], PageParts.of_fields("tar", fields)
        for key, etag, size, index in shards:
            wanted = parts.of_shard(key, parse_source(source).prefix)
            document = write_member_page(index, size, wanted)
            facts = page_document_facts(document, size)
            self.documents[facts.digest] = document
            found.append((key, etag, facts))
        return build_from_pages(found, kind="tar", source=source, fields=fields, open_pages=self.open_pages)

    def build_records(
        self,
        files: Iterable[tuple[str, str, int, RecordIndex]],
        source: str,
        fields: Mapping[str, FieldSpec],
        kind: SnapshotKind = "tfrecord",
    ) -> SnapshotBuild:
        """Build the snapshot of files of records: (key, ETag, size in bytes, index) each."""
        found, parts = [], PageParts.of_fields(kind, fields)
        for key, etag, size, index in files:
            document = write_record_page(index, parts)
            facts = page_document_facts(document, size)
            self.documents[facts.digest] = document
            found.append((key, etag, facts))
        return build_from_pages(found, kind=kind, source=source, fields=fields, open_pages=self.open_pages)

    def open_page(self, snapshot: PagedSnapshot, number: int) -> Page:
        digest = snapshot.table.hash_of(number)
        if digest not in self.opened:
            self.opened[digest] = open_page(self.documents[digest], snapshot.kind, snapshot.facts(number))
        return self.opened[digest]

    def open_pages(self, snapshot: PagedSnapshot, numbers: Sequence[int]) -> list[Page]:
        return [self.open_page(snapshot, number) for number in numbers]

    def read(self, document: bytes) -> Snapshot:
        """Decode a snapshot of these shards."""
        return read_snapshot(document, self.open_pages)


def build_from_tars(
    shards: Iterable[tuple[str, str, int, ShardIndex]], *, source: str, fields: Mapping[str, FieldSpec]
) -> SnapshotBuild:
    """Build the snapshot of archives that has all samples in its document."""
    built = MemoryPages().build_tars(shards, source, fields)
    assert isinstance(built.snapshot, PagedSnapshot)
    return replace(built, snapshot=built.snapshot.without_pages())
