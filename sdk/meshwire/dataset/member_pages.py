"""Pages of archives: where the members of each sample are, for some extensions."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import numpy as np

from meshwire.dataset.fields import class_name
from meshwire.dataset.page_document import write_page
from meshwire.dataset.paged_snapshot import PageNotes
from meshwire.frame.columns import StringColumn
from meshwire.strict_json import PlanError, shown_value

if TYPE_CHECKING:
    from meshwire.dataset.archive_index import ShardIndex
    from meshwire.dataset.paged_snapshot import PageParts

EXAMPLES: Final = 5
"""Samples that are left out, of which messages show the names."""
_EXTENSIONS: Final = 32
_EXTENSION_CHARS: Final = 100


def write_member_page(index: ShardIndex, size: int, wanted: PageParts) -> bytes:
    """Encode the page of an archive of `size` bytes after decompression: its samples that have all parts and,
    if the archive has classes of its own, a class. Raises PlanError for an index of another archive."""
    if (index.offsets + index.sizes > size).any():
        raise PlanError("source", f"the index of an archive extends beyond its {size} bytes; index it again")
    stems = index.stems()
    columns = [index.members_with(extensions) for extensions in wanted.parts]
    lacking = {part: column < 0 for part, column in enumerate(columns)}
    folders = [class_name(stem, "") for stem in stems] if wanted.in_shards else []
    if wanted.in_shards:
        lacking[-1] = np.fromiter((folder is None for folder in folders), np.bool_, len(folders))
    left_out = np.logical_or.reduce(list(lacking.values()))
    skipped, kept = np.flatnonzero(left_out), np.flatnonzero(~left_out)
    examples = tuple(
        (shown_value(stems[sample]), tuple(part for part, mask in lacking.items() if mask[sample]))
        for sample in skipped[:EXAMPLES].tolist()
    )
    counts = Counter(dict(enumerate(np.bincount(index.extension).tolist()))).most_common(_EXTENSIONS)
    named = {index.extensions[number][:_EXTENSION_CHARS]: count for number, count in counts if count}
    places = [(index.offsets[column[kept]], index.sizes[column[kept]]) for column in columns]
    names = StringColumn.from_strings([stems[sample] for sample in kept.tolist()])
    notes = PageNotes(skipped.size, examples, len(index.names), named)
    if not wanted.in_shards:
        return write_page(places, names, None, notes, size)
    chosen = [folders[sample] or "" for sample in kept.tolist()]
    classes = sorted(set(chosen))
    numbers = {name: number for number, name in enumerate(classes)}
    own = np.fromiter((numbers[name] for name in chosen), np.int64, len(chosen))
    return write_page(places, names, (own, classes), notes, size)
