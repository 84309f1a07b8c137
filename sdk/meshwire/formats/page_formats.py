"""The format of the pages of each kind of source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwire.dataset.page_document import open_page_document
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
