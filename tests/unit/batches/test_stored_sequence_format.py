"""Stored sequences: what is read equals what was stored, damage is noticed, chunks follow from sizes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.batches.assembly.stored_sequence_format import (
    BAD,
    BLOCK_BYTES,
    CHUNK_SOURCE_BYTES,
    END_BYTES,
    PART,
    ChunkError,
    SequenceSet,
    chunk_starts,
    decode_index,
    encode_chunk,
    index_span,
)
from meshd.batches.assembly.stored_sequences import SEQUENCES_PREFIX, StoredSequences, UnreadableChunkError
from meshd.core.plan_record import FieldOutput, Plan
from meshd.store.errors import ExtentGoneError
from meshd.views.transform_results import RESULTS_PREFIX
from meshwire.plan.plan_spec import PlanSpec
from tests.support.manual_clock import ManualClock
from tests.support.reference_store import MemoryStore

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshd.batches.assembly.stored_sequence_format import ChunkIndex


def index_of(chunk: bytes, count: int, fields: tuple[str, ...]) -> ChunkIndex:
    offset, length = index_span(chunk[-END_BYTES:], len(chunk))
    return decode_index(chunk[offset : offset + length], offset, count, fields)


@given(st.lists(st.integers(-1, 9000), min_size=1, max_size=12), st.data())
def test_every_piece_is_what_was_stored(lengths: list[int], data: st.DataObject) -> None:
    total = sum(max(0, length) for length in lengths)
    columns: dict[str, npt.NDArray[Any]] = {
        "a": np.arange(total).astype(np.uint16),
        "b": np.arange(total).astype(np.int64) - 5,
    }
    chunk = encode_chunk(np.array(lengths, np.int64), columns)
    index = index_of(chunk, len(lengths), ("a", "b"))
    assert index.lengths.tolist() == lengths
    place = data.draw(st.integers(0, len(lengths) - 1))
    begin = data.draw(st.integers(0, max(0, lengths[place])))
    length = data.draw(st.integers(1, 9001))
    first = sum(max(0, one) for one in lengths[:place]) + begin
    for field, column in enumerate(columns.values()):
        reads: list[tuple[int, int]] = []

        def read(at: int, size: int, reads: list[tuple[int, int]] = reads) -> bytes:
            reads.append((at, size))
            return chunk[at : at + size]

        found = index.read_piece(field, place, begin, length, read)
        piece = (np.array([number], np.int64) for number in (place, begin, length))
        foretold = zip(*(part.tolist() for part in index.block_ranges(field, *piece)), strict=True)
        assert list(foretold) == reads
        if begin + length > lengths[place]:
            assert found is None
        else:
            assert found is not None
            assert found.dtype == column.dtype
            assert np.array_equal(found, column[first : first + length])


def test_damage_is_noticed_and_other_bytes_are_refused() -> None:
    chunk = encode_chunk(np.array([BLOCK_BYTES, BAD, 7]), {"a": np.zeros(BLOCK_BYTES + 7, np.uint8)})
    index = index_of(chunk, 3, ("a",))
    wrong = bytes([chunk[0] ^ 1]) + chunk[1:]
    with pytest.raises(ChunkError, match="block 0"):
        index.read_piece(0, 0, 100, 4, lambda at, size: wrong[at : at + size])
    assert index.read_piece(0, 2, 0, 7, lambda at, size: wrong[at : at + size]) is not None
    for other in (b"", chunk[:-1], chunk[:-END_BYTES], b"x" * 40):
        with pytest.raises(ChunkError):
            index_of(other, 3, ("a",))
    for count, fields in ((2, ("a",)), (3, ("b",)), (3, ("a", "b"))):
        with pytest.raises(ChunkError):
            index_of(chunk, count, fields)


def test_chunks_end_with_their_bytes_and_with_their_part() -> None:
    small = np.full(2 * PART + 5, 10)
    assert chunk_starts(small).tolist() == [0, PART, 2 * PART, 2 * PART + 5]
    large = np.array([1, CHUNK_SOURCE_BYTES, 1, CHUNK_SOURCE_BYTES // 2, CHUNK_SOURCE_BYTES // 2, 1])
    assert chunk_starts(large).tolist() == [0, 2, 5, 6]
    assert chunk_starts(np.zeros(0, np.int64)).tolist() == [0]


def test_they_are_evicted_with_the_results_of_views() -> None:
    assert SEQUENCES_PREFIX.startswith(RESULTS_PREFIX)


def sequence_set(share: float) -> SequenceSet:
    plan = Plan("p" * 64, "s" * 64, "b", 3, PlanSpec(), {"a": FieldOutput("uint16", None)})
    return SequenceSet(plan, ("a",), np.array([0, 2, 3]), "views/sequences/p/", share)


class _FailingStore(MemoryStore):
    """Reads raise `failure`, if there is one."""

    failure: Exception | None = None

    def read_range(self, record: Any, offset: int, length: int) -> bytes:
        if self.failure is not None:
            raise self.failure
        return super().read_range(record, offset, length)


def test_a_chunk_that_cannot_be_read_is_forgotten() -> None:
    asyncio.run(_check_forgotten())


async def _check_forgotten() -> None:
    store, uses = _FailingStore(ManualClock()), list[str]()
    stored, wanted = StoredSequences(store, uses.append, 1 << 30), sequence_set(1.0)
    await stored.store(wanted, 0, np.array([3, 1]), {"a": np.arange(4, dtype=np.uint16)})
    assert list(await stored.find(wanted, [0, 1])) == [0]
    assert uses == [wanted.key(0)]
    for failure, remains in ((ExtentGoneError("moved"), True), (ChunkError("damaged"), False)):
        chunk = (await stored.find(wanted, [0]))[0]
        store.failure = failure
        with pytest.raises(UnreadableChunkError) as caught:
            await asyncio.to_thread(chunk.read_piece, 0, 1, 0, 1)
        store.failure = None
        await stored.forget(wanted, caught.value)
        assert (0 in await stored.find(wanted, [0])) == remains
    nothing = sequence_set(0.0)
    await stored.store(nothing, 0, np.array([3, 1]), {"a": np.arange(4, dtype=np.uint16)})
    assert not await stored.find(nothing, [0])
    await stored.aclose()
