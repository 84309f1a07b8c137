"""The checker finds each kind of late write, and nothing in what a correct store may show."""

from __future__ import annotations

import pytest

from tests.faults.givenup import Attempt, Haste, Mark, check_haste
from tests.faults.history import ABSENT, Read

GIVEN_UP = Attempt("k", "a", 0, 1, "unknown", "n3")
MARK = Mark("n3", 2, 2.1)
AFTER = Attempt("k", "b", 3, 4, "done", "n1")


def faults(*seen: Attempt | Read, marks: tuple[Mark, ...] = (MARK,), end: str = "b") -> list[str]:
    found = Haste()
    for event in seen:
        if isinstance(event, Attempt):
            found.attempts.append(event)
        else:
            found.reads.append(event)
    return check_haste(found, [{"k": end}], marks)


def test_what_was_given_up_before_its_node_was_marked_is_not_seen_after_a_later_write() -> None:
    why = "k gave a of n3, which was given up before that node was marked away, and written over after"
    assert faults(GIVEN_UP, AFTER) == []
    assert faults(GIVEN_UP, AFTER, Read("k", "a", 5, 6)) == [why]
    assert faults(GIVEN_UP, AFTER, end="a") == [f"at the end {why}"]


@pytest.mark.parametrize(
    ("given_up", "marks"),
    [
        (GIVEN_UP, ()),
        (GIVEN_UP, (Mark("n2", 2, 2.1),)),  # another node: this one may be slow, and have passed it on
        (GIVEN_UP, (Mark("n3", 0.5, 1.5),)),  # it may have been asked for under the map that marks it
        (GIVEN_UP, (Mark("n3", 2, 3.5),)),  # the later write may have been decided before
        (Attempt("k", "a", 3.5, 5, "unknown", "n3"), (MARK,)),  # at the same time
    ],
)
def test_what_was_given_up_otherwise_may_come_late(given_up: Attempt, marks: tuple[Mark, ...]) -> None:
    assert faults(given_up, AFTER, end="a", marks=marks) == []


def test_what_was_given_up_is_seen_until_a_later_write_is_acknowledged() -> None:
    unknown = Attempt("k", "b", 3, 4, "unknown", "n1")
    assert faults(GIVEN_UP, unknown, end="a") == faults(GIVEN_UP, unknown) == []
    assert faults(GIVEN_UP, AFTER, Read("k", "a", 3.5, 6)) == []


def test_what_was_written_over_is_not_seen_again() -> None:
    first, second = Attempt("k", "a", 0, 1, "done", "n1"), Attempt("k", "b", 1, 2, "done", "n2")
    assert faults(first, second, marks=()) == []
    assert faults(first, second, end="a", marks=()) == ["at the end k gave a of n1, which was written over"]
    assert faults(first, second, end=ABSENT, marks=()) == ["at the end k gave nothing, and was written"]


def test_what_was_refused_or_not_written_is_never_seen() -> None:
    refused = Attempt("k", "a", 0, 1, "refused", "n1")
    assert faults(refused, end=ABSENT) == []
    assert faults(refused, end="a") == ["at the end k gave a of n1, which was refused"]
    assert faults(refused, end="x") == ["at the end k gave x, which nobody wrote before"]


def test_reads_beside_a_mark_are_not_judged() -> None:
    first, second = Attempt("k", "a", 0, 0.5, "done", "n1"), Attempt("k", "b", 0.5, 0.8, "done", "n2")
    assert faults(first, second, Read("k", "a", 1.5, 1.6)) == []
    assert faults(first, second, Read("k", "a", 3.2, 3.3)) == ["k gave a of n1, which was written over"]
