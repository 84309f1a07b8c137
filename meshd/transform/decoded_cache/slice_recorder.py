"""Records what one slice does with the decoded cache, in a transform process, and appends its entries.

Law: a failed write ends storing for the slice, never the row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshd.transform.decoded_cache.entry_format import can_keep
from meshd.transform.decoded_cache.messages import PrefixCost, PrefixReport, StoredEntry, TableUse

if TYPE_CHECKING:
    from meshd.transform.decoded_cache.messages import FieldOrder, TableOrder
    from meshd.transform.decoded_cache.segment_files import SegmentFiles
    from meshd.transform.messages import OpStats, RenderRequest
    from meshd.util.clock import WorkClock


class _Use:
    """What the slice did with one table; see `TableUse`."""

    __slots__ = (
        "hit_bytes",
        "hit_seconds",
        "hits",
        "made",
        "made_bytes",
        "made_seconds",
        "store_seconds",
        "stores",
    )

    def __init__(self) -> None:
        self.hits = self.made = self.stores = self.hit_bytes = self.made_bytes = 0
        self.hit_seconds = self.made_seconds = self.store_seconds = 0.0


class SliceRecorder:
    """What a slice did. `files`: the segments; `tally`: the slice's; `clock`: measures costs."""

    def __init__(self, files: SegmentFiles, request: RenderRequest, tally: OpStats, clock: WorkClock) -> None:
        self.files, self.tally, self.clock = files, tally, clock
        self._paths, self._orders = request.paths, request.prefixes
        self._uses: dict[int, _Use] = {}
        self._costs: dict[tuple[int, int, int, str], list[float]] = {}
        self._stored: list[StoredEntry] = []
        self._damaged: list[tuple[int, int]] = []
        self._full = False

    def report(self) -> PrefixReport:
        """Return what was measured, read and stored."""
        costs = tuple(
            PrefixCost(*key, int(calls), seconds, int(size), int(source))
            for key, (calls, seconds, size, source) in self._costs.items()
        )
        uses = tuple(
            TableUse(
                table,
                use.hits,
                use.hit_seconds,
                use.hit_bytes,
                use.made,
                use.made_seconds,
                use.made_bytes,
                use.stores,
                use.store_seconds,
            )
            for table, use in self._uses.items()
        )
        return PrefixReport(costs, tuple(self._stored), uses, tuple(self._damaged), self._full)

    def order_of(self, number: int) -> FieldOrder:
        """Return what to do for a field."""
        return self._orders[number]

    def path(self, number: int) -> str:
        """Return a path of the request by its index."""
        return self._paths[number]

    def add_cost(self, key: tuple[int, int, int, str], seconds: float, size: int, source: int) -> None:
        """Add what a possible prefix (field, steps, variant, digest) took for `source` bytes of a file."""
        cost = self._costs.setdefault(key, [0, 0.0, 0, 0])
        cost[0] += 1
        cost[1] += seconds
        cost[2] += size
        cost[3] += source

    def add_made(self, table: int, seconds: float, size: int) -> None:
        """Note that a result was computed."""
        use = self._uses.setdefault(table, _Use())
        use.made += 1
        use.made_seconds += seconds
        use.made_bytes += size

    def add_hit(self, table: int, seconds: float, size: int) -> None:
        """Note that an entry was read."""
        use = self._uses.setdefault(table, _Use())
        use.hits += 1
        use.hit_seconds += seconds
        use.hit_bytes += size
        self.tally.reading += seconds

    def add_damaged(self, table: int, sample: int) -> None:
        """Note that an entry could not be used."""
        self._damaged.append((table, sample))

    def store(
        self, table: TableOrder, sample: int, value: Any, image: tuple[int, int, bool] = (0, 0, False)
    ) -> bool:
        """Append a value to the segment of its table, if it can be kept. Returns whether it was."""
        if self._full or table.segment < 0 or not can_keep(value):
            return False
        began = self.clock.mark()
        try:
            path = self.path(table.segment)
            place = self.files.append(path, table.table, sample, value, image, table.capacity)
        except OSError:
            self._full = True
            return False
        use = self._uses.setdefault(table.table, _Use())
        use.stores += 1
        use.store_seconds += self.clock.since(began)
        self._stored.append(StoredEntry(table.table, sample, *place))
        return True
