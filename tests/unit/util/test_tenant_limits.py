"""Admission: room for all while there is some, an even share for each when there is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.util.tenant_limits import Admission, AdmissionRejectedError


def test_one_may_have_all_of_it() -> None:
    room = Admission(10)
    for _ in range(10):
        room.admit("ann", 1)
    with pytest.raises(AdmissionRejectedError, match="10 of 10"):
        room.admit("ann", 1)


def test_who_has_less_than_an_even_share_is_let_in_beyond_the_limit() -> None:
    room = Admission(10)
    room.admit("ann", 10)
    room.admit("ben", 5)
    assert not room.has_room("ben", 1)
    assert room.has_room("eve", 3)
    assert not room.has_room("eve", 4)
    room.release("ann", 10)
    assert room.has_room("ben", 5)


def test_what_exceeds_the_limit_is_let_in_alone() -> None:
    room = Admission(10)
    with room.hold("ann", 50), pytest.raises(AdmissionRejectedError):
        room.admit("ben", 1)
    with room.hold("ben", 1), pytest.raises(AdmissionRejectedError):
        room.admit("ann", 50)
    assert repr(room) == "<Admission 0 of 10 held, by 0>"


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 12), st.booleans()), max_size=80))
def test_never_twice_the_limit_and_all_is_given_back(steps: list[tuple[str, int, bool]]) -> None:
    room, held = Admission(10), list[tuple[str, int]]()
    for account, units, leave in steps:
        if leave and held:
            room.release(*held.pop())
        elif room.has_room(account, units):
            alone = room.held == 0
            room.admit(account, units)
            held.append((account, units))
            assert room.held <= 20 or alone
        elif room.held + units <= 20:  # refused, so it has its share
            mine = sum(size for name, size in held if name == account)
            others = {name for name, _ in held} | {account}
            assert mine + units > 10 // len(others)
    for entry in held:
        room.release(*entry)
    assert room.held == 0
