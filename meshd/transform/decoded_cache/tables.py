"""Tables of the decoded cache: for one kind of result, where the entry of each sample lies; and which of them
a plan uses.

A table belongs to (snapshot, field, ops of the prefix, variant), whichever plans use it. Its index takes 12
bytes a sample.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from meshd.transform.decoded_cache import policy
from meshd.transform.decoded_cache.policy import Limit, Mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from meshd.transform.decoded_cache.messages import StoredEntry, TableUse
    from meshd.transform.decoded_cache.policy import Candidate
    from meshd.transform.decoded_cache.sample_set import OwnRows, SampleSet

JUDGED_READS: Final = 256
"""Reads after which a table is judged."""
SLOW: Final = 0.8
"""A table shrinks if reading takes longer than this share of computing."""
PAUSE_SECONDS: Final = 30.0
"""Time without new entries after writing them took longer than it saves."""
LIMIT_SECONDS: Final = 3600.0
"""Time after which a table that shrank may grow again."""
MOST_WHOLE: Final = 1 / 16
"""The share of slices of whole batches, with samples of all nodes, above which no sample counts as moved."""
_WHOLE_WEIGHT: Final = 1 / 32


class Segment(msgspec.Struct, eq=False):
    """A file of entries of one table. `capacity`: bytes from which on it takes no more entries."""

    number: int
    path: Path
    table: Table
    capacity: int
    end: int = 0
    """Where its last entry ends."""
    freed: int = 0
    """Bytes of entries whose disk space was given back."""
    entries: int = 0
    promised: int = 0
    """Bytes of the entries that its owner was asked to append."""
    owner: object | None = None
    """The transform process that appends to it."""

    @property
    def used(self) -> int:
        """Bytes that its entries take."""
        return self.end - self.freed

    @property
    def size(self) -> int:
        """Bytes that it takes, with those promised."""
        return self.used + self.promised

    @property
    def is_full(self) -> bool:
        """Whether it takes no more entries."""
        return self.end + self.promised >= self.capacity


class _Judgement(msgspec.Struct):
    """What was measured since the last one."""

    reads: int = 0
    seconds: float = 0.0


class Table:
    """The entries of one kind of result; see the module."""

    def __init__(
        self,
        number: int,
        samples: int,
        variant: int,
        now: float,
        disk_rate: float = math.inf,
        bucket: str = "",
    ) -> None:
        self.number, self.samples, self.variant = number, samples, variant
        self.asked = samples
        """How many of the samples the node was asked for, when it was last."""
        self._own: OwnRows | None = None
        self._whole = 0.0
        """The share of recent slices that were of whole batches."""
        self.bucket = bucket
        """The bucket whose quota it counts towards."""
        self._disk_rate = disk_rate
        self.source_seconds = 0.0
        """Seconds of the disk that a read spares because the file of the sample is not read."""
        self.segments: dict[int, Segment] = {}
        self.bytes = 0
        """Bytes of its segments, used and promised."""
        self.last_used = now
        self.cost, self.size, self.reading, self.writing = Mean(), Mean(), Mean(), Mean()
        self.limit: int | None = None
        """Bytes that it may take since it was found to be slow."""
        self.paused_until = self.limited_until = 0.0
        self._judgement = _Judgement()
        self._segment = np.full(samples, -1, np.int32)
        self._offset = np.zeros(samples, np.uint32)
        self._length = np.zeros(samples, np.uint32)
        self.entries = 0

    def __repr__(self) -> str:
        return f"<Table {self.number:x}: {self.entries} of {self.samples} samples, {self.bytes} bytes>"

    @property
    def saved(self) -> float:
        """Seconds that a read saves."""
        if self.reading.count:
            return max(0.0, self._cost - self.reading.value)
        return policy.gain(self._cost, self.size.value, self._disk_rate)

    @property
    def _cost(self) -> float:
        return self.cost.value + self.source_seconds

    def value(self, now: float) -> float:
        """Return seconds saved a byte and read, less for a table that is not read."""
        return policy.value(self.saved, self.size.value, now - self.last_used)

    def note_request(self, samples: SampleSet, now: float) -> None:
        """Note that rows of a slice were asked for."""
        self.last_used, self.asked, self._own = now, samples.asked, samples.own
        self._whole += ((samples.own is None) - self._whole) * _WHOLE_WEIGHT

    @property
    def own_rows(self) -> OwnRows | None:
        """The samples that the node is asked for; None if lately it was asked for any of them."""
        return None if self._whole > MOST_WHOLE else self._own

    def kept_samples(self, segments: Sequence[int], block: int) -> npt.NDArray[np.int64]:
        """Return the samples whose entries in these segments fill a block of the file at least, in the order
        of their entries."""
        found = np.flatnonzero(np.isin(self._segment, segments))
        begins = self._offset[found].astype(np.int64)
        found = found[(begins + self._length[found]) // block > -(-begins // block)]
        return found[np.lexsort((self._offset[found], self._segment[found]))]

    def find(self, sample: int) -> tuple[Segment, int, int] | None:
        """Return (segment, offset, length) of a sample's entry."""
        if not 0 <= sample < self.samples:
            return None
        segment = self.segments.get(int(self._segment[sample]))
        if segment is None:
            return None
        return segment, int(self._offset[sample]), int(self._length[sample])

    def find_all(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which of these samples have an entry. bool[n]."""
        return np.isin(self._segment[samples], list(self.segments))

    def add(self, segment: Segment, entry: StoredEntry) -> bool:
        """Add an entry. Returns False if the sample has one, which stays."""
        if not 0 <= entry.sample < self.samples or self.find(entry.sample) is not None:
            return False
        self._segment[entry.sample] = segment.number
        self._offset[entry.sample], self._length[entry.sample] = entry.offset, entry.length
        self.entries += 1
        segment.entries += 1
        return True

    def forget(self, sample: int) -> None:
        """Forget the entry of a sample, which could not be used."""
        found = self.find(sample)
        if found is not None:
            self._segment[sample] = -1
            self.entries -= 1
            found[0].entries -= 1

    def forget_segment(self, segment: Segment) -> None:
        """Forget a segment and its entries. The index is not searched for them, which would take long for
        many samples: no other segment has the number."""
        del self.segments[segment.number]
        self.entries -= segment.entries

    def record_use(self, use: TableUse, now: float, *, in_advance: bool = False) -> None:
        """Record what a slice did with the table. `in_advance`: no batch waited for its writes."""
        self.last_used = now
        self.cost.add(use.made_seconds, use.made)
        self.size.add(use.made_bytes, use.made)
        self.reading.add(use.hit_seconds, use.hits)
        self._judgement.reads += use.hits
        self._judgement.seconds += use.hit_seconds
        if in_advance:
            return
        self.writing.add(use.store_seconds, use.stores)
        if use.stores and self.writing.value > self._cost > 0:
            self.paused_until = now + PAUSE_SECONDS
            self.writing = Mean()

    def is_slow(self, now: float) -> bool:
        """Return whether reads since the last judgement took nearly as long as computing would have."""
        if self.limit is not None and now > self.limited_until:
            self.limit = None
        if self._judgement.reads < JUDGED_READS:
            return False
        mean = self._judgement.seconds / self._judgement.reads
        self._judgement = _Judgement()
        return mean > SLOW * self._cost

    def set_limit(self, limit: int, now: float) -> None:
        """Bound the table's bytes for LIMIT_SECONDS."""
        self.limit, self.limited_until = limit, now + LIMIT_SECONDS


class FieldChoice(msgspec.Struct):
    """The prefix of one field that is kept; `tables` by variant."""

    steps: int
    digests: dict[int, str] = msgspec.field(default_factory=dict)
    tables: dict[int, Table] = msgspec.field(default_factory=dict)


class PlanState(msgspec.Struct):
    """What is known of a plan's prefixes. `fields`: the choices, None while its rows are measured."""

    samples: SampleSet
    measured: int = 0
    candidates: dict[int, dict[tuple[int, int, str], Candidate]] = msgspec.field(default_factory=dict)
    fields: list[FieldChoice | None] | None = None

    @property
    def tables(self) -> Iterator[Table]:
        """All tables of its fields."""
        for choice in self.fields or ():
            if choice is not None:
                yield from choice.tables.values()


def leaves_out_results(quota: int, taken: int, tables: Sequence[Table]) -> bool:
    """Return whether a quota leaves out results: it is used up, or the results of all samples are larger.

    `tables`: those that count towards it; `taken`: their bytes.
    """
    entry = max(table.size.value for table in tables)
    whole = sum(table.size.value * table.asked for table in tables if table.segments)
    return Limit(quota, taken, 0, "").usable(entry) < max(whole, taken + entry)
