"""Updates snapshots of plain objects: samples whose objects changed are built again, others taken over.

Law: equals what `build_from_objects` makes of the whole listing, byte for byte; where that cannot be told
from the changed samples alone, there is no update. No object is decoded but those of changed samples: the
others are copied as columns.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwire.dataset.build_snapshot import EmptySnapshotError, SnapshotBuild, build_from_objects
from meshwire.dataset.fields import sample_key
from meshwire.dataset.sample_columns import BytesColumn, LabelColumn, StoredColumn
from meshwire.dataset.snapshot import MAX_SAMPLES, SAMPLES_PER_SHARD, ObjectTable, Snapshot
from meshwire.frame.columns import StringColumn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from meshwire.dataset.sample_columns import Narrow
    from meshwire.frame.columns import Integers

    Listed = tuple[str, str, int]
    """Key, ETag and size of an object."""


@dataclass(frozen=True, slots=True)
class _Edits:
    """Runs of rows of a table that others replace: from `firsts` up to `ends` [E], in order and disjoint;
    `counts` [E]: how many replace each."""

    firsts: Integers
    ends: Integers
    counts: Integers

    def integers(self, old: Integers, new: Integers) -> Integers:
        """Return the column with the rows of `new`, one run after the other, in place of the old ones."""
        at, taken, pieces = 0, 0, []
        for first, end, count in self._rows():
            pieces += [old[at:first], new[taken : taken + count]]
            at, taken = end, taken + count
        found: Integers = np.concatenate([*pieces, old[at:]])
        return found

    def strings(self, old: StringColumn, new: StringColumn) -> StringColumn:
        """Return the column with the strings of `new` in place of the old ones."""
        return old.replace_runs(self.firsts, self.ends, self.counts, new)

    def numbers(self, old: Narrow, new: Integers, shifts: Integers, dtype: np.dtype[Any]) -> Narrow:
        """Return the column with the rows of `new` in place of the old ones, as `integers` does. `shifts`
        [E + 1]: what is added to the old rows before each run, and after the last. Writes only the result:
        new memory costs more than to compute what is in it."""
        found = np.empty(old.size + int((self.counts - (self.ends - self.firsts)).sum()), dtype)
        at, taken = 0, 0
        for (first, end, count), shift in zip([*self._rows(), (old.size, 0, 0)], shifts, strict=True):
            kept = found[at : at + first - taken]
            kept[:] = old[taken:first]
            kept += shift.astype(dtype)
            at, taken = at + kept.size + count, end
        found[self.new_rows()] = new
        return found

    def shifts(self) -> Integers:
        """Return by how much the old rows before each run, and after the last, are moved: int64[E + 1]."""
        found: Integers = np.concatenate(([0], np.cumsum(self.counts - (self.ends - self.firsts))))
        return found

    def new_rows(self) -> Integers:
        """Return where each new row is afterwards."""
        begins = self.firsts + np.cumsum(self.counts - (self.ends - self.firsts))
        begins -= self.counts - (self.ends - self.firsts)
        within = np.arange(int(self.counts.sum())) - np.repeat(
            np.cumsum(self.counts) - self.counts, self.counts
        )
        found: Integers = np.repeat(begins, self.counts) + within
        return found

    def _rows(self) -> Iterable[tuple[int, int, int]]:
        return zip(self.firsts.tolist(), self.ends.tolist(), self.counts.tolist(), strict=True)


def folders_like_samples(stem: str) -> list[str]:
    """Return the stems of samples whose objects would lie on both sides of this sample's: `a` of `a.b/c`."""
    found, at = [], 0
    while (slash := stem.find("/", at)) >= 0:
        dot = stem.find(".", at, slash)
        if dot > at:
            found.append(stem[:dot])
        at = slash + 1
    return found


def objects_of(snapshot: Snapshot, stem: str) -> tuple[int, int] | None:
    """Return from which object to which those of a sample are, the last one excluded; None if objects of
    other samples are among them."""
    keys = snapshot.objects.keys
    first, end = bisect_left(keys, f"{stem}."), bisect_left(keys, f"{stem}/")
    if any(sample_key(keys[number])[0] != stem for number in range(first, end)):
        return None
    return first, end


