"""The loader's memory and its endings: no slot is written while it is held, and nothing is left running."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from meshsdk.client.arena import slot_size
from meshsdk.errors import ClosedError
from meshsdk.loader_stats import Meter
from tests.component.sdk import test_sdk_scripted
from tests.component.sdk.test_sdk_scripted import labels, loader, sockets, threads, wait_for
from tests.support.bounded_wait import await_end

if TYPE_CHECKING:
    from tests.component.sdk.test_sdk_scripted import ScriptedMesh

# Fixtures.
scripted_server = test_sdk_scripted.scripted_server
undisturbed = test_sdk_scripted.undisturbed


# --- memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["numpy", "torch"])
def test_no_slot_is_written_while_a_batch_is_held(server: ScriptedMesh, output: Any) -> None:
    with loader(server, prefetch_bytes=20_000, output=output) as one:
        held = list(one)
        assert one.stats().overflows > 0
        assert labels(held) == labels(loader(server))
        part = held[3]["image"][5]
        expected = np.array(part.tolist())
        del held
        gc.collect()
        list(one)
        assert part.tolist() == expected.tolist()


def test_a_job_that_drops_its_batches_lives_in_its_arena(server: ScriptedMesh) -> None:
    with loader(server, prefetch_bytes=100_000) as one:
        for _ in range(3):
            for batch in one:
                del batch
        assert one.stats().overflows == 0
        assert one._arena.allocated <= 100_000


def test_tensors_share_the_slot_without_a_copy(server: ScriptedMesh) -> None:
    with loader(server, output="torch") as one:
        batch = next(iter(one))
        assert isinstance(batch["image"], torch.Tensor)
        assert batch["image"].dtype == torch.uint8
        assert batch["image"].shape == (16, 3, 8, 8)
        assert batch["label"].dtype == torch.int64
        assert isinstance(batch.positions, torch.Tensor)
        address = batch["image"].data_ptr()
        slots = [slot.memory for slot in one._arena._out]
        assert any(0 <= address - memory.ctypes.data < memory.size for memory in slots)
        assert batch["image"].data_ptr() % 128 == 0


def test_requests_keep_to_the_credit(server: ScriptedMesh) -> None:
    """With all answers held back, no more is asked for than the arena has room for."""
    budget = 3 * slot_size(loader(server)._feed.expected)

    def asked() -> int:
        return sum("share=credit" in target for target in server.asked)

    with loader(server, prefetch_bytes=budget, connections=8, share="credit") as one:
        server.gate.clear()
        waiting = threading.Thread(target=lambda: next(iter(one)))
        waiting.start()
        wait_for(lambda: asked() >= 3)
        wait_for(lambda: asked() > 3, seconds=0.05)
        found = asked()
        server.gate.set()
        await_end(waiting)
        assert found == 3


# --- endings --------------------------------------------------------------------------------------------


def test_nothing_runs_after_the_last_step(server: ScriptedMesh) -> None:
    one = loader(server)
    for _ in one:
        pass
    assert threads() == []
    assert sockets(server) == 0
    assert "idle" in repr(one)


def test_nothing_runs_after_a_break(server: ScriptedMesh) -> None:
    one = loader(server, prefetch_bytes=3 * slot_size(loader(server)._feed.expected))  # not all seven steps
    for batch in one:
        assert threads() == ["mesh-reader"]
        assert "running" in repr(one)
        if batch.step == 1:
            break
    assert threads() == []
    assert sockets(server) == 0
    assert [batch.step for batch in one] == [2, 3, 4, 5, 6]


def test_nothing_runs_after_an_exception_in_the_loop(server: ScriptedMesh) -> None:
    def train() -> None:
        for _ in loader(server):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    gc.collect()
    assert threads() == []


def test_nothing_runs_after_the_with_block(server: ScriptedMesh) -> None:
    with loader(server) as one:
        iterator = iter(one)
        batch = next(iterator)
    assert threads() == []
    assert labels([batch])
    with pytest.raises(ClosedError):
        next(iterator)
    with pytest.raises(ClosedError, match="create another"):
        iter(one)


def test_an_abandoned_iterator_ends_itself(server: ScriptedMesh) -> None:
    iterator = iter(loader(server))
    next(iterator)
    del iterator
    gc.collect()
    assert threads() == []


def test_a_second_iteration_ends_the_first(server: ScriptedMesh) -> None:
    with loader(server) as one:
        first = iter(one)
        next(first)
        second = iter(one)
        assert next(second).step == 1
        with pytest.raises(ClosedError, match="another iteration"):
            next(first)
        assert next(second).step == 2


def test_closing_while_an_iteration_starts_ends_it(
    server: ScriptedMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = loader(server)
    monkeypatch.setattr(Meter, "start", lambda _: one.close())  # called when requests are sent already
    with pytest.raises(ClosedError, match="this loader is closed"):
        next(iter(one))
    assert threads() == []


def test_closing_while_waiting_wakes_the_consumer(server: ScriptedMesh) -> None:
    one = loader(server)
    server.gate.clear()
    raised: list[BaseException] = []

    def consume() -> None:
        try:
            next(iter(one))
        except ClosedError as error:
            raised.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    wait_for(lambda: bool(server.asked))
    one.close()
    await_end(consumer)
    server.gate.set()
    assert len(raised) == 1
