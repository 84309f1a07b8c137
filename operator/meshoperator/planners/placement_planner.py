"""Placement planner: chooses nodes for the copies of datasets: filter, score, spread, hysteresis, bandwidth.

Law: pure and deterministic: the order of the inventory does not change the placement.
Invariant: no two copies of a dataset on one node, no new copy above the watermark or on a node that does not
accept data, no move for less than `move_gain`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from meshoperator.planners.placement_model import Assignment, GpuProximity, Move, NodeTopology, Placement

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshoperator.planners.placement_model import Dataset, Demand, Inventory
    from meshoperator.settings import OperatorSettings

_SPACE: Final = 0.2  # weight of an empty node over a full one
_TIER: Final = 0.3  # weight of the preferred disks over other disks
_APART: Final = {
    "Zone": (4.0, 2.0),
    "Rack": (0.25, 2.0),
    "Host": (0.0, 0.0),
}  # in another zone, in another rack


def _others(numbers: npt.NDArray[np.intp], chosen: list[int]) -> npt.NDArray[np.bool_]:
    """Return the nodes whose zone (or rack) is that of none of the chosen ones."""
    other = np.ones(int(numbers.max()) + 1, np.bool_)  # `isin` asks for the range of the numbers each time
    other[numbers[chosen]] = False
    found: npt.NDArray[np.bool_] = other[numbers]
    return found


def plan_placement(inventory: Inventory, settings: OperatorSettings) -> Placement:
    """Return places for all copies, the moves that lead there, and the copies without a place."""
    return _PlacementPlanner(inventory, settings).run()


class _PlacementPlanner:
    def __init__(self, inventory: Inventory, settings: OperatorSettings) -> None:
        self._inventory, self._settings = inventory, settings
        self.land = NodeTopology(inventory.nodes)
        self.limit = self.land.capacity * settings.high_watermark
        self._demand: dict[str, list[Demand]] = {}
        for each in inventory.demand:
            self._demand.setdefault(each.dataset, []).append(each)
        self._free = sorted(inventory.free_gpus, key=lambda each: each.node)
        sizes = {each.name: each.size for each in inventory.datasets}
        self._budget = settings.move_bytes - sum(sizes.get(name, 0) for name in inventory.moving)
        self._moving = set(inventory.moving)
        self.assignments: list[Assignment] = []
        self.moves: list[Move] = []
        self.deferred: list[Move] = []
        self.released: list[tuple[str, str]] = []
        self.unplaced: dict[str, str] = {}
        self.considered: dict[str, str] = {}

    def run(self) -> Placement:
        for dataset in sorted(self._inventory.datasets, key=lambda each: (-each.priority, each.name)):
            demand = self._demand.get(dataset.name, ())
            wanted = GpuProximity(self.land, dataset, sorted(demand, key=repr), self._free)
            held = self._inventory.current.get(dataset.name, ())
            _DatasetPlacer(
                self, dataset, wanted, sorted({self.land.place[n] for n in held if n in self.land.place})
            ).run()
        return Placement(
            tuple(self.assignments),
            tuple(self.moves),
            self.unplaced,
            tuple(self.deferred),
            tuple(self.released),
            self.considered,
        )

    def may_move(self, dataset: Dataset) -> bool:
        """Take the bandwidth for one optional move; return whether there was enough. A dataset larger than
        the whole budget moves when nothing else does."""
        if not self._settings.move_bytes or dataset.name in self._inventory.moving:
            return False  # moves in progress come first
        crowded = dataset.name not in self._moving and len(self._moving) >= self._settings.moves_at_once
        if crowded or (dataset.size > self._budget and self._moving):
            return False
        self._moving.add(dataset.name)
        self._budget -= dataset.size
        return True

    @property
    def gain(self) -> float:
        """The least gain of a move."""
        return self._settings.move_gain

    @property
    def enough(self) -> float:
        """The number of GPUs that justify one more copy."""
        return self._settings.copy_gpus

    @property
    def share(self) -> int:
        """The watermark, in percent."""
        return round(self._settings.high_watermark * 100)


class _DatasetPlacer:
    """Places one dataset: keeps existing copies, adds missing ones, then moves single copies while that is
    worthwhile."""

    def __init__(
        self, planner: _PlacementPlanner, dataset: Dataset, wanted: GpuProximity, held: list[int]
    ) -> None:
        self._planner, self._dataset, self._wanted, self._held = planner, dataset, wanted, held
        land = planner.land
        self._matching = land.matching(dataset.selector)
        self._eligible = land.accepting & self._matching
        self._stays = (land.accepting | land.keeping) & self._matching
        self._fit = _TIER * land.fit(dataset.tiers)
        self._chosen: list[int] = []
        self._because: dict[int, str] = {}  # reasons of improving moves

    def run(self) -> None:
        self._chosen = self._staying()
        dropped = [place for place in self._held if place not in self._chosen]
        self._fill()
        if not self._dataset.full:
            self._improve()
            self._add_more()
        self._tell(dropped)

    # --- what stays ---------------------------------------------------------------------------------------

    def _staying(self) -> list[int]:
        """Return the existing copies to keep, most valuable first."""
        rest = [place for place in self._held if self._stays[place]]
        if self._dataset.full:
            return rest
        chosen: list[int] = []
        while rest and len(chosen) < self._dataset.copies + self._dataset.more:
            worth = self._worth(chosen)
            best = max(rest, key=lambda place: (worth[place], -place))
            if (
                len(chosen) >= self._dataset.copies
                and self._served_gpus(chosen)[best] < self._planner.enough / 2
            ):
                break  # beyond those requested, and few GPUs are nearest to it
            rest.remove(best)
            chosen.append(best)
        return chosen

    # --- what is added ------------------------------------------------------------------------------------

    def _fill(self) -> None:
        if self._dataset.full:
            for place in np.flatnonzero(self._candidates()).tolist():
                self._add(place)
            self._note_missing(int(self._eligible.sum()))
            return
        while len(self._chosen) < self._dataset.copies:
            best = self._best(self._chosen)
            if best is None:
                break
            self._add(best)
        self._note_missing(self._dataset.copies)

    def _add_more(self) -> None:
        """Add further copies, each for GPUs that are far from all others."""
        while len(self._chosen) < self._dataset.copies + self._dataset.more:
            if len(self._chosen) < self._dataset.copies:
                return
            served = np.where(self._candidates(), self._served_gpus(self._chosen), -1.0)
            best = int(np.argmax(served)) if len(served) else 0
            if not len(served) or served[best] < self._planner.enough:
                return
            move = Move(
                self._dataset.name,
                None,
                self._name(best),
                self._dataset.size,
                self._wanted.describe_levels(best),
            )
            if not self._planner.may_move(self._dataset):
                self._planner.deferred.append(move)
                return
            self._because[best] = (
                f"one more copy: {self._wanted.describe_levels(best)} were far from the others"
            )
            self._add(best)

    # --- what is moved ------------------------------------------------------------------------------------

    def _improve(self) -> None:
        """Move single copies that would be much better elsewhere, greatest gain first."""
        for _ in range(2 * len(self._chosen)):
            found = self._best_swap()
            if found is None:
                return
            source, target, gain = found
            reason = (
                f"{self._wanted.describe_levels(target) or 'better disks, or further apart'} (+{gain:.2f})"
            )
            if not self._planner.may_move(self._dataset):
                self._planner.deferred.append(
                    Move(
                        self._dataset.name, self._name(source), self._name(target), self._dataset.size, reason
                    )
                )
                return
            self._chosen.remove(source)
            self._because.pop(source, None)
            self._because[target] = f"moved from {self._name(source)}: {reason}"
            self._add(target)

    def _best_swap(self) -> tuple[int, int, float] | None:
        found: tuple[int, int, float] | None = None
        candidates = self._candidates()
        candidates[self._held] = False  # no moves back and forth
        if not candidates.any():
            return None
        for source in [place for place in self._chosen if place in self._held]:
            worth = self._worth([place for place in self._chosen if place != source])
            best = int(np.argmax(np.where(candidates, worth, -np.inf)))
            gain = float(worth[best] - worth[source])
            if gain >= self._planner.gain and gain > 0 and (found is None or gain > found[2]):
                found = (source, best, gain)
        return found

    # --- judging ------------------------------------------------------------------------------------------

    def _candidates(self) -> npt.NDArray[np.bool_]:
        """Return the nodes that could take one more copy."""
        land = self._planner.land
        found = self._eligible & (land.used + self._dataset.size <= self._planner.limit)
        found[self._held] |= self._eligible[self._held]  # an existing copy needs no further space
        found[self._chosen] = False
        return found

    def _gains(self, chosen: list[int]) -> npt.NDArray[np.float64]:
        self._wanted.set_copies(chosen)
        return self._wanted.gains()

    def _served_gpus(self, chosen: list[int]) -> npt.NDArray[np.float64]:
        """Return, for each node, the GPUs that one more copy there brings nearer, weighted by nearness."""
        return np.round(self._gains(chosen) * self._wanted.total, 6)

    def _worth(self, chosen: list[int]) -> npt.NDArray[np.float64]:
        """Return the score of one more copy on each node: nearness, disks, and distance from the chosen
        copies."""
        land = self._planner.land
        other_zone, other_rack = _APART[self._dataset.spread] if chosen else (0.0, 0.0)
        zones = _others(land.zone, chosen) if other_zone else np.zeros(len(land.nodes), np.bool_)
        racks = _others(land.rack, chosen) if other_rack else np.zeros(len(land.nodes), np.bool_)
        found: npt.NDArray[np.float64] = (
            self._gains(chosen) + self._fit + other_zone * zones + other_rack * racks
        )
        return found

    def _best(self, chosen: list[int]) -> int | None:
        """Return the best place for one more copy."""
        candidates = self._candidates()
        if not candidates.any():
            return None
        score = self._worth(chosen) + _SPACE * self._planner.land.emptiness()
        return int(np.argmax(np.where(candidates, np.round(score, 9), -np.inf)))

    def _add(self, place: int) -> None:
        self._chosen.append(place)
        if place not in self._held:
            self._planner.land.used[place] += self._dataset.size

    # --- telling ------------------------------------------------------------------------------------------

    def _tell(self, dropped: list[int]) -> None:
        planner, name = self._planner, self._dataset.name
        planner.assignments += [
            Assignment(name, self._name(place), self._reason(place)) for place in self._chosen
        ]
        complete = name not in planner.unplaced
        leaving = [place for place in self._held if place not in self._chosen]
        # copies on departing nodes are replaced first
        leaving.sort(key=lambda place: (bool(self._stays[place]), place not in dropped, place))
        for target in (place for place in self._chosen if place not in self._held):
            source = self._name(leaving.pop(0)) if leaving else None
            planner.moves.append(
                Move(name, source, self._name(target), self._dataset.size, self._reason(target))
            )
        if complete:  # until then every existing copy counts
            planner.released += [(name, self._name(place)) for place in leaving]
        planner.considered[name] = self._describe_candidates()

    def _reason(self, place: int) -> str:
        if place in self._because:
            return self._because[place]
        start = "keeps its copy" if place in self._held else "new copy"
        if self._dataset.full:
            return f"{start}: one on every matching node"
        near = self._wanted.describe_levels(place)
        return f"{start}: {near or ('already there' if place in self._held else 'most free space')}"

    def _describe_candidates(self) -> str:
        land = self._planner.land
        full = self._eligible & (land.used + self._dataset.size > self._planner.limit)
        full[self._chosen] = False
        reasons = [
            (int((~land.accepting).sum()), "accept no data"),
            (int((land.accepting & ~self._matching).sum()), "have other labels"),
            (int(full.sum()), f"would be above {self._planner.share} %"),
        ]
        out = ", ".join(f"{count} {why}" for count, why in reasons if count)
        return f"of {len(land.nodes)} nodes {out or 'all were possible'}"

    def _note_missing(self, wanted: int) -> None:
        if len(self._chosen) < wanted:
            self._planner.unplaced[self._dataset.name] = (
                f"{len(self._chosen)} of {wanted} copies placed: no other accepting node with the "
                f"requested labels stays below {self._planner.share} % with {self._dataset.size} bytes more"
            )

    def _name(self, place: int) -> str:
        return self._planner.land.nodes[place].name
