"""The checker of names that many write at once finds each kind of loss, and nothing in what a correct store
may show."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.givenup import Mark
from tests.faults.history import ABSENT, Read, Write
from tests.faults.registers import Registers, check_registers

if TYPE_CHECKING:
    from tests.faults.history import Outcome

OLD = Write("k", "old", 0, 1, "done")
NEW = Write("k", "new", 2, 3, "done")


def write(value: str, began: float, ended: float, outcome: Outcome = "done") -> Write:
    return Write("k", value, began, ended, outcome)


def after_loss(value: str, *writes: Write) -> list[str]:
    return check_registers(Registers([*writes], [], [Read("k", value, 9, 10)]), [], [])


def test_an_acknowledged_write_that_no_survivor_has_is_found() -> None:
    assert after_loss("old", OLD, NEW) == ["after the loss k gave old, overwritten by new 1.000 s later"]
    assert after_loss("new", OLD, NEW) == []


def test_one_of_many_that_overlap_is_enough_and_an_older_one_is_not() -> None:
    burst = [write(f"b{number}", 2 + number / 100, 3) for number in range(20)]
    assert all(after_loss(one.value, OLD, *burst) == [] for one in burst)
    assert after_loss("old", OLD, *burst) != []
    assert after_loss("old", OLD, write("b", 2, 9, "unknown")) == []
    assert after_loss("old", OLD, write("b", 2, 9, "unknown"), burst[0]) != []


def test_a_name_that_is_lost_altogether_is_found() -> None:
    assert after_loss(ABSENT, OLD) == ["after the loss k gave nothing, and was written"]
    assert after_loss(ABSENT) == []


@pytest.mark.parametrize("outcome", ["done", "unknown"])
def test_a_deletion_counts_as_a_write(outcome: Outcome) -> None:
    gone = write(ABSENT, 2, 3, outcome)
    assert after_loss(ABSENT, OLD, gone) == []
    assert (after_loss("old", OLD, gone) == []) == (outcome == "unknown")
    assert (after_loss(ABSENT, OLD, gone, write("new", 4, 5)) == []) == (outcome == "unknown")


def test_a_deleted_object_that_is_back_is_found() -> None:
    assert after_loss("old", OLD, write(ABSENT, 2, 3)) == [
        "after the loss k gave old, overwritten by a deletion 1.000 s later"
    ]


def test_what_is_given_by_several_writes_is_explained_by_any_of_them() -> None:
    assert after_loss("old", OLD, NEW, write("old", 4, 5)) == []
    assert after_loss("old", OLD, NEW, write("old", 2.5, 5, "unknown")) == []


def test_what_nobody_wrote_or_what_was_refused_is_found() -> None:
    assert after_loss("x", OLD) == ["after the loss k gave x, unknown"]
    assert after_loss("no", OLD, write("no", 2, 3, "refused")) == [
        "after the loss k gave no, which was refused"
    ]
    assert after_loss("late", OLD, write("late", 11, 12)) == ["after the loss k gave late, unknown"]


def test_a_stale_read_is_found_unless_a_node_was_marked_beside_it() -> None:
    seen = Registers([OLD, NEW], [Read("k", "old", 3.5, 4)])
    why = "k gave old, overwritten by new 1.000 s later"
    assert check_registers(seen, [], []) == [why]
    assert check_registers(seen, [], [Mark("n1", 3, 3.1)]) == []
    assert check_registers(Registers([OLD, NEW], [Read("k", "old", 2.9, 4)]), [], []) == []


def test_the_end_is_judged_at_every_node_whatever_was_marked() -> None:
    seen, mark = Registers([OLD, NEW]), Mark("n1", 0, 99)
    assert check_registers(seen, [{"k": "new"}, {"k": "old"}], [mark]) == [
        "after the end k gave old, overwritten by new 1.000 s later"
    ]
