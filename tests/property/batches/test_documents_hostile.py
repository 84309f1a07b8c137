"""Whatever the bytes: a document or the one documented error. What is written is read back."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire.dataset.archive_index import ShardIndex, index_tar
from meshwire.dataset.build_snapshot import Snapshot, build_from_objects
from meshwire.dataset.fields import parse_fields, sample_key
from meshwire.formats.tar import TarMember
from meshwire.frame.columns import ColumnError, StringColumn
from meshwire.frame.sample_frames import SampleFrame, sample_layout
from meshwire.frame.tensor_frame import (
    FrameError,
    frame_layout,
    parse_frame_header,
    tensor_views,
    verify_frame,
)
from meshwire.plan.loader_state import LoaderState
from meshwire.plan.plan_spec import PlanSpec, canonical_spec, parse_spec, plan_hash
from meshwire.strict_json import PlanError
from tests.support.paged_snapshots import build_from_tars

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
spec_names = st.sampled_from(
    ["version", "ops", "seed", "shuffle", "tail", "on_bad", "max_bad", "kind", "shards"]
)
op_like = st.dictionaries(st.sampled_from(["op", "field", "args", "version"]), json_values | st.just("x"))
spec_like = st.dictionaries(
    spec_names, json_values | st.lists(op_like, max_size=3) | st.just("pad"), max_size=6
)
FIELDS = parse_fields({"image": ["jpg", "jpeg"], "label": {"class": "prefix"}})


def small_snapshots() -> list[Snapshot]:
    keys = [f"t/{'cd'[number % 2]}/{number}ü.jpg" for number in range(9)]
    objects = build_from_objects([(key, "e", 5) for key in sorted(keys)], source="s3://b/t", fields=FIELDS)
    members = [TarMember(f"c/{number}.jpg", 7, 512 + 1024 * number, 0, 0, "0") for number in range(9)]
    tars = build_from_tars([("t/a.tar", "e", 10**5, index_tar(members))], source="s3://b/t", fields=FIELDS)
    return [objects.snapshot, tars.snapshot]


def small_frames() -> list[bytes]:
    frame = frame_layout([("a", "U8", (3,)), ("b", "F32", (2, 2)), ("c", "I64", (0,))], {"version": "1"})
    tensors = bytearray(frame.size)
    frame.seal(tensors)
    samples = sample_layout([3, 0, 70], {"version": "1"}, ["x", "y", "z"])
    blobs = bytearray(samples.size)
    samples.seal(blobs, np.zeros(3, dtype=np.uint8))
    return [bytes(tensors), bytes(blobs)]


SNAPSHOTS = [snapshot.to_bytes() for snapshot in small_snapshots()]
INDEX = index_tar([TarMember(f"{n}.jpg", 7, 512 + 1024 * n, 0, 0, "0") for n in range(9)]).to_bytes()
FRAMES = small_frames()


def damaged(document: bytes) -> st.SearchStrategy[bytes]:
    """`document` with a few bytes changed, mostly where the header's text and the first data lie."""
    text_end = document.rfind(b"}") + 1
    places = st.integers(0, text_end) | st.integers(0, len(document) - 1)
    changes = st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=6)

    def apply(edits: list[tuple[int, int]]) -> bytes:
        changed = bytearray(document)
        for place, value in edits:
            changed[place] = value
        return bytes(changed)

    return changes.map(apply) | st.integers(0, len(document)).map(lambda end: document[:end])


@given(
    st.binary(max_size=300)
    | json_values.map(json.dumps).map(str.encode)
    | spec_like.map(json.dumps).map(str.encode)
)
@settings(max_examples=100)
def test_any_bytes_are_a_plan_or_a_plan_error(data: bytes) -> None:
    try:
        spec = parse_spec(data)
    except PlanError:
        return
    assert parse_spec(canonical_spec(spec)) == spec
    assert canonical_spec(parse_spec(canonical_spec(spec))) == canonical_spec(spec)


@given(st.dictionaries(st.text(max_size=5), json_values, max_size=4))
def test_any_arguments_that_are_taken_have_one_spelling(args: dict[str, Any]) -> None:
    document = {"ops": [{"op": "o", "field": "f", "args": args, "version": "1"}]}
    try:
        spec = parse_spec(document)
    except PlanError:
        return
    again = parse_spec(canonical_spec(spec))
    assert again == spec
    assert plan_hash("ab" * 32, again) == plan_hash("ab" * 32, spec)


