"""Mixup pairs: positions p and p ^ 1 of an epoch are mixed, whichever batch they are in.

Law: a row depends only on the samples and draws of its pair, so content does not depend on batch size
or world size. A row is not mixed (weight 1) when its partner is past the end of the epoch, or is bad in
the mixed field or a label. Invariant: within a slice, each member of a pair is prepared once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from meshd.transform.compiler import partner_label_name
from meshd.transform.decoded_cache.row_prefixes import RowPrefixes
from meshd.transform.errors import BadSampleError, OpFailedError, OutOfMemoryError
from meshd.transform.messages import value_bytes
from meshd.transform.multi_field_ops import RowInputs
from meshd.transform.resource_limits import is_out_of_memory
from meshwire.plan.keyed_random import KeyedRandom

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from meshd.transform.compiler import CompiledMixing, Program
    from meshd.transform.decoded_cache.slice_recorder import SliceRecorder
    from meshd.transform.messages import OpStats, Row
    from meshd.transform.op_chain import Draw

    Pieces = Sequence[tuple[int, ...]]
    Read = Callable[[Pieces], bytes]


class _Partner(msgspec.Struct):
    """The partner: its value of the mixed field, its soft labels by field number, its others by name."""

    value: Any
    soft: dict[int, Any]
    labels: dict[str, Any]


class PairedRow:
    """One mixed row. `value` is the input of the rest of its field's chain."""

    __slots__ = ("_other", "_pairing", "value", "weight")

    def __init__(self, pairing: CompiledMixing, value: Any, weight: float, other: _Partner | None) -> None:
        self.value, self.weight = value, weight
        self._pairing, self._other = pairing, other

    def mix_soft_label(self, field: int, row: npt.NDArray[Any]) -> None:
        """Mix the field of this number, which was rendered into `row`, if it is a soft label."""
        if self._other is not None and field in self._other.soft:
            weight = np.float32(self.weight)
            row[...] = row * weight + self._other.soft[field] * (np.float32(1.0) - weight)

    def columns(self, own: Mapping[str, Any]) -> list[Any]:
        """Return the values of `CompiledMixing.outputs`; `own` are the row's labels."""
        labels = own if self._other is None or self.weight == 1.0 else self._other.labels
        pairing = self._pairing
        added = {pairing.weight_name: self.weight}
        added |= {partner_label_name(name): labels[name] for name in pairing.others}
        return [value for _, value in sorted(added.items())]


class PairRenderer:
    """Prepares the pairs of one slice; caches the values and draws of the current pair."""

    def __init__(
        self,
        program: Program,
        pairing: CompiledMixing,
        epoch: int,
        read: Read,
        tally: OpStats,
        recorder: SliceRecorder | None = None,
    ) -> None:
        self.pairing = pairing
        self._program, self._epoch, self._read, self._tally = program, epoch, read, tally
        self._recorder = recorder
        self._names = list(program.chains)
        self.number = self._names.index(pairing.field)
        self._beside: RowInputs | None = None
        self._known: dict[tuple[int, Any], Any] = {}
        self._draws: dict[tuple[int, Any], Draw] = {}

    def draw(self, position: int, sources: Sequence[Pieces]) -> Draw:
        """Return the draws of a row, the same object for the row itself and for its use as a partner.

        Ops over several fields store in it what they drew for the first field.
        """
        key = position, sources[self.number]
        found = self._draws.get(key)
        if found is None:
            found = self._draws[key] = self._program.draw(self._epoch, position)
        return found

    def begin(self, row: Row, draw: Draw, start: RowInputs) -> PairedRow:
        """Return the row with its field mixed; `start` has its inputs.

        Raises BadSampleError for the row's own field, OpFailedError, SourceGoneError.
        """
        position = row.position & ~1
        self._known = {key: value for key, value in self._known.items() if key[0] & ~1 == position}
        self._draws = {key: draws for key, draws in self._draws.items() if key[0] & ~1 == position}
        pairing = self.pairing
        value = self._prepare_value(row.position, row.sources, draw, start)
        other = self._other(row) if row.partner else None
        if other is None:
            return PairedRow(pairing, value, 1.0, None)
        random = KeyedRandom(self._program.seed, self._epoch, position, pairing.index)
        return PairedRow(pairing, *self._mix(value, other.value, random), other)

    def _mix(self, value: Any, other: Any, random: KeyedRandom) -> tuple[Any, float]:
        tally, op = self._tally, self.pairing.op
        began, taken = tally.clock(), value_bytes(value) + value_bytes(other)
        try:
            mixed, weight = self.pairing.mixing.mix(value, other, random)
        except Exception as error:
            tally.record_call(op, tally.clock() - began, taken, 0, failed=True)
            if is_out_of_memory(error):
                raise OutOfMemoryError(op) from error
            raise OpFailedError(op, error) from error
        tally.record_call(op, tally.clock() - began, taken, value_bytes(mixed))
        return mixed, weight

    def _prepare_value(self, position: int, sources: Sequence[Pieces], draw: Draw, start: RowInputs) -> Any:
        """Return the value of the field before mixing. Raises as rendering does."""
        pieces = sources[self.number]
        key = position, pieces
        known = self._known.get(key)
        if known is None:
            try:
                value, done = start.begin_chain(self.number, self.pairing.before)
                known = self.pairing.before.render(value, draw, self._tally, done)
            except BadSampleError as error:
                known = error
            self._known[key] = known
        if isinstance(known, BadSampleError):
            raise known
        return known

    def _other(self, row: Row) -> _Partner | None:
        position = row.position ^ 1
        draw = self.draw(position, row.partner)
        pairing = self.pairing
        recorder, tally = self._recorder, self._tally
        kept = RowPrefixes(recorder, row.partner_sample, row.partner_kept) if recorder else None
        self._beside = start = RowInputs(self._program.joints, row.partner, self._read, draw, tally, kept)
        start.number = self.number
        try:
            value = self._prepare_value(position, row.partner, draw, start)
            soft = {self._names.index(name): self._label(name, draw, start) for name in pairing.soft}
            labels = {name: self._label(name, draw, start) for name in pairing.others}
        except BadSampleError:  # reported by the partner's own row
            self._beside = None
            return None
        self._beside = None
        return _Partner(value, soft, labels)

    def through(self) -> int | None:
        """Return which field of the partner was being prepared when a row failed, and reset.

        None if the failure was in the row itself.
        """
        beside, self._beside = self._beside, None
        return None if beside is None else beside.number

    def _label(self, name: str, draw: Draw, start: RowInputs) -> Any:
        chain = self._program.chains[name]
        value, done = start.begin_chain(self._names.index(name), chain)
        return chain.render(value, draw, self._tally, done)
