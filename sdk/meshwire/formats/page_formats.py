"""The format of the pages of each kind of source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwire.dataset.page_document import is_marked, open_page_document, page_mark, read_marked_page
from meshwire.formats.json_lines import open_line_page

if TYPE_CHECKING:
    from meshwire.dataset.paged_columns import Page
    from meshwire.dataset.paged_snapshot import PageFacts
    from meshwire.dataset.snapshot import SnapshotKind
    from meshwire.frame.tensor_frame import Buffer


def open_page(document: Buffer, kind: SnapshotKind, facts: PageFacts) -> Page:
    """Return a page of a source of this kind, a view of its document. Raises ColumnError unless that is the
    document that a snapshot describes by `facts`."""
    return open_page_document(document, facts, open_line_page if kind == "lines" else None)


def mark_page(document: Buffer, kind: SnapshotKind, facts: PageFacts) -> str:
    """Return a mark of a page that was checked, to be kept with its document. Raises ColumnError as
    `open_page` does."""
    return page_mark(document, facts, open_line_page if kind == "lines" else None)


def open_marked_page(document: Buffer, kind: SnapshotKind, facts: PageFacts, mark: str) -> Page | None:
    """Return a page whose document is known to have the bytes that it had when it was marked; None if the
    mark is not that of these facts. Raises ColumnError."""
    if not is_marked(mark, facts):
        return None
    return open_line_page(document, checked=True) if kind == "lines" else read_marked_page(document)
