"""The loader's laws, against a server that can be told to fail at any frame."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import time
from contextlib import closing
from typing import Any

import numpy as np
import pytest

import meshsdk as mesh
from meshsdk import ops
from meshsdk.errors import (
    BadSampleError,
    ConfigurationError,
    DeadlineError,
    SnapshotChangedError,
    StateMismatchError,
)
from tests.component.sdk import test_sdk_scripted
from tests.component.sdk.test_sdk_scripted import SAMPLES, ScriptedMesh, labels, loader
from tests.support.bounded_wait import await_end

# Fixtures.
scripted_server = test_sdk_scripted.scripted_server
undisturbed = test_sdk_scripted.undisturbed


def digest(server: ScriptedMesh, batch: int, world: int, step: int, **more: Any) -> str:
    """Hash of a global batch, put together from its ranks' slices."""
    whole = hashlib.sha256()
    for rank in range(world):
        with loader(server, batch, rank=rank, world=world, **more) as one:
            whole.update(np.ascontiguousarray(one.at(step)["image"]).tobytes())
    return whole.hexdigest()


# --- order, exactly once --------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, mesh.Blocks(shards=2), False])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_sample_once_over_the_ranks(server: ScriptedMesh, shuffle: Any, world: int) -> None:
    found: list[int] = []
    lengths = set()
    for rank in range(world):
        with loader(server, 16, rank=rank, world=world, shuffle=shuffle) as one:
            lengths.add(len(one))
            batches = list(one)
            assert len(batches) == len(one)
            found += labels(batches)
    assert sorted(found) == list(range(SAMPLES))
    assert lengths == {7}


def test_the_global_batch_does_not_depend_on_world_size(server: ScriptedMesh) -> None:
    for step in (0, 3, 6):
        assert len({digest(server, 16, world, step) for world in (1, 2, 3)}) == 1


def test_epochs_differ_and_come_one_after_the_other(server: ScriptedMesh) -> None:
    with loader(server) as one:
        first, second = labels(one), labels(one)
        assert one.epoch == 2
        one.set_epoch(0)
        assert labels(one) == first
    assert sorted(first) == sorted(second)
    assert first != second


@pytest.mark.parametrize(("tail", "steps", "rows"), [("pad", 7, 112), ("drop", 6, 96), ("ragged", 7, 103)])
def test_tails(server: ScriptedMesh, tail: Any, steps: int, rows: int) -> None:
    with loader(server, tail=tail) as one:
        batches = list(one)
    assert len(batches) == len(one) == steps
    assert sum(batch.rows for batch in batches) == rows
    assert len(set(labels(batches))) == min(rows, SAMPLES)


# --- state ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "world"), [(16, 1), (16, 3), (10, 2), (25, 1), (48, 2)])
def test_stop_and_resume_with_another_batch_and_world(server: ScriptedMesh, batch: int, world: int) -> None:
    with loader(server) as one:
        whole = labels(one)
        one.set_epoch(0)
        taken = [next(iterator) for iterator in [iter(one)] for _ in range(3)]
        state = json.loads(json.dumps(one.state_dict()))
    assert len(json.dumps(state)) < 300
    rest: dict[int, list[list[int]]] = {}
    for rank in range(world):
        with loader(server, batch, rank=rank, world=world) as other:
            other.load_state_dict(state)
            assert (other.epoch, other.state_dict()["position"]) == (0, 48)
            rest[rank] = [labels([one]) for one in other]
            assert other.epoch == 1
    merged = [label for step in zip(*rest.values(), strict=True) for part in step for label in part]
    assert labels(taken) + merged == whole


def test_the_state_counts_batches_returned_not_prefetched(server: ScriptedMesh) -> None:
    with loader(server) as one:
        for batch in one:
            assert one.state_dict()["position"] == (batch.step + 1) * 16 % 112
            if batch.step == 2:
                break
        assert one.remaining == 4
        assert [batch.step for batch in one] == [3, 4, 5, 6]


