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
    """Raises BatchError BadRequest if frames of this plan cannot be built in parts."""
    ragged = [name for name, output in plan.columns.items() if output.shape is None]
    if ragged or plan.within or not plan.outputs:
        why = (
            "its rows are packed"
            if plan.within
            else f"the rows of {ragged[0]!r} differ in size"
            if ragged
            else "it has no fields of bytes"
        )
        raise BatchError(
            "BadRequest", f"a frame of this plan cannot be built in parts ({why}); request the whole frame"
        )


def main_objects(snapshot: Snapshot, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return for each sample the number of the object that holds most of its bytes. int64[n].

    Among equals, the field that is named first wins.
    """
    columns = list(bytes_columns(snapshot).values())
    lengths = np.stack([column.length[samples] for column in columns])
    objects = np.stack([column.object[samples] for column in columns])
    chosen = np.argmax(lengths, axis=0)
    return np.asarray(objects[chosen, np.arange(len(samples))], dtype=np.int64)


async def own_rows(
    elsewhere: RemoteSource, snapshot: Snapshot, rows: Rows, version: int
) -> npt.NDArray[np.int64]:
    """Return the rows that this node builds under this version of the cluster map.

    Raises BatchError NotOwner if this node uses another version.
    """
    if not await elsewhere.reaches_map_version(version):
        raise _other_map(version)
    numbers, places = np.unique(main_objects(snapshot, rows.samples), return_inverse=True)
    objects, own = snapshot.objects, np.zeros(len(numbers), dtype=np.bool_)
    for start in range(0, len(numbers), _AT_A_TIME):
        for place, number in enumerate(numbers[start : start + _AT_A_TIME].tolist(), start):
            own[place] = elsewhere.is_first_replica(objects.bucket_of(number), objects.keys[number])
        await asyncio.sleep(0)  # give other frames a turn
    if not await elsewhere.reaches_map_version(version):
        raise _other_map(version)
    return np.flatnonzero(own[places])


def _other_map(version: int) -> BatchError:
    return BatchError(
        "NotOwner", f"this node does not use version {version} of the cluster map; request the whole frame"
    )
