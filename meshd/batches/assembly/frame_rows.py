"""Rows of a frame: from an address to the samples at its positions, for a whole frame or this node's part.

Law: the rows are a pure function of the address, the plan and its snapshot or pack table. The part of a node
depends on the cluster map, too: under one map version each row belongs to exactly one node, the first holder
of the object with most of the bytes of the row.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from meshd.core.api_errors import BatchError
from meshd.core.frame_address import RowsAddress
from meshd.core.sample_locations import main_objects
from meshd.datasets.service import invalid_plan
from meshwire.dataset.build_snapshot import Snapshot
from meshwire.frame.tensor_frame import Status
from meshwire.plan.epoch_order import epoch_order, mix_bounds, snapshot_order
from meshwire.plan.rank_slices import batch_rows, rank_rows, rank_slice
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from meshd.core.frame_address import Address, FrameAddress
    from meshd.core.peer_source import PeerSource
    from meshd.core.plan_record import Plan
    from meshwire.plan.plan_spec import PlanSpec
    from meshwire.plan.rank_slices import RankSlice
    from meshwire.plan.sequence_packing import PackTable
    from meshwire.plan.shuffle import SampleOrder

MAX_FRAME_ROWS = 1 << 18
_ORDERS = 64
# Positions that are looked up together: batches follow each other, and a call costs more than a row.
_RUN = 16384
_RUNS = 32
_AT_A_TIME = 1024


class Rows(msgspec.Struct, eq=False):
    """The rows of a frame. `positions` and `samples` are int64[n], `status` is uint8[n].

    After substitution, `samples` has the substitutes. `partners` int64[n], if the plan mixes rows: the
    sample at position ^ 1, -1 for none. `places` int64[n], for a part of a frame: row numbers in the frame.
    """

    positions: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int64]
    status: npt.NDArray[np.uint8]
    partners: npt.NDArray[np.int64] | None = None
    places: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return int(self.positions.size)

    def select_rows(self, kept: npt.NDArray[np.int64]) -> Rows:
        partners = None if self.partners is None else self.partners[kept]
        return Rows(self.positions[kept], self.samples[kept], self.status[kept], partners)

    def part_rows(self, places: npt.NDArray[np.int64]) -> Rows:
        """Return some of the rows, with their row numbers in the frame as `places`."""
        part = self.select_rows(places)
        part.places = places
        return part


def new_rows(positions: Any, samples: Any, pad: Any | None = None) -> Rows:
    """Return new rows: status 0, or 3 where `pad` is set."""
    count = len(positions)
    status = np.zeros(count, dtype=np.uint8)
    if pad is not None:
        status[pad] = Status.PAD
    return Rows(np.array(positions, dtype=np.int64), np.array(samples, dtype=np.int64), status)


class RowLookup:
    """Returns the rows of frames; caches the sample orders of recent epochs, and parts of them."""

    def __init__(self) -> None:
        self._orders: OrderedDict[tuple[str, int], SampleOrder] = OrderedDict()
        self._runs: OrderedDict[tuple[SampleOrder, int], npt.NDArray[np.int64]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<RowLookup, {len(self._orders)} orders>"

    def rows_at(self, address: Address, plan: Plan, within: Snapshot | PackTable) -> Rows:
        """Return the rows of an address; `within`: the snapshot of the plan, or its pack table.

        Raises BatchError InvalidPlan.
        """
        if isinstance(address, RowsAddress):
            return _chosen_rows(address, plan)
        piece = slice_of(plan, address)
        order = self._order(plan, within, address.epoch)
        rows = new_rows(piece.positions, self._samples_at(order, piece.positions), piece.pad)
        if plan.pairs is not None:
            rows.partners = _mix_partners(rows.positions, plan.positions, order.samples_at)
        return rows

    def rows_of_steps(
        self, steps: Sequence[FrameAddress], plan: Plan, within: Snapshot | PackTable
    ) -> list[Rows]:
        """Return the rows of consecutive steps, as `rows_at` does, looked up together if they are whole
        batches of one rank. Nobody may change them. Raises BatchError InvalidPlan."""
        first, batch, begin = steps[0], steps[0].batch, steps[0].first_position
        count = len(steps) * batch
        if first.world > 1 or plan.pairs is not None or begin + count > plan.positions:
            return [self.rows_at(step, plan, within) for step in steps]
        positions = np.arange(begin, begin + count, dtype=np.int64)
        samples = self._samples_at(self._order(plan, within, first.epoch), positions)
        whole = new_rows(positions, samples)
        return [
            Rows(
                whole.positions[start : start + batch],
                whole.samples[start : start + batch],
                whole.status[start : start + batch],
            )
            for start in range(0, count, batch)
        ]

    def _samples_at(self, order: SampleOrder, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the samples at the positions of a frame, which mostly follow each other."""
        count = positions.size
        if not count or int(positions[-1]) != int(positions[0]) + count - 1:  # it goes on with the first ones
            return order.samples_at(positions)
        first, end = int(positions[0]), int(positions[-1]) + 1
        runs = [self._run(order, number) for number in range(first // _RUN, (end - 1) // _RUN + 1)]
        begin = first % _RUN
        return (runs[0] if len(runs) == 1 else np.concatenate(runs))[begin : begin + count]

    def _run(self, order: SampleOrder, number: int) -> npt.NDArray[np.int64]:
        found = self._runs.get((order, number))
        if found is None:
            end = min((number + 1) * _RUN, order.n)
            found = order.samples_at(np.arange(number * _RUN, end, dtype=np.int64))
            self._runs[order, number] = found
            if len(self._runs) > _RUNS:
                self._runs.popitem(last=False)
        self._runs.move_to_end((order, number))
        return found

    def _order(self, plan: Plan, within: Snapshot | PackTable, epoch: int) -> SampleOrder:
        key = plan.hash, epoch
        found = self._orders.get(key)
        if found is None:
            if isinstance(within, Snapshot):
                found = snapshot_order(plan.spec, within, epoch)
            else:
                found = epoch_order(plan.spec, within.shard_starts, epoch, pack_row_bounds(within, plan.spec))
            self._orders[key] = found
            if len(self._orders) > _ORDERS:
                self._orders.popitem(last=False)
        self._orders.move_to_end(key)
        return found


def slice_of(plan: Plan, address: FrameAddress) -> RankSlice:
    """Return the rows of an address. Raises BatchError InvalidPlan."""
    try:
        return rank_slice(
            plan.positions,
            address.batch,
            address.origin,
            address.step,
            address.rank,
            address.world,
            plan.spec.tail,
        )
    except PlanError as error:
        raise _outside(plan, error) from error


def _outside(plan: Plan, error: PlanError) -> BatchError:
    """Return the error for an address outside the epoch, with the positions of an epoch for programs."""
    refused = invalid_plan(error)
    refused.detail["positions"] = plan.positions
    return refused


def _chosen_rows(address: RowsAddress, plan: Plan) -> Rows:
    samples = np.array(address.samples, dtype=np.int64)
    if samples.size and (int(samples.min()) < 0 or int(samples.max()) >= plan.samples):
        raise invalid_plan(PlanError("samples", f"indices must be in 0…{plan.samples - 1}"))
    rows = new_rows(samples, samples)
    if plan.pairs is not None:
        rows.partners = _mix_partners(samples, plan.samples, lambda positions: positions)
    return rows


def _mix_partners(
    positions: npt.NDArray[np.int64],
    count: int,
    samples: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]],
) -> npt.NDArray[np.int64]:
    """Return the sample at position ^ 1 of each; -1 if that is beyond the epoch's `count` positions."""
    others = positions ^ 1
    inside = others < count
    found = np.full(len(positions), -1, dtype=np.int64)
    found[inside] = samples(others[inside])
    return found