def test_the_state_is_the_same_on_all_ranks(server: ScriptedMesh) -> None:
    states = []
    for rank in range(3):
        with loader(server, rank=rank, world=3) as one:
            next(iter(one))
            states.append(one.state_dict())
    assert states[0] == states[1] == states[2]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": 8}, "seed"),
        ({"shuffle": False}, "plan"),
        ({"tail": "drop"}, "plan"),
        ({"on_bad": "mask"}, "plan"),
    ],
)
def test_a_state_of_something_else_is_refused_by_name(
    server: ScriptedMesh, change: dict[str, Any], field: str
) -> None:
    with loader(server) as one, loader(server, **change) as other:
        with pytest.raises(StateMismatchError, match=field) as raised:
            other.load_state_dict(one.state_dict())
        assert raised.value.field == field


def test_a_state_of_another_snapshot_is_refused(server: ScriptedMesh) -> None:
    with loader(server) as one:
        state = one.state_dict() | {"snapshot": "00" * 32}
        with pytest.raises(StateMismatchError, match="snapshot") as raised:
            one.load_state_dict(state)
        assert raised.value.field == "snapshot"
        with pytest.raises(ConfigurationError, match=r"state\.position"):
            one.load_state_dict(one.state_dict() | {"position": "x"})


@pytest.mark.parametrize("steps", [0, 1, 5, 6, 7, 13, 20])
def test_skip_passes_over_batches_into_the_next_epochs(server: ScriptedMesh, steps: int) -> None:
    with loader(server) as whole, loader(server) as one:
        expected = [labels([batch]) for _ in range(4) for batch in whole]
        first = next(iter(one))
        one.skip(steps)
        state = one.state_dict()
        with loader(server, rank=1, world=2) as other:
            other.load_state_dict(state)
            second = labels([next(iter(other))])
        found = [labels([batch]) for batch in one]
    assert labels([first]) == expected[0]
    assert found[0] == expected[1 + steps]
    assert second == expected[1 + steps][8:]
    assert state["skips"] == state["epoch"] * SAMPLES + state["position"] - 16
    with loader(server) as bad, pytest.raises(IndexError, match="seek"):
        bad.skip(-1)


def test_seek_and_at(server: ScriptedMesh) -> None:
    with loader(server) as one:
        batches = list(one)
        one.seek(0, 4)
        assert labels([next(iter(one))]) == labels([batches[4]])
        before = one.state_dict()
        assert labels([one.at(2)]) == labels([batches[2]])
        assert labels([one.at(2, epoch=1)]) != labels([batches[2]])
        assert one.state_dict() == before
        for bad in ((0, 7), (0, -1), (-1, 0)):
            with pytest.raises(IndexError):
                one.seek(*bad)
        with pytest.raises(IndexError):
            one.at(7)


def test_at_counts_from_the_origin_as_the_loop_does(server: ScriptedMesh) -> None:
    with loader(server, 16) as one:
        next(iter(one))
        state = one.state_dict()
    with loader(server, 24) as other:
        other.load_state_dict(state)
        wanted = [batch.positions.tolist() for batch in itertools.islice(other, 2)]
        other.load_state_dict(state)
        assert other.step == 0  # of an origin that is not the epoch's beginning
        assert [other.at(step).positions.tolist() for step in (0, 1)] == wanted
        assert other.at(0, epoch=1).positions.tolist() == list(range(24))  # the next one has none
        assert other.at(4, epoch=1).positions.tolist()[0] == 96
        with pytest.raises(IndexError, match="epoch 0, step 4: this epoch has steps 0 to 3"):
            other.at(4)
        assert [batch.step for batch in other] == [0, 1, 2, 3]
        assert other.at(1, epoch=0).positions.tolist() == wanted[1]  # and this one keeps its own
        other.seek(0, 1)
        assert other.at(1).positions.tolist() == list(range(24, 48))
        with pytest.raises(IndexError, match="epoch -1"):
            other.at(0, epoch=-1)


def test_skipped_positions_are_counted(server: ScriptedMesh) -> None:
    with loader(server) as one:
        next(iter(one))
        one.seek(0, 4)
        assert one.state_dict()["skips"] == 48