@given(st.binary(max_size=200) | json_values.map(json.dumps))
def test_any_text_is_fields_or_a_state_or_a_plan_error(data: bytes | str) -> None:
    with contextlib.suppress(PlanError):
        fields = parse_fields(data)
        assert fields
        assert list(fields) == sorted(fields)
    with contextlib.suppress(PlanError):
        state = LoaderState.from_json(data)
        assert LoaderState.from_json(state.to_json()) == state


@given(st.binary(max_size=200) | st.sampled_from(FRAMES).flatmap(damaged))
@settings(max_examples=150)
def test_any_bytes_are_a_frame_or_a_frame_error(data: bytes) -> None:
    try:
        header = parse_frame_header(data)
    except FrameError:
        return
    end = header.body
    for slot in header.tensors.values():  # they tile the body
        assert slot.offset == end
        end += slot.nbytes
    assert header.size == end
    for read in (tensor_views, verify_frame, SampleFrame):
        with contextlib.suppress(FrameError):
            read(data)


@given(st.sampled_from(SNAPSHOTS).flatmap(damaged))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_a_snapshot_or_a_column_error(data: bytes) -> None:
    try:
        snapshot = Snapshot.from_bytes(data)
    except ColumnError:
        return
    for sample in range(min(snapshot.samples, 20)):
        assert isinstance(snapshot.sample_name(sample), str)
    assert json.dumps(snapshot.summary())
    assert Snapshot.from_bytes(snapshot.to_bytes()).summary()["samples"] == snapshot.samples


@given(st.binary(max_size=200) | damaged(INDEX))
@settings(max_examples=75, deadline=None)
def test_any_bytes_are_a_shard_index_or_a_column_error(data: bytes) -> None:
    try:
        index = ShardIndex.from_bytes(data)
    except ColumnError:
        return
    index.find("1.jpg")
    assert len(index.stems()) == index.samples
    assert index.members_with(["jpg"]).size == index.samples


@given(st.lists(st.text(max_size=6), max_size=20), st.text(max_size=3))
def test_string_columns_are_lists_of_strings(words: list[str], wanted: str) -> None:
    column = StringColumn.from_strings(words)
    assert list(column) == words
    found = column.find_last(wanted)
    assert found == (len(words) - 1 - words[::-1].index(wanted) if wanted in words else None)


names = st.text(alphabet="abc./_é", min_size=1, max_size=8)


@given(st.lists(names, unique=True, max_size=30))
def test_objects_and_tars_agree_on_what_makes_a_sample(keys: list[str]) -> None:
    ordered = sorted(keys)
    fields = parse_fields({"x": "a", "y": ["b", "c"]})
    members = [
        TarMember(key, 5, 512 * at, 0, 0, "0") for at, key in enumerate(ordered) if not key.startswith("__")
    ]
    index = index_tar(members)
    complete = (index.members_with(["a"]) >= 0) & (index.members_with(["b", "c"]) >= 0)
    expected = [stem for stem, whole in zip(index.stems(), complete.tolist(), strict=True) if whole]
    try:
        rows = [(member.name, "e", 5) for member in members]
        snapshot = build_from_objects(rows, source="s3://bucket", fields=fields).snapshot
    except PlanError:
        assert not expected
        return
    assert sorted(snapshot.sample_name(sample) for sample in range(snapshot.samples)) == sorted(expected)
    assert Snapshot.from_bytes(snapshot.to_bytes()).hash == snapshot.hash


@given(st.text(max_size=20))
def test_a_key_is_its_stem_and_extension(key: str) -> None:
    stem, ext = sample_key(key)
    assert key.startswith(stem)
    assert "." not in stem[stem.rfind("/") + 2 :] or not ext
    assert (key[len(stem) + 1 :]).lower() == ext


@given(
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 2**40),
    position=st.integers(0, 2**40),
    skips=st.integers(0, 2**40),
)
def test_states_go_round(seed: int, epoch: int, position: int, skips: int) -> None:
    state = LoaderState("ab" * 32, "cd" * 32, seed, epoch, position, skips)
    assert LoaderState.from_json(state.to_json()) == state


def test_the_default_plan_is_a_fixed_point() -> None:
    assert parse_spec(canonical_spec(PlanSpec())) == PlanSpec()
