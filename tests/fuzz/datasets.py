"""Fuzzed: what datasets are made of. Snapshots, lines, tables of packed rows, arrays' metadata, plans, and
the ops that read foreign files.

Law: as in `targets`. An op gives a value or refuses the sample; nothing else comes out.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np

from meshd.transform.chains import compile_chain
from meshd.transform.errors import BadSampleError
from meshwire.columns import ColumnError
from meshwire.documents import PlanError
from meshwire.lines import LineIndex, index_lines
from meshwire.packing import PackTable
from meshwire.plans import OpSpec, parse_spec, spec_document
from meshwire.randomness import KeyedRandom
from meshwire.snapshots import Snapshot
from meshwire.zarrsources import parse_array

if TYPE_CHECKING:
    from meshd.transform.chains import Chain


def _chain(op: str, **args: object) -> Chain:
    return compile_chain([(0, OpSpec(op, "x", args))])


_READERS = (
    _chain("npy", dtype="float32"),
    _chain("npz", name="a", dtype="int64"),
    _chain("safetensors", name="a", dtype="int16"),
    _chain("json", path="a[0].b", type="numbers"),
    _chain("json", path="", type="json"),
    _chain("json", path="n", type="integer"),
    _chain("utf8", form="NFKC", strip=True),
    _chain("label_map", map={"cat": 1}),
)


def lines(data: bytes) -> None:
    """Lines are the same however the file is cut, and lie where they are said to."""
    whole = index_lines([data])
    for at in {0, len(data) // 3, len(data) // 2, max(0, len(data) - 1)}:
        parts = index_lines([data[:at], b"", data[at:]])
        assert np.array_equal(whole.offsets, parts.offsets)
        assert np.array_equal(whole.lengths, parts.lengths)
    for start, length in zip(whole.offsets.tolist(), whole.lengths.tolist(), strict=True):
        assert b"\n" not in data[start : start + length]
    assert LineIndex.from_bytes(whole.to_bytes()).to_bytes() == whole.to_bytes()
    for reader in (LineIndex, PackTable):
        with contextlib.suppress(ColumnError):
            reader.from_bytes(data)


def snapshot(data: bytes) -> None:
    """A snapshot that is taken says the same when it is written again."""
    with contextlib.suppress(ColumnError):
        read = Snapshot.from_bytes(data)
        again = Snapshot.from_bytes(read.to_bytes())
        assert again.objects.buckets == read.objects.buckets
        assert again.to_bytes() == read.to_bytes()


def plan(data: bytes) -> None:
    """A plan that is taken is read back the same."""
    with contextlib.suppress(PlanError):
        read = parse_spec(data.decode("utf-8", "surrogateescape"))
        assert parse_spec(spec_document(read)) == read


def array(data: bytes) -> None:
    """Metadata is an array with rows, or refused; any bytes are its shard's index, or refused."""
    with contextlib.suppress(PlanError):
        read = parse_array(data, "x")
        assert read.row_bytes > 0
        with contextlib.suppress(ValueError):
            offsets, lengths = read.places(4096, data[: min(read.index_bytes, 4096)])
            assert int((offsets + lengths).max()) <= 4096


def reader(data: bytes) -> None:
    """Ops on any bytes: a value of their type, or a bad sample."""
    for chain in _READERS:
        with contextlib.suppress(BadSampleError):
            chain.render(data, lambda stream: KeyedRandom(0, 0, 0, stream))
