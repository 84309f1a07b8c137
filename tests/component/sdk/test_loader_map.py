"""`Loader.map`: a function of the trainer's own, in order, exactly once, whatever it does."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import meshsdk as mesh
from meshsdk.errors import ClosedError, ConfigurationError, DeadlineError
from tests.component.sdk import test_sdk_scripted
from tests.component.sdk.test_sdk_scripted import SAMPLES, loader, sockets, threads

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshsdk.datasets.batch import Batch
    from tests.component.sdk.test_sdk_scripted import ScriptedMesh

# Fixtures.
scripted_server = test_sdk_scripted.scripted_server
undisturbed = test_sdk_scripted.undisturbed


def samples(batch: Batch) -> list[int]:
    kept = np.asarray(batch["label"])[np.asarray(batch.status) == 0]
    return [int(label) for label in kept]


def process_and_samples(batch: Batch) -> tuple[int, list[int], int]:
    return os.getpid(), samples(batch), int(np.asarray(batch["image"]).astype(np.int64).sum())


def take_all(results: Iterable[list[int]], found: list[list[int]]) -> None:
    for labels in results:
        found.append(labels)


def map_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mesh-map")]


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_order_whoever_is_first(server: ScriptedMesh, workers: int) -> None:
    begun: list[int] = []

    def slow_first(batch: Batch) -> tuple[int, list[int]]:
        begun.append(batch.step)
        time.sleep(0.05 if batch.step % 3 == 0 else 0)
        return batch.step, samples(batch)

    with loader(server) as plain, loader(server).map(slow_first, workers=workers) as mapped:
        assert len(mapped) == 7
        for epoch in range(2):
            found = list(mapped)
            assert found == [(batch.step, samples(batch)) for batch in plain]
            assert sorted(label for _, labels in found for label in labels) == list(range(SAMPLES))
            assert mapped.epoch == epoch + 1
            assert mapped.state_dict() == plain.state_dict()
            assert map_threads() == threads() == []
    assert sorted(begun) == sorted([*range(7)] * 2)


def test_the_state_counts_what_was_returned(server: ScriptedMesh) -> None:
    with loader(server) as plain:
        expected = [samples(batch) for batch in plain]
    with loader(server).map(samples, workers=2) as mapped:
        found = []
        for labels in mapped:
            found.append(labels)
            if len(found) == 3:
                break
        state = mapped.state_dict()
        assert mapped.loader.state_dict() == state
        assert map_threads() == threads() == []
        assert sockets(server) == 0
        rest = list(mapped)
        assert found + rest == expected
        mapped.load_state_dict(state)
        assert list(mapped) == rest
        mapped.set_epoch(0)
        assert list(mapped) == expected
    with loader(server).map(samples) as resumed:
        resumed.load_state_dict(state)
        assert list(resumed) == rest


def test_another_iteration_goes_on_where_the_first_one_is(server: ScriptedMesh) -> None:
    """As after a look at the first batch: what the first iteration has taken ahead is not left out."""
    with loader(server) as plain:
        expected = [samples(batch) for batch in plain]
    with loader(server).map(samples, workers=3) as mapped:
        first = iter(mapped)
        found = [next(first), next(first)]
        assert found + list(mapped) == expected
        with pytest.raises(ClosedError):
            next(first)
        assert mapped.epoch == 1
        never = iter(mapped)
        second = iter(mapped)
        next(second)
        del never, second
        assert len(list(mapped)) == len(expected) - 1


def test_a_loader_that_is_moved_itself_stays_where_it_was_moved_to(server: ScriptedMesh) -> None:
    with loader(server) as plain:
        expected = [samples(batch) for batch in plain]
    inner = loader(server)
    with inner.map(samples, workers=3) as mapped:
        inner.seek(0, 2)
        assert mapped.state_dict() == inner.state_dict()
        iterator = iter(mapped)
        assert next(iterator) == expected[2]
        inner.seek(0, 5)
        assert mapped.state_dict() == inner.state_dict()
        with pytest.raises(ClosedError, match="moved"):
            next(iterator)
        assert list(mapped) == expected[5:]
        mapped.set_epoch(0)
        for _ in mapped:
            inner.seek(0, 4)
            break
        assert list(mapped) == expected[4:]
        left = iter(mapped)
        next(left)
        inner.seek(0, 6)
        assert list(mapped) == expected[6:]


def test_an_error_in_the_first_result_does_not_move_the_loader(server: ScriptedMesh) -> None:
    def fail(batch: Batch) -> None:
        raise ZeroDivisionError(batch.step)

    inner = loader(server)
    with inner.map(fail, workers=2) as mapped:
        inner.seek(0, 3)
        with pytest.raises(ZeroDivisionError, match="3"):
            next(iter(mapped))
        assert inner.step == 3
        assert mapped.state_dict() == inner.state_dict()


def test_a_generator_draws_the_same_at_the_same_address(server: ScriptedMesh) -> None:
    def draw(batch: Batch, rng: np.random.Generator, scale: int = 1000) -> tuple[int, int]:
        return batch.step, int(rng.integers(scale))

    with loader(server).map(draw, workers=2) as mapped:
        first, second = list(mapped), list(mapped)
        mapped.set_epoch(0)
        iterator = iter(mapped)
        assert [next(iterator), next(iterator)] == first[:2]
        mapped.load_state_dict(mapped.state_dict())
        assert list(mapped) == first[2:]
    assert len({number for _, number in first + second}) > 7
    assert first != second
    with loader(server, seed=8).map(draw) as other:
        assert list(other) != first
    with loader(server, shuffle=mesh.Blocks(shards=2)).map(draw) as blocks:
        state, drawn = blocks.state_dict(), list(blocks)
    with loader(server).map(draw) as resumed:  # takes over the order, and with it the plan
        resumed.load_state_dict(state)
        assert list(resumed) == drawn


def test_an_error_of_the_function_names_the_step(server: ScriptedMesh) -> None:
    def fail(batch: Batch) -> list[int]:
        if batch.step == 2:
            raise ZeroDivisionError
        return samples(batch)

    with loader(server) as plain, loader(server).map(fail, workers=3) as mapped:
        expected = [samples(batch) for batch in plain]
        found: list[list[int]] = []
        with pytest.raises(ZeroDivisionError) as caught:
            take_all(mapped, found)
        assert caught.value.__notes__ == ["in the function of loader.map, for step 2 of epoch 0"]
        assert found == expected[:2]
        with loader(server) as resumed:
            resumed.load_state_dict(mapped.state_dict())
            assert resumed.step == 2
        assert map_threads() == threads() == []


def test_errors_of_the_loader_come_after_the_results_before_them(server: ScriptedMesh) -> None:
    server.away = range(4, 7)
    found: list[list[int]] = []
    with loader(server, deadline=0.5).map(samples, workers=2) as mapped:
        with pytest.raises(DeadlineError):
            take_all(mapped, found)
        assert len(found) == 4
        server.away = range(0)
        take_all(mapped, found)
    assert sorted(label for labels in found for label in labels) == list(range(SAMPLES))


@pytest.mark.parametrize("how", ["iterate", "load", "close"])
def test_a_running_iteration_ends(server: ScriptedMesh, how: str) -> None:
    with loader(server).map(samples) as mapped:
        state, iterator = mapped.state_dict(), iter(mapped)
        first = next(iterator)
        if how == "iterate":
            assert next(iter(mapped)) != first
        elif how == "load":
            mapped.load_state_dict(state)
        else:
            mapped.close()
        with pytest.raises(ClosedError):
            next(iterator)
        if how == "load":
            assert next(iter(mapped)) == first


def test_processes(server: ScriptedMesh) -> None:
    with (
        loader(server) as plain,
        loader(server).map(process_and_samples, workers=1, processes=True) as mapped,
    ):
        expected = [process_and_samples(batch)[1:] for batch in plain]
        for _ in range(2):
            found = list(mapped)
            assert [each[1:] for each in found] == expected
            assert len({each[0] for each in found} | {os.getpid()}) == 2
            mapped.set_epoch(0)
    with pytest.raises(ConfigurationError, match="at the top of a module"):
        loader(server).map(lambda batch: batch, processes=True)


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"workers": True}, {"workers": "2"}])
def test_wrong_arguments(server: ScriptedMesh, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="workers"):
        loader(server).map(samples, **wrong)
    with pytest.raises(ConfigurationError, match="not a function"):
        loader(server).map("samples")  # type: ignore[arg-type]