def pack_row_bounds(table: PackTable, spec: PlanSpec) -> npt.NDArray[np.int64] | None:
    """Return where the rows of each part of a mix begin, and the last end; None without a mix."""
    if spec.mix is None:
        return None
    firsts = table.samples[table.row_starts[:-1]]
    return np.searchsorted(firsts, mix_bounds(spec.mix)).astype(np.int64)


def count_rows(address: Address, plan: Plan) -> int:
    """Return the number of rows of a frame from its address. Raises BatchError InvalidPlan, TooLarge."""
    if isinstance(address, RowsAddress):
        return len(address.samples)
    try:
        whole = batch_rows(plan.positions, address.batch, address.origin, address.step, plan.spec.tail)
        first, end = rank_rows(whole, address.rank, address.world)
    except PlanError as error:
        raise _outside(plan, error) from error
    if end - first > MAX_FRAME_ROWS:
        raise BatchError(
            "TooLarge",
            f"the frame would have {end - first} rows; at most {MAX_FRAME_ROWS} are assembled",
            help="use a smaller batch, or more ranks",
        )
    return end - first


def real_rows(address: FrameAddress, plan: Plan, rank: int, world: int) -> int:
    """Return the number of rows of a slice that are not padding of the last batch."""
    whole = batch_rows(plan.positions, address.batch, address.origin, address.step, plan.spec.tail)
    first, end = rank_rows(whole, rank, world)
    left = plan.positions - address.first_position
    return max(0, min(end, left) - first)


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


async def own_rows(remote: PeerSource, snapshot: Snapshot, rows: Rows, version: int) -> npt.NDArray[np.int64]:
    """Return the rows that this node builds under this version of the cluster map.

    Raises BatchError NotOwner if this node uses another version.
    """
    if not await remote.reaches_map_version(version):
        raise _other_map(version)
    numbers, places = np.unique(main_objects(snapshot, rows.samples), return_inverse=True)
    objects, own = snapshot.objects, np.zeros(len(numbers), dtype=np.bool_)
    for start in range(0, len(numbers), _AT_A_TIME):
        for place, number in enumerate(numbers[start : start + _AT_A_TIME].tolist(), start):
            own[place] = remote.is_first_replica(objects.bucket_of(number), objects.keys[number])
        await asyncio.sleep(0)  # give other frames a turn
    if not await remote.reaches_map_version(version):
        raise _other_map(version)
    return np.flatnonzero(own[places])


def _other_map(version: int) -> BatchError:
    return BatchError(
        "NotOwner", f"this node does not use version {version} of the cluster map; request the whole frame"
    )
