"""Index of records: where each sample's parts are in their files, and the snapshot of a folder.

Law: a part (a feature of a TFRecord, a column of MDS) has one type in all files of a dataset.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshwire.dataset.page_document import write_page
from meshwire.dataset.paged_snapshot import PageNotes
from meshwire.dataset.snapshot import MAX_BYTES
from meshwire.frame.columns import ColumnError, ColumnReader, ColumnWriter
from meshwire.strict_json import shown_value

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwire.dataset.paged_snapshot import PageParts
    from meshwire.frame.columns import Integers
    from meshwire.frame.tensor_frame import Buffer

_KIND, _VERSION = "shardmesh.records", 1
MAX_RECORD_BYTES: Final = 1 << 32
_EXAMPLE_CHARS = 1000
_TOLD = 1000


@dataclass(frozen=True, slots=True, eq=False)
class RecordIndex:
    """Record positions. `numbers` int64[n]: the records that have every wanted part, from 0; `places` by
    part: offset and length int64[n] in the file; `kinds` by part ("" if no record has it); `told`: the
    existing parts with their kinds; `examples`: the first few records left out, and why; `size`:
    uncompressed bytes of the file, 0 if unknown."""

    numbers: Integers
    places: Mapping[str, tuple[Integers, Integers]]
    kinds: Mapping[str, str]
    skipped: int = 0
    examples: tuple[str, ...] = ()
    told: Mapping[str, str] = field(default_factory=dict)
    size: int = 0

    def to_bytes(self) -> bytes:
        facts = {
            "parts": list(self.places),
            "kinds": dict(self.kinds),
            "skipped": self.skipped,
            "examples": list(self.examples),
            "told": dict(self.told),
            "size": self.size,
        }
        writer = ColumnWriter(_KIND, _VERSION, {"facts": json.dumps(facts)})
        writer.add_integers("steps", np.diff(self.numbers, prepend=-1))
        for number, (offsets, lengths) in enumerate(self.places.values()):
            writer.add_integers(f"gaps.{number}", np.diff(offsets, prepend=0))
            writer.add_integers(f"lengths.{number}", lengths)
        return writer.to_bytes()

    @classmethod
    def from_bytes(cls, document: Buffer) -> RecordIndex:
        """Decode the document. Raises ColumnError for any other bytes."""
        reader = ColumnReader(document, _KIND, _VERSION)
        try:
            facts: dict[str, Any] = json.loads(reader.read_text("facts"))
            names, skipped = [str(name) for name in facts["parts"]], int(facts["skipped"])
            kinds, told, size = dict(facts["kinds"]), dict(facts["told"]), int(facts.get("size", 0))
            if not 0 <= size <= MAX_BYTES:
                raise ColumnError(f"invalid file size {shown_value(size)}")
            examples = tuple(map(str, facts["examples"]))
        except (ValueError, TypeError, KeyError) as error:
            raise ColumnError(f"the facts of the index are malformed: {error}") from error
        steps = reader.read_integers("steps", low=1, high=MAX_BYTES)
        places = {}
        for number, name in enumerate(names):
            gaps = reader.read_integers(f"gaps.{number}", low=0, high=MAX_BYTES, count=steps.size)
            lengths = reader.read_integers(
                f"lengths.{number}", low=0, high=MAX_RECORD_BYTES, count=steps.size
            )
            places[name] = np.cumsum(gaps), lengths
        return cls(np.cumsum(steps) - 1, places, kinds, skipped, examples, told, size)


def write_record_page(index: RecordIndex, parts: PageParts) -> bytes:
    """Encode the page of a file of records from an index of these parts."""
    names = [name for name, *_ in parts.parts]
    examples = tuple((example[:_EXAMPLE_CHARS], ()) for example in index.examples)
    told = dict(list(index.told.items())[:_TOLD])
    kinds = tuple(index.kinds[name] for name in names)
    notes = PageNotes(index.skipped, examples, kinds=kinds, told=told)
    nowhere = np.zeros(0, np.int64), np.zeros(0, np.int64)  # of a part that the file does not have
    places = [index.places.get(name, nowhere) for name in names]
    return write_page(places, index.numbers, None, notes, index.size)
