"""Parts of snapshots: a run of samples with one field, as a snapshot of its own.

Law: holds what the run needs and nothing else, so that what is made of it is named by its content alone.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from meshwire.columns import StringColumn
from meshwire.snapshots import BytesColumn, Snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence


def field_part(snapshot: Snapshot, name: str, samples: range) -> Snapshot:
    """The samples `samples` (a run) with the bytes field `name` only."""
    column = _column(snapshot, name)
    chosen = slice(samples.start, samples.stop)
    used, which = np.unique(column.object[chosen], return_inverse=True)
    places = BytesColumn(which.astype(np.int32), column.offset[chosen], column.length[chosen])
    names = None
    if snapshot.names is not None:
        names = StringColumn.of([snapshot.names[sample] for sample in samples])
    return Snapshot.sealed(
        snapshot.source,
        snapshot.kind,
        snapshot.objects.take(used.astype(np.int64)),
        np.array([0, len(samples)], dtype=np.int64),
        {name: places},
        {name: snapshot.specs[name]},
        names,
    )


def content_digest(snapshot: Snapshot, name: str, samples: range) -> bytes:
    """Names the bytes of a field of a run of samples by ETags, offsets and lengths; names do not count."""
    column = _column(snapshot, name)
    chosen = slice(samples.start, samples.stop)
    hasher = hashlib.sha256()
    for number in column.object[chosen].tolist():
        hasher.update(f"{snapshot.objects.etags[number]}\0".encode())
    hasher.update(column.offset[chosen].tobytes())
    hasher.update(column.length[chosen].tobytes())
    return hasher.digest()


def objects_of(snapshot: Snapshot, names: Sequence[str], samples: range) -> list[int]:
    """The objects that these bytes fields of a run of samples lie in."""
    columns = [_column(snapshot, name).object[samples.start : samples.stop] for name in names]
    found: list[int] = np.unique(np.concatenate(columns)).tolist()
    return found


def _column(snapshot: Snapshot, name: str) -> BytesColumn:
    column = snapshot.fields[name]
    assert isinstance(column, BytesColumn)
    return column
