"""A step's time out of blocks of steps: right for clumps and on a busy machine, and told when it is not."""

from __future__ import annotations

import random
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtools.doctor.stage_times import SURE, Length, block_size, measure_pace, run_length

STEP = 0.005


def marks(
    connections: int, clump: int, blocks: int, seed: int, *, jitter: float = 0.0, hiccup: float = 0.0
) -> list[float]:
    """When blocks end of batches that arrive `clump` at a time, from somewhere within a clump on. In a fifth
    of the blocks something takes `hiccup` seconds."""
    draw, block = random.Random(seed), block_size(connections)
    phase = draw.randrange(clump)
    disturbed = set(draw.sample(range(blocks), blocks // 5))
    found, late = [], 0.0
    for number in range(blocks + 1):
        arrived = (phase + number * block) // clump * clump * STEP
        found.append(arrived + late + draw.uniform(0, jitter))
        late += hiccup if number in disturbed else 0.0
    return found


@settings(deadline=None)
@given(st.integers(1, 64), st.data())
def test_clumps_do_not_show(connections: int, data: st.DataObject) -> None:
    clump = data.draw(st.integers(1, connections))
    blocks, seed = data.draw(st.integers(4, 40)), data.draw(st.integers(0, 1000))
    found = measure_pace(marks(connections, clump, blocks, seed), block_size(connections))
    assert found.step == pytest.approx(STEP, rel=0.1)
    if connections <= 4:
        assert found.step == pytest.approx(STEP)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(0, 10_000), st.integers(5, 40))
def test_what_disturbs_a_fifth_of_the_blocks_does_not_show(connections: int, seed: int, blocks: int) -> None:
    """Steps of 5 ms, something of 50 ms now and then, and clocks that are read late: within a tenth."""
    jitter = 0.1 * STEP * block_size(connections)
    given = marks(connections, connections, blocks, seed, jitter=jitter, hiccup=10 * STEP)
    found = measure_pace(given, block_size(connections))
    plain = (given[-1] - given[0]) / (blocks * block_size(connections))
    assert found.step == pytest.approx(STEP, rel=0.1)
    assert plain > 1.1 * STEP or connections > 2 or blocks // 5 == 0


def test_what_is_not_known_is_told() -> None:
    even = [0.1 * number for number in range(9)]
    assert measure_pace(even, 4).doubt == pytest.approx(0, abs=1e-9)
    assert measure_pace(even, 4).sure
    wild = [0.0, 0.1, 0.5, 0.6, 1.4, 1.5, 2.1, 2.2]
    assert measure_pace(wild, 4).doubt > 0.3
    assert measure_pace([1.0], 4).doubt == measure_pace([1.0, 1.5], 4).doubt == inf


def test_a_run_goes_on_while_its_steps_vary() -> None:
    assert run_length(32, 4, 10_000) == Length(12, 36, 288)
    assert run_length(32, 4, 100) == Length(12, 36, 96)
    assert run_length(3, 1, 0) == Length(1, 3, 3)
    length = Length(12, 36, 96)
    assert not length.ended([0.0, 1.0])
    assert length.ended([0.0, 1.0, 2.0, 3.0])
    assert not length.ended([0.0, 1.0, 3.0, 4.0])
    assert length.ended([float(number * number) for number in range(9)])
    assert length.ended([0.0, 10.0, 30.0, 35.0])
    assert SURE < 0.1
