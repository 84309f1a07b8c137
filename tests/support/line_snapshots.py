"""Snapshots of files of lines, whose pages are in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwire.dataset.paged_snapshot import read_snapshot
from meshwire.formats.json_lines import build_from_lines, index_lines, line_page_facts, open_line_page

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshwire.dataset.build_snapshot import Snapshot, SnapshotBuild
    from meshwire.dataset.fields import FieldSpec
    from meshwire.dataset.paged_columns import Page
    from meshwire.dataset.paged_snapshot import PagedSnapshot


class LinePages:
    """The pages of some files, opened when first used."""

    def __init__(self) -> None:
        self.documents: dict[bytes, bytes] = {}
        self.opened: dict[bytes, Page] = {}

    def __repr__(self) -> str:
        return f"<LinePages, {len(self.documents)}>"

    def build(
        self, files: Sequence[tuple[str, str, bytes]], source: str, fields: Mapping[str, FieldSpec]
    ) -> SnapshotBuild:
        """Build the snapshot of files: (key, ETag, content) each."""
        found = []
        for key, etag, content in files:
            document = index_lines([content]).to_bytes()
            facts = line_page_facts(document, len(content))
            self.documents[facts.digest] = document
            found.append((key, etag, facts))
        return build_from_lines(found, source=source, fields=fields, open_page=self.open_page)

    def open_page(self, snapshot: PagedSnapshot, number: int) -> Page:
        digest = snapshot.table.hash_of(number)
        if digest not in self.opened:
            self.opened[digest] = open_line_page(self.documents[digest], snapshot.facts(number))
        return self.opened[digest]

    def read(self, document: bytes) -> Snapshot:
        """Decode a snapshot of these files."""
        return read_snapshot(document, self.open_page)
