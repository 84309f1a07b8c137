"""The checker finds each kind of fault, and nothing in what a correct store may show."""

from __future__ import annotations

import pytest

from tests.faults.history import ABSENT, History, Listing, Read, Write, check, possible


def done(key: str, value: str, began: float, ended: float) -> Write:
    return Write(key, value, began, ended, "done")


def history(*events: Write | Read | Listing) -> History:
    found = History()
    for event in events:
        kind = {Write: found.writes, Read: found.reads, Listing: found.listings}[type(event)]
        kind.append(event)  # type: ignore[attr-defined]
    return found


def test_what_was_acknowledged_is_what_there_is() -> None:
    seen = history(done("k", "v1", 0, 1), Read("k", "v1", 2, 3), Listing("", frozenset({"k"}), 2, 3))
    assert check(seen, {"k": "v1"}) == []


@pytest.mark.parametrize("outcome", ["done", "unknown"])
def test_a_read_beside_a_write_may_give_either(outcome: str) -> None:
    writes = [done("k", "v1", 0, 1), Write("k", "v2", 2, 5, outcome)]  # type: ignore[arg-type]
    assert possible(writes, 3, 4) == {"v1", "v2"}


def test_an_unknown_write_may_be_there_at_the_end_or_not() -> None:
    seen = history(done("k", "v1", 0, 1), Write("k", "v2", 2, 3, "unknown"))
    assert check(seen, {"k": "v1"}) == check(seen, {"k": "v2"}) == []
    assert check(seen, {}) == ["at the end k gave nothing, not v1 or v2"]


def test_a_lost_write_is_found() -> None:
    assert check(history(done("k", "v1", 0, 1)), {}) == ["at the end k gave nothing, not v1"]


def test_an_old_value_is_found() -> None:
    seen = history(done("k", "v1", 0, 1), done("k", "v2", 2, 3), Read("k", "v1", 4, 5))
    assert check(seen, {"k": "v2"}) == ["k gave v1, not v2"]


def test_a_deleted_object_that_is_back_is_found() -> None:
    seen = history(done("k", "v1", 0, 1), done("k", ABSENT, 2, 3), Listing("", frozenset({"k"}), 4, 5))
    assert check(seen, {"k": "v1"}) == [
        "at the end k gave v1, not nothing",
        "k was listed, and is deleted or never was",
    ]


def test_a_settled_key_that_is_not_listed_is_found() -> None:
    seen = history(done("k", "v1", 0, 1), Listing("", frozenset(), 2, 3))
    assert check(seen, {"k": "v1"}) == ["k was not listed, and is there"]


def test_a_refused_write_does_not_count() -> None:
    assert check(history(Write("k", "v1", 0, 1, "refused")), {"k": "v1"}) == [
        "at the end k gave v1, not nothing"
    ]


def test_a_chain_has_everybody_who_was_told_so_once() -> None:
    seen = History(chains=[done("c", "a", 0, 1), Write("c", "b", 2, 3, "refused"), done("c", "d", 4, 5)])
    assert check(seen, {"c": "a,d"}) == []
    assert check(seen, {"c": "d"}) == ["c: a was acknowledged and is lost"]
    assert check(seen, {"c": "a,b,d"}) == ["c: b was refused and is there"]
    assert check(seen, {"c": "a,d,a"}) == ["c: a is there twice"]
    assert check(seen, {"c": "a,d,x"}) == ["c: nobody wrote x"]


def test_one_alone_makes_a_key() -> None:
    seen = History(firsts=[done("f", "a", 0, 1), Write("f", "b", 0, 1, "refused")])
    assert check(seen, {"f": "a"}) == []
    assert check(seen, {"f": "b"}) == ["f: made by a, but it is b"]
    seen.firsts.append(done("f", "c", 0, 1))
    assert check(seen, {"f": "a"}) == ["f: made by a, c at once"]
