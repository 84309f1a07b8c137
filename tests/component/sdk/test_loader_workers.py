"""`DataLoader(loader.as_iterable(), num_workers=k)`: each batch once, in order, epoch after epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from meshsdk.datasets.batch import Batch
from meshsdk.errors import ConfigurationError
from meshsdk.loader.torch_iterable import LoaderIterable
from tests.component.sdk import test_sdk_scripted
from tests.component.sdk.test_sdk_scripted import SAMPLES, labels, loader
from tests.support.shared_memory import await_no_more, segments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import meshsdk as mesh
    from tests.component.sdk.test_sdk_scripted import ScriptedMesh

# torch advises against more workers than cores; here they are for the laws, not for speed.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

# Fixtures.
scripted_server = test_sdk_scripted.scripted_server
undisturbed = test_sdk_scripted.undisturbed


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No shared memory is left by a test; processes are looked for after every test of all."""
    shared = segments()
    yield
    await_no_more(shared)


def rows(batches: Any) -> list[tuple[int, int, list[int]]]:
    return [(batch.epoch, batch.step, np.asarray(batch.positions).tolist()) for batch in batches]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_each_batch_once_and_in_order(server: ScriptedMesh, workers: int) -> None:
    with loader(server, output="torch") as plain, loader(server, output="torch") as one:
        given = DataLoader(one.as_iterable(), num_workers=workers)
        assert len(given) == len(one)
        for _ in range(2):  # the second `for` is the second epoch
            expected = list(plain)
            found = list(given)
            assert all(type(batch) is Batch for batch in found)
            assert rows(found) == rows(expected)
            assert labels(found) == labels(expected)
            assert sorted(labels(found)) == list(range(SAMPLES))


def test_a_worker_that_is_spawned(server: ScriptedMesh) -> None:
    with loader(server, output="torch") as plain, loader(server, output="torch") as one:
        plain.skip(2)
        one.skip(2)
        iterable = one.as_iterable()
        given = DataLoader(iterable, num_workers=1, multiprocessing_context="spawn")
        assert len(iterable) == len(one) - 2
        assert rows(given) == rows(plain)
        assert len(iterable) == len(one)  # what it gave to the end is counted here, too


def test_workers_that_stay(server: ScriptedMesh) -> None:
    with loader(server, output="torch") as plain, loader(server, output="torch") as one:
        given = DataLoader(one.as_iterable(), num_workers=2, persistent_workers=True)
        assert [rows(given) for _ in range(3)] == [rows(plain) for _ in range(3)]
        del given


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_that_stay_go_where_the_loader_is_moved_to(server: ScriptedMesh, context: str) -> None:
    with loader(server, output="torch") as plain, loader(server, output="torch") as one:
        given = DataLoader(
            one.as_iterable(), num_workers=2, persistent_workers=True, multiprocessing_context=context
        )
        assert rows(given) == rows(plain)
        moves: list[Callable[[mesh.Loader], None]] = [
            lambda each: each.seek(0, 3),
            lambda each: each.set_epoch(4),
            lambda each: each.skip(2),
            lambda each: each.load_state_dict({**each.state_dict(), "epoch": 7, "position": 24}),
        ]
        for move in moves:
            plain.load_state_dict(one.state_dict())
            move(plain)
            move(one)
            assert [rows(given) for _ in range(2)] == [rows(plain) for _ in range(2)]
        for _ in given:
            one.seek(2, 1)
            break
        assert rows(given)[0][:2] == (2, 1)
        del given


def test_workers_that_stay_do_not_go_on_in_an_order_that_is_no_longer_the_loaders(
    server: ScriptedMesh,
) -> None:
    with loader(server, output="torch", shuffle=False) as stored, loader(server, output="torch") as one:
        given = DataLoader(one.as_iterable(), num_workers=2, persistent_workers=True)
        assert len(list(given)) == len(one)
        one.load_state_dict(stored.state_dict())
        with pytest.raises(ConfigurationError, match="create a new DataLoader"):
            list(given)
        del given


def test_what_was_broken_off_is_begun_again_and_a_moved_loader_goes_on_there(server: ScriptedMesh) -> None:
    with loader(server) as one:
        given = DataLoader(one.as_iterable(), num_workers=2, prefetch_factor=1)
        for batch in given:
            assert batch.step == 0
            break
        assert [batch.step for batch in given] == list(range(len(one)))
        assert {batch.epoch for batch in given} == {1}
        one.seek(5, 3)
        assert [(batch.epoch, batch.step) for batch in given] == [(5, step) for step in range(3, len(one))]
        assert {batch.epoch for batch in given} == {6}


def test_a_loop_knows_its_length_while_it_runs(server: ScriptedMesh) -> None:
    with loader(server, output="torch") as one:
        one.skip(2)
        given = DataLoader(one.as_iterable())
        for wanted in (len(one) - 2, len(one)):
            assert len(given) == wanted
            assert [len(given) for _ in given] == [wanted] * wanted


def test_more_workers_than_batches(server: ScriptedMesh) -> None:
    with loader(server, batch=60) as one:
        given = DataLoader(one.as_iterable(), num_workers=4)
        assert [batch.step for batch in given] == [0, 1]
        assert {batch.epoch for batch in given} == {1}


def test_ranks_with_workers_share_each_global_batch(server: ScriptedMesh) -> None:
    found = []
    for rank in range(2):
        with loader(server, rank=rank, world=2) as one:
            found.append(rows(DataLoader(one.as_iterable(), num_workers=2)))
    with loader(server) as whole:
        together = [(e, s, a + b) for (e, s, a), (_, _, b) in zip(*found, strict=True)]
        assert together == rows(whole)


def test_without_collation_a_batch_is_its_fields(server: ScriptedMesh) -> None:
    """`batch_size=None` makes torch convert instead of collate: a plain dict of tensors."""
    with loader(server, output="torch") as one:
        first = next(iter(DataLoader(one.as_iterable(), batch_size=None, num_workers=1)))
        assert sorted(first) == ["image", "label"]
        assert isinstance(first["image"], torch.Tensor)
        assert first["image"].shape == (16, 3, 8, 8)


class EveryWorkerIterates(LoaderIterable):
    """As people write a dataset who do not know `as_iterable`."""

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.loader)


def test_workers_that_would_each_load_all_batches_are_refused(server: ScriptedMesh) -> None:
    with loader(server, rank=None, world=None) as one, loader(server) as given:
        several = DataLoader(EveryWorkerIterates(one), batch_size=None, num_workers=2)
        with pytest.raises(
            ConfigurationError,
            match=r"2 workers .* load all batches: pass loader\.as_iter",
        ):
            list(several)
        for workers in (0, 1):
            assert len(list(DataLoader(EveryWorkerIterates(one), batch_size=None, num_workers=workers)))
        split = DataLoader(EveryWorkerIterates(given), batch_size=None, num_workers=2)
        assert len(list(split)) == 2 * len(given)  # its rank was given: whoever does so knows


def test_batches_are_not_batched_again(server: ScriptedMesh) -> None:
    with loader(server) as one, pytest.raises(ConfigurationError, match="already returns batches"):
        list(DataLoader(one.as_iterable(), batch_size=2))