# --- faults ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["cut", "flip", "busy", "silent"])
def test_a_failed_frame_is_asked_again_and_nothing_changes(server: ScriptedMesh, fault: str) -> None:
    with loader(server) as one:
        whole = labels(one)
        one.set_epoch(0)
        server.faults.extend([None, fault, fault, None, fault])
        assert labels(one) == whole
        assert one.stats().retries == 3


def test_batches_before_a_final_error_come_first(server: ScriptedMesh) -> None:
    with loader(server, connections=1) as one:
        server.faults.extend([None, None, "gone"])
        taken: list[mesh.Batch] = []
        with pytest.raises(SnapshotChangedError, match=r"train/cat/1\.jpg was replaced.*Do this\."):
            taken.extend(one)
        assert one.step == 2
        assert labels(one)  # the error was that step's, not the loader's


def test_a_bad_sample_is_named(server: ScriptedMesh) -> None:
    with loader(server, on_bad="raise", connections=1) as one:
        server.faults.append("bad")
        with pytest.raises(BadSampleError) as raised:
            next(iter(one))
        assert raised.value.detail == {"key": "train/cat/1.jpg"}
        assert one.bad()[0].error == "torn"


def test_unavailable_beyond_the_deadline(server: ScriptedMesh) -> None:
    with loader(server, deadline=0.2) as one:
        server.down = True
        with pytest.raises(DeadlineError, match="gave up"):
            next(iter(one))
        server.down = False
        assert labels([next(iter(one))])


def test_a_node_that_stands_still_is_not_waited_for_beyond_the_deadline(server: ScriptedMesh) -> None:
    """It neither refuses nor answers; that is noticed before the 60 s of a client's `timeout`."""
    with loader(server, deadline=3.0) as one:
        server.still = True
        server.gate.clear()
        began = time.monotonic()
        with pytest.raises(DeadlineError, match="no reply to a liveness check"):
            next(iter(one))
        assert 3.0 <= time.monotonic() - began < 30
        server.gate.set()
        assert labels([next(iter(one))])


def test_work_that_takes_longer_than_the_deadline_is_waited_for(server: ScriptedMesh) -> None:
    """Its node says that it is there."""
    with loader(server, deadline=3.0) as one:
        server.gate.clear()
        timer = threading.Timer(8.0, server.gate.set)
        timer.start()
        try:
            assert labels([next(iter(one))])
        finally:
            await_end(timer)


def test_another_node_is_asked_when_one_stands_still(server: ScriptedMesh) -> None:
    """Well before the deadline, from which nothing is left otherwise."""
    with closing(ScriptedMesh()) as other:
        other.plans = server.plans
        endpoints = f"{server.endpoint},{other.endpoint}"
        with mesh.connect(endpoints, access_key="user", secret_key="secret") as client:
            fields = {"image": "jpg", "label": "@class"}
            dataset = mesh.open("s3://photos/train", fields=fields, client=client)
            dataset = dataset.map(ops.decode("image"), ops.to_chw("image"))
            with mesh.Loader(dataset, 16, seed=7, output="numpy", rank=0, world=1, deadline=12.0) as one:
                server.frames_left = 2  # the loader asks ahead: by itself, so that no frame comes in between
                found = labels(one)
                assert len(server.asked) > 2
                assert other.asked
                server.frames_left = None
                server.gate.set()
    assert sorted(found) == list(range(SAMPLES))


@pytest.mark.parametrize("world", [1, 4])
def test_data_that_is_away_raises_at_its_step_on_every_rank(server: ScriptedMesh, world: int) -> None:
    with loader(server) as one:
        whole = labels(one)
    server.away, parts = range(3, 5), []
    for rank in range(world):
        with loader(server, rank=rank, world=world, deadline=0.2) as one:
            taken: list[list[int]] = []
            with pytest.raises(DeadlineError):
                taken.extend(labels([batch]) for batch in one)
            assert len(taken) == one.step == 3
            parts.append((taken, one.state_dict()))
    assert len({json.dumps(state) for _, state in parts}) == 1
    server.away, rest = range(0), []
    for rank, (taken, state) in enumerate(parts):
        with loader(server, rank=rank, world=world) as one:
            one.load_state_dict(state)
            rest.append(taken + [labels([batch]) for batch in one])
    assert [label for step in zip(*rest, strict=True) for part in step for label in part] == whole


