"""Keys made of numbers: walked like a sorted list of all of them, from any place."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire.views.numbered_keys import KeyLevel, NumberedKeys

COUNTS = st.integers(0, 130)


@st.composite
def numbered(draw: st.DrawFn) -> NumberedKeys:
    heads = ["epoch=", "/step=", "/c/"]
    levels = []
    for head in heads[: draw(st.integers(1, 2))]:
        count = draw(COUNTS)
        width = draw(st.sampled_from([0, len(str(max(0, count - 1))), 5]))
        levels.append(KeyLevel(head, count, width))
    return NumberedKeys(tuple(levels), draw(st.sampled_from(["", "/0/0", "-of-8.safetensors"])))


@given(numbered(), st.data())
def test_walking_is_sorting(keys: NumberedKeys, data: st.DataObject) -> None:
    spellings = [
        [f"{level.head}{number:0{level.width}d}" for number in range(level.count)] for level in keys.levels
    ]
    every = ["".join(spelled) + keys.tail for spelled in itertools.product(*spellings)]
    every.sort(key=str.encode)
    near = st.sampled_from(["", "epoch=", "epoch=1", "f", *every]) if every else st.just("")
    after, prefix = data.draw(near), data.draw(near)
    prefix = prefix[: data.draw(st.integers(0, len(prefix)))]
    cut = data.draw(st.integers(0, len(after)))
    after = after[:cut] + data.draw(st.sampled_from(["", "\U0010ffff", "/", ":"]))
    wanted = [key for key in every if key > after and key.startswith(prefix)]
    assert [key for key, _ in keys.iter_keys(prefix, after)] == wanted
    for key, numbers in keys.iter_keys():
        assert keys.parse_key(key) == numbers


@pytest.mark.parametrize(
    "key",
    [
        "epoch=00/step=000001",
        "epoch=0/step=1",
        "epoch=0/step=000010",
        "epoch=٠/step=000001",
        "epoch=0/step=000001x",
    ],
)
def test_a_number_has_one_spelling(key: str) -> None:
    keys = NumberedKeys((KeyLevel("epoch=", 2), KeyLevel("/step=", 10, 6)))
    assert keys.parse_key(key) is None
    assert keys.parse_key("epoch=0/step=000001") == (0, 1)


def test_far_places_are_reached_at_once() -> None:
    keys = NumberedKeys((KeyLevel("c/", 10**15),), "/0")
    assert [key for key, _ in itertools.islice(keys.iter_keys(after="c/123456789/0"), 2)] == [
        "c/1234567890/0",
        "c/12345678900/0",
    ]