def update_from_objects(snapshot: Snapshot, changed: Mapping[str, Sequence[Listed]]) -> SnapshotBuild | None:
    """Return the snapshot of the listing as it is now, None if it has to be built from the whole listing.

    `snapshot`: of plain objects, without samples left out; `changed`: by its stem, the objects that each
    changed sample has now, in order of key. Of no other sample may the objects have changed, and none of the
    changed ones may lie between the objects of another, or the other way round.
    """
    stems = sorted(changed, key=lambda stem: f"{stem}.")
    places = [place for stem in stems if (place := objects_of(snapshot, stem)) is not None]
    if not stems or len(places) < len(stems):
        return None
    new, skipped, examples = _build_part(snapshot, [entry for stem in stems for entry in changed[stem]])
    used = Counter(sample_key(key)[0] for key in new.objects.keys) if new is not None else Counter[str]()
    firsts, ends = (np.array(each, np.int64) for each in zip(*places, strict=True))
    if (firsts[1:] < ends[:-1]).any():  # `a.txt` was removed, and the new `a.d/b.txt` belongs before it
        return None
    objects = _Edits(firsts, ends, np.array([used[stem] for stem in stems], np.int64))
    column = next(each for each in snapshot.fields.values() if isinstance(each, BytesColumn))
    counts = np.array([stem in used for stem in stems], np.int64)
    samples = _Edits(_samples_before(column, firsts), _samples_before(column, ends), counts)
    total = snapshot.samples + int((counts - (samples.ends - samples.firsts)).sum())
    if not 0 < total <= MAX_SAMPLES:
        return None
    table, more = snapshot.objects, _NO_OBJECTS if new is None else new.objects
    table = ObjectTable(
        table.bucket,
        objects.strings(table.keys, more.keys),
        objects.strings(table.etags, more.etags),
        objects.integers(table.sizes, more.sizes),
    )
    placed, shifts, kind = objects.new_rows(), objects.shifts(), np.min_scalar_type(len(table))
    fields: dict[str, BytesColumn | LabelColumn] = {}
    for name, old in snapshot.fields.items():
        added = None if new is None else new.fields[name]
        if isinstance(old, LabelColumn):
            fields[name] = _label(samples, old, added if isinstance(added, LabelColumn) else _NO_LABELS)
        else:
            rows = placed[added.object] if isinstance(added, BytesColumn) else placed[:0]
            which = samples.numbers(old.narrow_objects, rows, shifts, kind)
            fields[name] = StoredColumn(which, None, table.sizes)
    starts = np.append(np.arange(0, total, SAMPLES_PER_SHARD), total).astype(np.int64)
    made = Snapshot.from_parts(snapshot.source, "objects", table, starts, fields, snapshot.specs, None)
    return SnapshotBuild(made, skipped, examples)


def _samples_before(column: BytesColumn, objects: Integers) -> Integers:
    """Return how many samples have their bytes in objects before each of these."""
    of_samples = column.narrow_objects
    if (of_samples[1:] < of_samples[:-1]).any():
        of_samples = np.sort(of_samples)
    # Of the column's own type where that is large: otherwise all of it is converted.
    wanted = objects.astype(np.promote_types(of_samples.dtype, np.uint32))
    return np.searchsorted(of_samples, wanted).astype(np.int64)


def _build_part(
    snapshot: Snapshot, listing: Sequence[Listed]
) -> tuple[Snapshot | None, int, tuple[str, ...]]:
    """Return the snapshot of some objects, None without samples, and what of them is left out."""
    try:
        built = build_from_objects(listing, source=snapshot.source, fields=snapshot.specs)
    except EmptySnapshotError as error:
        return None, error.skipped, error.examples
    return built.snapshot, built.skipped, built.examples


def _label(samples: _Edits, old: LabelColumn, new: LabelColumn) -> LabelColumn:
    classes = sorted({*old.classes, *new.classes})
    numbers = {name: number for number, name in enumerate(classes)}
    before, added = (
        np.array([numbers[name] for name in column.classes], np.int64)[column.values] for column in (old, new)
    )
    values = samples.integers(before, added)
    used = np.bincount(values, minlength=len(classes)) > 0
    kept = tuple(name for name, there in zip(classes, used.tolist(), strict=True) if there)
    return LabelColumn((np.cumsum(used) - 1)[values], kept)


_NO_INTEGERS = np.zeros(0, np.int64)
_NO_STRINGS = StringColumn(b"", _NO_INTEGERS)
_NO_OBJECTS = ObjectTable("", _NO_STRINGS, _NO_STRINGS, _NO_INTEGERS)
_NO_LABELS = LabelColumn(_NO_INTEGERS, ())