def test_a_wrong_checksum_passes_when_not_looked_at(server: ScriptedMesh) -> None:
    with loader(server, verify=False) as one:
        server.faults.append("flip")
        assert len(list(one)) == 7
        assert one.stats().retries == 0


# --- arguments and numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"batch": 0}, "global_batch"),
        ({"batch": 2, "rank": 0, "world": 3}, "some would get no row"),
        ({"batch": 200, "tail": "drop"}, "has no full batch"),
        ({"tail": "wrap"}, "tail"),
        ({"on_bad": "ignore"}, "on_bad"),
        ({"max_bad": 2}, "max_bad"),
        ({"seed": -1}, "seed"),
        ({"connections": 0}, "connections"),
        ({"prefetch_bytes": 0}, "prefetch_bytes"),
        ({"shuffle": "yes"}, "shuffle"),
    ],
)
def test_arguments_are_checked(server: ScriptedMesh, more: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        loader(server, **more)


def test_stats(server: ScriptedMesh) -> None:
    with loader(server) as one:
        list(one)
        stats = one.stats()
    assert (stats.samples, stats.batches, stats.flagged) == (112, 7, 9)
    assert stats.stand_ins == 0  # they are pads
    assert "stand-ins" not in str(stats)
    assert stats.frames == {"miss": 7}
    assert stats.bytes > 112 * 192
    assert 0 <= stats.wait_share <= 1
    assert stats.cpu > 0


def test_the_address_names_rank_world_batch_origin_and_share(server: ScriptedMesh) -> None:
    with loader(server, 10, rank=1, world=2, share="sweep 42", connections=1) as one:
        one.load_state_dict(one.state_dict() | {"position": 48})
        next(iter(one))
    path, _, query = next(target for target in server.asked if "share" in target).partition("?")
    assert path.endswith("/0/4")
    assert query == "batch=10&format=tensors&origin=8&rank=1&share=sweep%2042&world=2"


# --- datasets -------------------------------------------------------------------------------------------


def test_samples_by_index(server: ScriptedMesh) -> None:
    ds = server.dataset()
    assert len(ds) == SAMPLES
    assert ds[5]["label"] == 5
    assert ds[-1]["label"] == SAMPLES - 1
    assert ds[np.int64(3)]["image"].shape == (3, 8, 8)
    assert [row["label"] for row in ds.__getitems__([9, 2, 9])] == [9, 2, 9]
    with pytest.raises(IndexError):
        ds[SAMPLES]
    with pytest.raises(TypeError):
        ds["a"]  # type: ignore[index]  # on purpose


def test_maps_are_checked_here(server: ScriptedMesh) -> None:
    ds = server.dataset()
    with pytest.raises(ConfigurationError, match="did you mean 'image'"):
        ds.map(mesh.ops.decode("imag"))
    with pytest.raises(ConfigurationError, match="class label"):
        ds.map(mesh.ops.int_label("label"))
    with pytest.raises(ConfigurationError, match="A Python function runs on nodes"):
        ds.map(lambda row: row)  # type: ignore[arg-type]  # on purpose
    assert ds.classes == ("cat", "dog")
    assert str(ds.schema()["image"]) == "uint8 [3, 8, 8]"


def test_where_no_whole_batch_is_left_comes_the_next_epoch(server: ScriptedMesh) -> None:
    """Saved in small batches behind what the last large one would begin with, and the tail is dropped."""
    with loader(server, 3, tail="drop") as small:
        small.seek(0, 33)
        state = small.state_dict()
    with loader(server, 10, tail="drop") as large:
        large.load_state_dict(state)
        assert (large.epoch, large.remaining) == (0, 0)
        assert list(large) == []
        assert (large.epoch, large.step, large.remaining) == (1, 0, 10)
        assert len(labels(large)) == 100
