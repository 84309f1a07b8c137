"""Statistics of a snapshot: how many samples each class has, and how large the values of a field are.

A pure function of the snapshot's columns: no object is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshwire.dataset.build_snapshot import LabelColumn

if TYPE_CHECKING:
    from meshwire.dataset.build_snapshot import Snapshot

MAX_CLASSES: Final = 1000
"""Classes of a field that are listed, those with the most samples first."""
_BLOCK: Final = 1 << 20


def snapshot_statistics(snapshot: Snapshot) -> dict[str, Any]:
    """Return the snapshot's summary with `source`, `buckets`, and more of each of its `fields`.

    Of a label: the number of `classes`, and `counts`, a list of [class, samples]. Of bytes: `bytes` in total,
    `least`, `most`, and a `histogram`, a list of [lowest size, samples], in which each lowest size is twice
    the preceding one.
    """
    summary = snapshot.summary()
    for name in snapshot.own_fields():
        column = snapshot.fields[name]
        if isinstance(column, LabelColumn):
            summary["fields"][name] |= _label(column)
        else:
            summary["fields"][name] |= _sizes(snapshot, name)
    return {**summary, "source": snapshot.source, "buckets": list(snapshot.objects.buckets)}


def _label(column: LabelColumn) -> dict[str, Any]:
    counts = column.counts()
    order = np.argsort(-counts, kind="stable")[:MAX_CLASSES].tolist()
    named = [
        [column.classes[number] if number < len(column.classes) else str(number), int(counts[number])]
        for number in order
    ]
    return {"classes": len(counts), "counts": named}


def _sizes(snapshot: Snapshot, name: str) -> dict[str, Any]:
    """Count in blocks: the sizes of a large table exist only while they are looked at."""
    samples = snapshot.samples
    bins, total = np.zeros(65, np.int64), 0
    least, most = 0, 0
    for start in range(0, samples, _BLOCK):
        block = snapshot.lengths_of(name, np.arange(start, min(start + _BLOCK, samples)))
        # frexp is exact: a size from 2**(n-1) to 2**n - 1 has the exponent n, and 0 has 0.
        bins += np.bincount(np.frexp(block.astype(np.float64))[1], minlength=65)
        total += int(block.sum())
        least = int(block.min()) if start == 0 else min(least, int(block.min()))
        most = max(most, int(block.max()))
    used = np.flatnonzero(bins)
    shown = range(int(used[0]), int(used[-1]) + 1) if used.size else ()
    return {
        "bytes": total,
        "least": least,
        "most": most,
        "histogram": [[1 << (n - 1) if n else 0, int(bins[n])] for n in shown],
    }
