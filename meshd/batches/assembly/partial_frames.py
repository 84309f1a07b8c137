"""Selects the rows of a frame that this node builds when each node builds the rows whose bytes it holds.

Law: a pure function of the cluster map, the snapshot and the rows. Under one map version each row
belongs to exactly one node: the first holder of the object with most of the bytes of the row.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from meshd.core.api_errors import BatchError
from meshd.core.sample_locations import bytes_columns

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshd.batches.assembly.frame_buffer import Rows
    from meshd.core.plan_record import Plan
    from meshd.core.remote_source import RemoteSource
    from meshwire.dataset.build_snapshot import Snapshot

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
    elsewhere: RemoteSource, snapshot: Snapshot, rows: Rows, version: int
) -> npt.NDArray[np.int64]:
    """The rows this node makes by this version of the map. Raises BatchError NotOwner where it goes by
    another."""
    if not await elsewhere.reaches_map_version(version):
        raise _other_map(version)
    numbers, places = np.unique(main_objects(snapshot, rows.samples), return_inverse=True)
    objects, own = snapshot.objects, np.zeros(len(numbers), dtype=np.bool_)
    for start in range(0, len(numbers), _AT_A_TIME):
        for place, number in enumerate(numbers[start : start + _AT_A_TIME].tolist(), start):
            own[place] = elsewhere.is_first_replica(objects.bucket_of(number), objects.keys[number])
        await asyncio.sleep(0)  # other frames get their turn
    if not await elsewhere.reaches_map_version(version):
        raise _other_map(version)
    return np.flatnonzero(own[places])


def _other_map(version: int) -> BatchError:
    return BatchError("NotOwner", f"this node does not go by version {version} of the map; ask for all of it")
