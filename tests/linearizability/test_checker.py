"""The checker finds each kind of violation, lets pass what docs/promises.md allows, and agrees with trying
every order."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.linearizability.checker import linearizable, verdict
from tests.linearizability.history import Event, History
from tests.linearizability.model import ABSENT, ANY, MARKER, Operation, Version, step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.linearizability.model import Action, State, Versioning

GOLDEN = Path(__file__).with_name("golden")


def operation(action: Action, begin: float, end: float, status: int = 200, **more: Any) -> Operation:
    return Operation(0, "c", "n1", action, begin, end, status, **more)


def put(value: str, begin: float, end: float, status: int = 200, **more: Any) -> Operation:
    return operation("put", begin, end, status, value=value, **more)


def delete(begin: float, end: float, status: int = 204, **more: Any) -> Operation:
    return operation("delete", begin, end, status, **more)


def get(value: str, begin: float, end: float, made: str = "", **more: Any) -> Operation:
    if value == ABSENT:
        return operation("get", begin, end, 404, **more)
    return operation("get", begin, end, seen=(Version(made, value),), **more)


def versions(begin: float, end: float, *seen: tuple[str, str]) -> Operation:
    return operation("versions", begin, end, seen=tuple(Version(*one) for one in seen))


LEGAL = {
    "nothing was written": [get(ABSENT, 0, 1)],
    "a read gives the last write": [put("a", 0, 1), put("b", 2, 3), get("b", 4, 5)],
    "a read during a write gives the old": [put("a", 0, 1), put("b", 2, 9), get("a", 3, 4)],
    "a read during a write gives the new": [put("a", 0, 1), put("b", 2, 9), get("b", 3, 4)],
    "overlapping writes, either order": [put("a", 0, 5), put("b", 0, 5), get("a", 6, 7)],
    "a write without an answer took place": [put("a", 0, 1), put("b", 2, 3, 503), get("b", 4, 5)],
    "a write without an answer did not": [put("a", 0, 1), put("b", 2, 3, 0), get("a", 4, 5)],
    "a write without an answer comes late": [
        put("b", 0, 1, 0),
        put("a", 2, 3),
        get("a", 4, 5),
        get("b", 6, 7),
    ],
    "a 4xx has no effect": [put("a", 0, 1), put("b", 2, 3, 409), get("a", 4, 5)],
    "one winner of If-None-Match": [
        put("a", 0, 5, if_none_match=ANY),
        put("b", 0, 5, 412, if_none_match=ANY),
        get("a", 6, 7),
    ],
    "a second winner after a deletion": [
        put("a", 0, 1, if_none_match=ANY),
        delete(2, 3),
        put("b", 4, 5, if_none_match=ANY),
    ],
    "a chain of If-Match": [
        put("a", 0, 1),
        put("b", 2, 3, if_match="a"),
        put("c", 2, 9, 412, if_match="a"),
        delete(4, 5, if_match="b"),
        put("d", 6, 7, 404, if_match="b"),
    ],
    "conditional reads": [
        put("a", 0, 1),
        operation("get", 2, 3, 304, if_none_match="a"),
        operation("get", 2, 3, 412, if_match="b"),
        get("a", 2, 3, if_match="a"),
    ],
    "listings": [
        operation("list", 0, 1),
        operation("complete", 2, 3, value="a"),
        operation("list", 4, 5, seen=(Version("", "a"),)),
    ],
}

VIOLATIONS = {
    "a stale read": [put("a", 0, 1), put("b", 2, 3), get("a", 4, 5)],
    "an acknowledged write is lost": [put("a", 0, 1), get(ABSENT, 2, 3)],
    "a lost update": [put("a", 0, 1), put("b", 2, 5, if_match="a"), put("c", 2, 5, if_match="a")],
    "two winners of If-None-Match": [
        put("a", 0, 5, if_none_match=ANY),
        put("b", 0, 5, if_none_match=ANY),
    ],
    "a resurrected deletion": [put("a", 0, 1), delete(2, 3), get("a", 4, 5)],
    "bytes that nobody wrote": [put("a", 0, 1), get("x", 2, 3)],
    "a refused write is seen": [put("a", 0, 1), put("b", 2, 3, 412, if_match="x"), get("b", 4, 5)],
    "a read from the future": [get("a", 0, 1), put("a", 2, 3)],
    "a 412 is judged by a write that is lost later": [
        put("a", 0, 1, 0),
        put("b", 2, 3, 412, if_none_match=ANY),
        get(ABSENT, 4, 5),
    ],
    "a 412 is judged by a write that others do not show yet": [
        put("a", 0, 1),
        put("b", 2, 9),
        put("c", 3, 4, 412, if_match="a"),
        get("a", 5, 6),
    ],
    "a 404 is judged by a deletion that others do not show yet": [
        put("a", 0, 1),
        delete(2, 9),
        put("c", 3, 4, 404, if_match="a"),
        get("a", 5, 6),
    ],
    "a listing that misses a name": [put("a", 0, 1), operation("list", 2, 3)],
    "new, then old, after the write has ended": [
        put("a", 0, 1),
        put("b", 2, 5),
        get("b", 3, 4),
        get("a", 6, 7),
    ],
}


@pytest.mark.parametrize("name", LEGAL)
def test_legal_histories_pass(name: str) -> None:
    assert verdict(LEGAL[name]) == "linearizable"


@pytest.mark.parametrize("name", VIOLATIONS)
def test_each_kind_of_violation_is_found(name: str) -> None:
    assert verdict(VIOLATIONS[name]) == "violation"


def test_reads_that_go_from_new_to_old_during_the_write_are_the_documented_exception() -> None:
    during = [put("a", 0, 1), put("b", 2, 9), get("b", 3, 4), get("a", 5, 6), get("b", 10, 11)]
    assert verdict(during) == "inversion"
    deletion = [put("a", 0, 1), delete(2, 9), get(ABSENT, 3, 4), get("a", 5, 6)]
    assert verdict(deletion) == "inversion"
    unknown = [put("a", 0, 1), put("b", 2, 3, 503), get("b", 4, 5), get("a", 6, 7), get("b", 8, 9)]
    assert verdict(unknown) == "inversion"


def test_a_write_that_nobody_was_told_of_may_be_seen_until_something_later_is_acknowledged() -> None:
    seen = [put("a", 0, 1), put("b", 2, 3, 503), get("b", 4, 5), put("c", 6, 7, if_match="a")]
    assert verdict(seen) == "unacknowledged"
    assert verdict([*seen, put("d", 8, 9, if_match="c")]) == "unacknowledged"
    assert verdict([*seen, get("b", 8, 9), put("d", 10, 11, if_match="c")]) == "violation"


# versions -------------------------------------------------------------------------------------------------

ENABLED = {
    "the newest of several": [
        put("a", 0, 1, made="1"),
        put("b", 2, 3, made="2"),
        get("b", 4, 5, "2"),
        versions(4, 5, ("2", "b"), ("1", "a")),
        get("a", 4, 5, "1", version="1"),
    ],
    "a marker, and what is below it": [
        put("a", 0, 1, made="1"),
        delete(2, 3, made="2"),
        get(ABSENT, 4, 5),
        versions(4, 5, ("2", MARKER), ("1", "a")),
        operation("get", 4, 5, 405, version="2"),
        delete(6, 7, version="2"),
        get("a", 8, 9, "1"),
        put("b", 10, 11, 412, if_none_match=ANY),
    ],
    "a deleted version is gone": [
        put("a", 0, 1, made="1"),
        put("b", 2, 3, made="2"),
        delete(4, 5, version="2"),
        get(ABSENT, 6, 7, version="2"),
        get("a", 6, 7, "1"),
    ],
    "If-None-Match above a marker": [
        put("a", 0, 1, made="1"),
        delete(2, 3, made="2"),
        put("b", 4, 5, if_none_match=ANY, made="3"),
    ],
}
ENABLED_WRONG = {
    "a version is lost": [put("a", 0, 1, made="1"), put("b", 2, 3, made="2"), versions(4, 5, ("2", "b"))],
    "a version is not found": [put("a", 0, 1, made="1"), get(ABSENT, 2, 3, version="1")],
    "a version is back": [
        put("a", 0, 1, made="1"),
        delete(2, 3, version="1"),
        get("a", 4, 5, "1", version="1"),
    ],
    "the order of versions is not that of the writes": [
        put("a", 0, 1, made="1"),
        put("b", 2, 3, made="2"),
        versions(4, 5, ("1", "a"), ("2", "b")),
    ],
    "two listings have two orders": [
        put("a", 0, 5, made="1"),
        put("b", 0, 5, made="2"),
        versions(6, 7, ("1", "a"), ("2", "b")),
        versions(6, 7, ("2", "b"), ("1", "a")),
    ],
    "a marker is lost": [put("a", 0, 1, made="1"), delete(2, 3, made="2"), get("a", 4, 5, "1")],
    "a stale current version": [put("a", 0, 1, made="1"), put("b", 2, 3, made="2"), get("a", 4, 5, "1")],
}


def test_a_listing_of_versions_may_lack_what_is_being_written() -> None:
    under_way = [
        put("a", 0, 9, made="1"),
        put("b", 0, 1, made="2"),
        versions(2, 3, ("2", "b")),
        versions(10, 11, ("2", "b"), ("1", "a")),
    ]
    assert verdict(under_way, "Enabled") == "unacknowledged"
    acknowledged = [put("a", 0, 1.5, made="1"), *under_way[1:]]
    assert verdict(acknowledged, "Enabled") == "violation"


def test_nodes_may_differ_about_a_version_without_an_acknowledgement() -> None:
    listings = [versions(4, 5, ("2", "b"), ("1", "a")), versions(6, 7, ("1", "a"))]
    writes = [put("a", 0, 1, made="1"), put("b", 2, 3, 503)]
    assert verdict([*writes, *listings], "Enabled") == "inversion"
    later = [*writes, put("c", 3.5, 3.6, made="c"), versions(4, 5, ("c", "c"), ("2", "b"), ("1", "a"))]
    assert verdict([*later, versions(6, 7, ("c", "c"), ("1", "a"))], "Enabled") == "unacknowledged"
    marked = [put("a", 0, 1, made="1"), delete(2, 3, 503), put("c", 4, 5, made="c")]
    marked += [versions(6, 7, ("c", "c"), ("m", MARKER), ("1", "a")), versions(8, 9, ("c", "c"), ("1", "a"))]
    assert verdict(marked, "Enabled") == "unacknowledged"


@pytest.mark.parametrize("name", ENABLED)
def test_legal_histories_of_versions_pass(name: str) -> None:
    assert verdict(ENABLED[name], "Enabled") == "linearizable"


@pytest.mark.parametrize("name", ENABLED_WRONG)
def test_each_kind_of_violation_of_versions_is_found(name: str) -> None:
    assert verdict(ENABLED_WRONG[name], "Enabled") == "violation"


def test_suspended_versioning_replaces_the_null_version() -> None:
    legal = [
        put("a", 0, 1),
        put("b", 2, 3),
        versions(4, 5, ("null", "b")),
        delete(6, 7, made="null"),
        versions(8, 9, ("null", MARKER)),
        delete(10, 11, version="null"),
        versions(12, 13),
    ]
    assert verdict(legal, "Suspended") == "linearizable"
    assert verdict([*legal[:2], versions(4, 5, ("null", "b"), ("null", "a"))], "Suspended") == "violation"


# the search -----------------------------------------------------------------------------------------------


def brute_force(operations: Sequence[Operation], versioning: Versioning = "", *, relaxed: bool) -> bool:
    """Tries every order of every choice of writes without an answer."""
    certain = [one for one in operations if one.outcome != "unknown"]
    unknown = [one for one in operations if one.outcome == "unknown"]
    chosen = [[*certain, *some] for some in _subsets(unknown)]
    return any(_explains(order, versioning, relaxed) for some in chosen for order in permutations(some))


def _subsets(operations: Sequence[Operation]) -> list[list[Operation]]:
    if not operations:
        return [[]]
    rest = _subsets(operations[1:])
    return [*rest, *[[operations[0], *one] for one in rest]]


def _explains(order: Sequence[Operation], versioning: Versioning, relaxed: bool) -> bool:
    state: State = ()
    for number, one in enumerate(order):
        if any(_must_precede(later, one, relaxed) for later in order[number + 1 :]):
            return False
        after = step(state, one, versioning)
        if after is None:
            return False
        state = after
    return True


def _must_precede(first: Operation, second: Operation, relaxed: bool) -> bool:
    if relaxed and first.is_read and second.is_read:
        return False
    return first.outcome != "unknown" and first.end < second.begin


@st.composite
def histories(draw: st.DrawFn) -> list[Operation]:
    found = []
    for number in range(draw(st.integers(1, 6))):
        begin = draw(st.integers(0, 8))
        end = begin + draw(st.integers(1, 5)) + 0.5
        value = draw(st.sampled_from("abc"))
        condition = draw(st.sampled_from([{}, {}, {"if_match": value}, {"if_none_match": ANY}]))
        match draw(st.sampled_from(["put", "put", "delete", "get", "get", "absent"])):
            case "put":
                status = draw(st.sampled_from([200, 200, 0, 412] if condition else [200, 200, 0]))
                found.append(put("abcdef"[number], begin, end, status, **condition))
            case "delete":
                found.append(delete(begin, end, draw(st.sampled_from([204, 503]))))
            case "get":
                found.append(get(value, begin, end))
            case "absent":
                found.append(get(ABSENT, begin, end))
    return found


@settings(max_examples=100, deadline=None)
@given(histories(), st.booleans())
def test_the_search_agrees_with_trying_every_order(history: list[Operation], relaxed: bool) -> None:
    assert linearizable(history, relaxed=relaxed) == brute_force(history, relaxed=relaxed)


@st.composite
def histories_of_versions(draw: st.DrawFn) -> list[Operation]:
    made = [(f"i{n}", draw(st.sampled_from([f"v{n}", MARKER]))) for n in range(draw(st.integers(1, 3)))]
    found = []
    for version_id, value in made:
        begin = draw(st.integers(0, 6))
        end = begin + draw(st.integers(1, 5)) + 0.5
        if value == MARKER:
            found.append(delete(begin, end, made=version_id))
        else:
            status = draw(st.sampled_from([200, 200, 0]))
            found.append(put(value, begin, end, status, made=version_id if status else ""))
    for _ in range(draw(st.integers(0, 3))):
        begin = draw(st.integers(0, 9))
        end = begin + draw(st.integers(1, 5)) + 0.5
        listed = draw(st.permutations(made))[: draw(st.integers(0, len(made)))]
        version_id, value = draw(st.sampled_from(made))
        removed = delete(begin, end, version=version_id)
        current = get(ABSENT if value == MARKER else value, begin, end, version_id)
        found.append(draw(st.sampled_from([versions(begin, end, *listed), removed, current])))
    return found


@settings(max_examples=100, deadline=None)
@given(histories_of_versions(), st.booleans())
def test_the_search_agrees_on_versions(history: list[Operation], relaxed: bool) -> None:
    assert linearizable(history, "Enabled", relaxed=relaxed) == brute_force(
        history, "Enabled", relaxed=relaxed
    )


def test_a_search_that_takes_too_long_is_undecided() -> None:
    many = [put(f"v{number}", 0, 1, 0) for number in range(40)]
    assert verdict([*many, put("x", 2, 3, if_match="nobody's")], seconds=0.0) == "undecided"


# histories ------------------------------------------------------------------------------------------------


def test_shrinking_leaves_what_contradicts_itself() -> None:
    noise = [put(f"v{n}", n, n + 0.5) for n in range(20)]
    noise += [get(f"v{n}", n + 0.6, n + 0.7) for n in range(20)]
    wrong = [put("a", 30, 31), put("b", 32, 33), get("a", 34, 35), delete(36, 37), get(ABSENT, 38, 39)]
    history = History("b", "k", "", tuple(noise + wrong))
    assert history.verdict == "violation"
    assert history.shrink().operations == tuple(wrong[:3])


def test_shrinking_keeps_the_write_that_explains_a_refusal() -> None:
    """Without the second write the refusal itself would be wrong, and the read would not matter."""
    wrong = (put("a", 0, 1), put("b", 2, 9), put("c", 3, 4, 412, if_match="a"), get("a", 5, 6))
    assert History("b", "k", "", wrong).shrink().operations == wrong


def test_a_legal_history_is_not_shrunk() -> None:
    legal = History("b", "k", "", (put("a", 0, 1), get("a", 2, 3)))
    assert legal.shrink() is legal


def test_a_history_is_kept_and_shown(tmp_path: Path) -> None:
    operations = (
        put("a", 0, 1, if_match="x"),
        get("a", 2, 3, "1"),
        versions(4, 5, ("1", "a")),
        delete(6, 7, 0),
    )
    history = History("b", "k", "Enabled", operations, (Event("kill n1", 0.5, 2.5),))
    history.save(tmp_path / "k.jsonl")
    assert History.load(tmp_path / "k.jsonl") == history
    lines = history.timeline().splitlines()
    assert lines[0] == "b/k (enabled versioning)"
    assert [line.split("  ")[-1].strip() for line in lines[1:]] == [
        "c at n1: PUT a If-Match x → 200",
        "*** kill n1",
        "c at n1: GET → a (version 1)",
        "c at n1: VERSIONS → a (version 1)",
        "c at n1: DELETE → no answer: may have taken place",
    ]


def test_reads_while_a_node_learns_that_it_was_taken_out_are_not_judged() -> None:
    stale = (put("a", 0, 1), put("b", 2, 3), get("a", 4, 5))
    beside = Event("n1 is marked away", 4.5, 6, stale=True)
    assert History("b", "k", "", stale, (beside,)).verdict == "linearizable"
    assert History("b", "k", "", stale, (Event("kill n1", 4.5, 6),)).verdict == "violation"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.jsonl")), ids=lambda path: path.stem)
def test_what_real_nodes_once_did_wrong_is_found(path: Path) -> None:
    """Histories of real runs, shrunk: see docs/linearizability.md."""
    history = History.load(path)
    assert history.verdict == "violation"
    assert history.shrink() == history
