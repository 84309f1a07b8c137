"""Which rows of a frame a node makes when each node makes those whose bytes it holds.

Law: a pure function of the map, the snapshot and the rows: of the nodes that go by one version of the map
each row has exactly one, the first that is asked for the object with most of the row's bytes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from meshd.assembly.errors import BatchError
from meshd.assembly.sources import bytes_columns

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshd.assembly.drafting import Rows
    from meshd.assembly.elsewhere import Elsewhere
    from meshd.assembly.plans import Plan
    from meshwire.snapshots import Snapshot

_AT_A_TIME = 1024


def require_parts(plan: Plan) -> None:
    """Raises BatchError BadRequest where a frame is not to be had in parts."""
    ragged = [name for name, output in plan.columns.items() if output.shape is None]
    if ragged or plan.within or not plan.outputs:
        why = (
            "its rows are packed"
            if plan.within
            else f"the rows of {ragged[0]!r} differ"
            if ragged
            else "no bytes"
        )
        raise BatchError(
            "BadRequest", f"a frame of this plan does not come in parts ({why}); ask for all of it"
        )


def main_objects(snapshot: Snapshot, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each sample the number of the object that most of its bytes are in; of equals the field named
    first. int64[n]."""
    columns = list(bytes_columns(snapshot).values())
    lengths = np.stack([column.length[samples] for column in columns])
    objects = np.stack([column.object[samples] for column in columns])
    chosen = np.argmax(lengths, axis=0)
    return np.asarray(objects[chosen, np.arange(len(samples))], dtype=np.int64)


async def own_rows(
    elsewhere: Elsewhere, snapshot: Snapshot, rows: Rows, version: int
) -> npt.NDArray[np.int64]:
    """The rows this node makes by this version of the map. Raises BatchError NotOwner where it goes by
    another."""
    if not await elsewhere.goes_by(version):
        raise _other_map(version)
    numbers, places = np.unique(main_objects(snapshot, rows.samples), return_inverse=True)
    objects, own = snapshot.objects, np.zeros(len(numbers), dtype=np.bool_)
    for start in range(0, len(numbers), _AT_A_TIME):
        for place, number in enumerate(numbers[start : start + _AT_A_TIME].tolist(), start):
            own[place] = elsewhere.is_first(objects.bucket_of(number), objects.keys[number])
        await asyncio.sleep(0)  # other frames get their turn
    if not await elsewhere.goes_by(version):
        raise _other_map(version)
    return np.flatnonzero(own[places])


def _other_map(version: int) -> BatchError:
    return BatchError("NotOwner", f"this node does not go by version {version} of the map; ask for all of it")
