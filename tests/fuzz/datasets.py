"""Fuzzed: what datasets are made of. Snapshots, lines, tables of packed rows, arrays' metadata, plans, and
the ops that read foreign files.

Law: as in `targets`. An op gives a value or refuses the sample; nothing else comes out.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np

from meshd.transform.errors import BadSampleError
from meshd.transform.op_chain import compile_chain
from meshwire.dataset.build_snapshot import Snapshot
from meshwire.formats.json_lines import LineIndex, index_lines
from meshwire.formats.mds import MdsError, index_samples, parse_mds, sample_bounds
from meshwire.formats.parquet_rows import FOOTER_BYTES, RowLengths, lengths_range
from meshwire.formats.record_index import RecordIndex
from meshwire.formats.tf_example import ExampleError, parse_features
from meshwire.formats.tfrecord_index import TfrecordError, index_records
from meshwire.formats.zarr_source import parse_array, parse_chunked
from meshwire.frame.columns import ColumnError
from meshwire.plan.keyed_random import KeyedRandom
from meshwire.plan.plan_spec import OpSpec, parse_spec, spec_document
from meshwire.plan.sequence_packing import PackTable
from meshwire.strict_json import PlanError
from tests.support.mds_writer import mds_files
from tests.support.tf_example_writer import BytesList, Int64List, example, record

if TYPE_CHECKING:
    from meshd.transform.op_chain import OpChain


def _chain(op: str, **args: object) -> OpChain:
    return compile_chain([(0, OpSpec(op, "x", args))])


_READERS = (
    _chain("npy", dtype="float32"),
    _chain("npz", name="a", dtype="int64"),
    _chain("safetensors", name="a", dtype="int16"),
    _chain("json", path="a[0].b", type="numbers"),
    _chain("json", path="", type="json"),
    _chain("json", path="n", type="integer"),
    _chain("feature", type="integers"),
    _chain("feature", type="numbers", length=2),
    _chain("frombuffer", dtype="bool", shape=[None, 3]),
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
            _, offsets, lengths = read.locate_rows(0, 4096, data[: min(read.index_bytes, 4096)])
            assert int((offsets + lengths).max(initial=0)) <= 4096


def chunks(data: bytes) -> None:
    """Metadata is an array with whole chunks, each numbered once, or refused; places lie in their object."""
    with contextlib.suppress(PlanError):
        read = parse_chunked(data, "x")
        for number in range(min(read.objects, 1 << 12)):
            assert read.object_number(read.object_key(number)) == number
        with contextlib.suppress(ValueError):
            rows, offsets, lengths = read.locate_rows(0, 4096, data[: min(read.index_bytes, 4096)])
            assert len(set(rows.tolist())) == rows.size
            assert int((offsets + lengths).max(initial=0)) <= 4096


def records(data: bytes) -> None:
    """Features lie in the file, the same however it is cut; or it is refused, the same way."""
    for message in (data, data[1:]):
        with contextlib.suppress(ExampleError):
            for feature in parse_features(message).values():
                assert 0 <= feature.begin <= feature.end <= len(message)
    file = record(data) + record(example({"x": Int64List([7]), "y": BytesList([data])})) + data
    found = []
    for at in (0, len(file) // 3, len(file) - 1):
        try:
            found.append(index_records([file[:at], file[at:]], ["x"]).to_bytes())
        except TfrecordError as error:
            found.append(str(error).encode())
    assert len(set(found)) == 1
    with contextlib.suppress(ColumnError):
        RecordIndex.from_bytes(data)
    with contextlib.suppress(ColumnError):
        lengths = RowLengths.from_bytes(data)
        index = lengths.choose(list(lengths.columns)[:2], len(data))
        assert all((offsets >= 0).all() for offsets, _ in index.places.values())
    with contextlib.suppress(ColumnError):
        at, length = lengths_range(data[-FOOTER_BYTES:], len(data))
        assert 0 <= at <= at + length <= len(data)


def mds(data: bytes) -> None:
    """An index names shards, or is refused; samples of a shard lie within it."""
    with contextlib.suppress(PlanError):
        for shard in parse_mds(data):
            assert len(shard.names) == len(shard.sizes)
    files = mds_files({"a": "str", "b": "int"}, [{"a": b"x", "b": bytes(8)}])
    (shard,) = parse_mds(files["index.json"])
    with contextlib.suppress(MdsError):
        bounds = sample_bounds(shard, data[: shard.head_bytes])
        heads = np.frombuffer(data[: shard.width].ljust(shard.width), np.uint8).reshape(1, -1)
        for offsets, lengths in index_samples(shard, bounds, heads, ["a", "b"]).places.values():
            assert ((offsets >= 0) & (offsets + lengths <= shard.bytes)).all()


def reader(data: bytes) -> None:
    """Ops on any bytes: a value of their type, or a bad sample."""
    for chain in _READERS:
        with contextlib.suppress(BadSampleError):
            chain.render(data, lambda stream: KeyedRandom(0, 0, 0, stream))
