"""Documents of pages: where the parts of each sample of a shard are, readable at any sample.

Law: a page is a pure function of its shard's bytes and of the parts. A foreign one is validated completely
when it is opened, and compared with what the snapshot says of it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshwire.dataset.paged_columns import Page, PageNames
from meshwire.dataset.paged_snapshot import PageFacts, PageNotes
from meshwire.dataset.snapshot import MAX_BYTES
from meshwire.frame.columns import ColumnError, ColumnReader, ColumnWriter, StringColumn
from meshwire.strict_json import PlanError, canonical_json, read_json, shown_value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshwire.dataset.paged_columns import Narrow
    from meshwire.frame.columns import Integers
    from meshwire.frame.tensor_frame import Buffer

_KIND: Final = "shardmesh.page"
_VERSION: Final = 1
_BLOCK: Final = 1 << 16


def write_page(
    places: Sequence[tuple[Integers, Integers]],
    names: StringColumn | Integers,
    classes: tuple[Integers, Sequence[str]] | None,
    notes: PageNotes,
    size: int,
) -> bytes:
    """Encode a page; equal pages have equal bytes. `places`: offsets and lengths of each part, int64[n];
    `names` of the samples, or their numbers from 0, int64[n];
    `classes`: a number for each sample, int64[n], and what it stands for; `size`: uncompressed bytes of the
    shard."""
    examples = [[name, list(parts)] for name, parts in notes.examples]
    told: list[Any] = [notes.skipped, examples, notes.files, dict(notes.extensions)]
    told += [list(notes.kinds), dict(notes.told)] if notes.kinds else []
    described = {"size": str(size), "parts": str(len(places)), "notes": canonical_json(told).decode()}
    writer = ColumnWriter(_KIND, _VERSION, described)
    for part, (offsets, lengths) in enumerate(places):
        writer.add_integers(f"offsets.{part}", offsets)
        writer.add_integers(f"lengths.{part}", lengths)
    if isinstance(names, StringColumn):
        writer.add_bytes("names", names.blob)
        writer.add_integers("ends", np.cumsum(names.lengths))
    elif names.size and int(names[-1]) != names.size - 1:
        writer.add_integers("numbers", names)
    if classes is not None:
        writer.add_integers("class", classes[0])
        writer.add_strings("classes", StringColumn.from_strings(classes[1]))
    return writer.to_bytes()


def page_document_facts(document: Buffer, stored: int) -> PageFacts:
    """Return what a snapshot says of a page whose shard has `stored` bytes. Raises ColumnError."""
    reader = ColumnReader(document, _KIND, _VERSION)
    page = _read_page(reader)
    digest, totals = hashlib.sha256(document).digest(), _totals(page)
    size = size_of(reader) or stored
    return PageFacts(digest, len(page), totals, size, stored, _classes_of(reader), _read_notes(reader))


def open_page_document(
    document: Buffer, facts: PageFacts, read_page: Callable[[Buffer], Page] | None = None
) -> Page:
    """Return a page, a view of its document, which `read_page` decodes if it is of another format, whose
    samples are in order and do not overlap. Raises ColumnError unless that is the document that a snapshot
    describes by `facts`."""
    page, end = _checked_page(document, facts, read_page)
    if end > facts.size:
        raise ColumnError(f"its samples extend beyond the {facts.size} bytes of its file")
    return page


def page_mark(document: Buffer, facts: PageFacts, read_page: Callable[[Buffer], Page] | None = None) -> str:
    """Return a mark that says of which facts a document was found to be the page, whatever the size of the
    file. Raises ColumnError as `open_page_document` does."""
    _, end = _checked_page(document, facts, read_page)
    return f"{_facts_name(facts)}-{end}"


def is_marked(mark: str, facts: PageFacts) -> bool:
    """Return whether a document with this mark is the page that a snapshot describes by `facts`."""
    name, _, end = mark.partition("-")
    return name == _facts_name(facts) and end.isdecimal() and int(end) <= facts.size


def read_marked_page(document: Buffer) -> Page:
    """Return the page of a document that was checked when it was marked. Raises ColumnError."""
    return _read_page(ColumnReader(document, _KIND, _VERSION), checked=True)


def _facts_name(facts: PageFacts) -> str:
    told = (facts.digest, facts.samples, facts.totals, facts.classes)
    return hashlib.sha256(repr(told).encode()).hexdigest()


def _checked_page(
    document: Buffer, facts: PageFacts, read_page: Callable[[Buffer], Page] | None
) -> tuple[Page, int]:
    """Return a page and where its last sample ends. Raises ColumnError as `open_page_document` does."""
    if hashlib.sha256(document).digest() != facts.digest:
        raise ColumnError("its bytes do not have the hash that the snapshot names")
    if read_page is not None:
        page, classes = read_page(document), tuple[str, ...]()
    else:
        reader = ColumnReader(document, _KIND, _VERSION)
        page, classes = _read_page(reader), _classes_of(reader)
    totals = _totals(page)
    if (len(page), totals) != (facts.samples, facts.totals):
        raise ColumnError(
            f"it has {len(page)} samples of {sum(totals)} bytes; the snapshot says {facts.samples} of "
            f"{sum(facts.totals)}"
        )
    if classes != facts.classes:
        raise ColumnError(f"it has {len(classes)} classes; the snapshot says {len(facts.classes)}, or others")
    ends = [
        # Those of another format are known to be in order and apart.
        _last_end(offsets, lengths) if read_page is None else int(offsets[-1]) + int(lengths[-1])
        for offsets, lengths in zip(page.offsets, page.lengths, strict=True)
    ]
    return page, max(ends)


def size_of(reader: ColumnReader) -> int:
    """Return the uncompressed size that the document of an index names, 0 if it names none. Raises
    ColumnError."""
    size = reader.metadata.get("size", "0")
    if not (size.isdecimal() and len(size) < len(str(MAX_BYTES))):
        raise ColumnError(f"invalid file size {shown_value(size)}")
    return int(size)


def _totals(page: Page) -> tuple[int, ...]:
    return tuple(int(lengths.sum(dtype=np.int64)) for lengths in page.lengths)


def _last_end(offsets: Any, lengths: Any) -> int:
    """Return where the last of these ranges ends; in blocks, since a page is larger than what checks it."""
    return max(
        int((offsets[at : at + _BLOCK].astype(np.int64) + lengths[at : at + _BLOCK]).max())
        for at in range(0, offsets.size, _BLOCK)
    )


def _read_page(reader: ColumnReader, *, checked: bool = False) -> Page:
    """Decode a page. `checked`: its names were found to be in order before. Raises ColumnError."""
    count = reader.view_integers("offsets.0", low=0, high=MAX_BYTES).size
    parts = reader.read_text("parts")
    if not (parts.isdecimal() and 0 < len(parts) < 4 and int(parts)):
        raise ColumnError(f"invalid number of parts {shown_value(parts)}")
    offsets, lengths = (
        tuple(
            reader.view_integers(f"{column}.{part}", low=0, high=MAX_BYTES, count=count)
            for part in range(int(parts))
        )
        for column in ("offsets", "lengths")
    )
    classes = None
    if reader.has_column("class"):
        most = max(0, len(reader.read_strings("classes")) - 1)
        classes = reader.view_integers("class", low=0, high=most, count=count)
    return Page(offsets, lengths, _read_names(reader, count, checked=checked), first=0, classes=classes)


def _read_names(reader: ColumnReader, count: int, *, checked: bool) -> PageNames | Narrow | None:
    if reader.has_column("numbers"):
        numbers = reader.view_integers("numbers", low=0, high=MAX_BYTES, count=count)
        for at in range(0, 0 if checked else count, _BLOCK):
            if (np.diff(numbers[at : at + _BLOCK + 1].astype(np.int64)) <= 0).any():
                raise ColumnError("the records of the page are out of order")
        return numbers
    if not reader.has_column("ends"):
        return None
    blob = reader.view_bytes("names")
    ends = reader.view_integers("ends", low=0, high=blob.size, count=count)
    if checked:
        return PageNames(blob, ends)
    for at in range(0, ends.size, _BLOCK):
        if (np.diff(ends[at : at + _BLOCK + 1].astype(np.int64)) < 0).any():
            raise ColumnError("the names of the page are out of order")
    if (int(ends[-1]) if ends.size else 0) != blob.size:
        raise ColumnError("the names of the page do not add up to its text")
    names = PageNames(blob, ends)
    if blob.size and int(blob.max()) >= 0x80:
        names.all()  # raises ColumnError for what is not UTF-8
    return names


def _classes_of(reader: ColumnReader) -> tuple[str, ...]:
    return tuple(reader.read_strings("classes")) if reader.has_column("class") else ()


def _read_notes(reader: ColumnReader) -> PageNotes:
    try:
        skipped, examples, files, extensions, *more = read_json(reader.read_text("notes"))
        kinds, told = more or ((), {})
        return PageNotes(
            int(skipped),
            tuple((str(name), tuple(map(int, parts))) for name, parts in examples),
            int(files),
            {str(ext): int(count) for ext, count in extensions.items()},
            tuple(map(str, kinds)),
            {str(name): str(kind) for name, kind in told.items()},
        )
    except (PlanError, ValueError, TypeError, AttributeError) as error:
        raise ColumnError(f"the notes of the page are malformed: {error}") from error
