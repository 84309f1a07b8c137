"""Documents of pages, one of each kind, with what snapshots say of them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from meshwire.dataset.archive_index import index_tar
from meshwire.dataset.member_pages import write_member_page
from meshwire.dataset.page_document import page_document_facts
from meshwire.dataset.paged_snapshot import PageFacts, PageParts
from meshwire.formats.json_lines import index_lines, line_page_facts
from meshwire.formats.record_index import write_record_page
from meshwire.formats.tar import TarMember
from meshwire.formats.tfrecord_index import index_records
from tests.support.tf_example_writer import BytesList, example, record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwire.dataset.snapshot import SnapshotKind


def member_page() -> bytes:
    """The page of a tar whose samples have two parts and classes."""
    members = [
        TarMember(name, 5, 512 + 1024 * at, 0, 0, "0")
        for at, name in enumerate(["c/1.jpg", "c/1.txt", "d/ü.txt", "d/ü.jpg", "d/3.jpg"])
    ]
    return write_member_page(index_tar(members), 9999, PageParts((("jpg",), ("txt",)), in_shards=True))


def records_of(rows: Sequence[bytes]) -> bytes:
    """A TFRecord file with an example for each row, whose feature `x` it is."""
    return b"".join(record(example({"x": BytesList([row])})) for row in rows)


def record_page() -> bytes:
    """The page of a TFRecord file whose second record lacks the part."""
    file = b"".join([records_of([b"one"]), record(example({"y": BytesList([b"y"])})), records_of([b"two"])])
    return write_record_page(index_records([file], ["x"]), PageParts((("x",),), in_shards=False))


PAGES: dict[SnapshotKind, tuple[bytes, PageFacts, PageFacts]] = {
    "lines": (
        (document := index_lines([b"one\ntwo\n\nthree"]).to_bytes()),
        line_page_facts(document, 14),
        PageFacts(hashlib.sha256(document).digest(), 3, (11,), 14, 14),
    ),
    "tar": (
        (document := member_page()),
        page_document_facts(document, 9999),
        PageFacts(hashlib.sha256(document).digest(), 2, (10, 10), 9999, 9999, ("c", "d")),
    ),
    "tfrecord": (
        (document := record_page()),
        page_document_facts(document, 999),
        PageFacts(hashlib.sha256(document).digest(), 2, (6,), 999, 999),
    ),
}
"""By kind: the document of a page, its facts as its reader finds them, and as they are known to be."""
