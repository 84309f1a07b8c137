"""What a process knows of etcd after it has read everything anew: as before, newer, or another history."""

from __future__ import annotations

from meshd.control.control_api import Versioned
from meshd.control.etcd.etcd_control import LocalCopy


def entry(version: int, value: bytes = b"1") -> Versioned:
    return Versioned(value, version)


BEFORE = LocalCopy({"a/1": entry(3), "a/2": entry(11), "b/1": entry(5)}, {"a": 11, "b": 5}, 11)


def test_what_goes_on_keeps_its_revisions() -> None:
    after = BEFORE.after_reread({"b/1": entry(5), "a/3": entry(12), "a/1": entry(3)}, 14)
    assert list(after.entries) == ["a/1", "a/3", "b/1"]
    assert after.topics == {"a": 14, "b": 5}, "of what is gone nobody knows when it went"
    assert (after.revision, after.restores) == (14, 0)
    assert BEFORE.after_reread(BEFORE.entries, 11) == BEFORE


def test_an_earlier_revision_is_another_history() -> None:
    after = BEFORE.after_reread({"a/1": entry(3), "b/1": entry(5)}, 8)
    assert (after.topics, after.revision, after.restores) == ({"a": 8, "b": 8}, 8, 1)


def test_a_history_that_went_on_as_far() -> None:
    """From a backup of revision 10 something else was written since: at a revision that was seen already."""
    after = BEFORE.after_reread({"a/1": entry(3), "b/1": entry(11)}, 11)
    assert after.topics["a"] == BEFORE.topics["a"]
    assert after.restores == 1, "or nobody would look again"


def test_a_history_that_went_on_farther() -> None:
    told = BEFORE.after_reread({"a/1": entry(3), "a/2": entry(11, b"2"), "b/1": entry(12)}, 12)
    assert told.restores == 1, "the same key at the same revision has another value"
    came = BEFORE.after_reread({**BEFORE.entries, "c/1": entry(9)}, 12)
    assert came.restores == 1, "of revision 9 all was known"


def test_restores_are_counted() -> None:
    again = BEFORE.after_reread({}, 8).after_reread({"a/1": entry(3)}, 4)
    assert again.restores == 2
    assert again.after_reread({"a/1": entry(3), "a/2": entry(6)}, 7).restores == 2
