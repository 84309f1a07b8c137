"""Phrases that messages share: lists in words, and what to do without free file descriptors."""

from __future__ import annotations

import errno
import os
import resource

import pytest

from meshd.errors import StartupError
from meshd.server.api.cluster_admin import split_refused
from meshwire.phrases import open_files_message, word_list

LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@pytest.mark.parametrize(
    ("items", "phrase"),
    [
        ([], ""),
        (["n1"], "n1"),
        ((1, 2), "1 and 2"),
        ([1, 2, 3], "1, 2 and 3"),
        (list("abcde"), "a, b, c, d and e"),
        (list("abcdefg"), "a, b, c, d, e and 2 more"),
    ],
)
def test_a_list_is_a_phrase(items: list[object], phrase: str) -> None:
    assert word_list(items) == phrase


def _raised(cause: Exception, *, hidden: bool = False) -> Exception:
    try:
        try:
            raise cause
        except Exception as error:
            raise StartupError("a part cannot start") from (None if hidden else error)
    except StartupError as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/data/lock"),
        RuntimeError(f"/data/index: {os.strerror(errno.EMFILE)}"),
        _raised(OSError(errno.EMFILE, "x")),
        _raised(OSError(errno.EMFILE, "x"), hidden=True),
        ExceptionGroup("two", [ValueError("x"), OSError(errno.EMFILE, "x")]),
    ],
)
def test_a_process_without_descriptors_is_told_its_limit(error: Exception) -> None:
    told = f"too many open files: the limit of this process is {LIMIT}; raise it with `ulimit -n`"
    assert open_files_message(error) == told


def test_a_machine_without_descriptors_and_other_errors_are_told_apart() -> None:
    assert "fs.file-max" in str(open_files_message(OSError(errno.ENFILE, "x")))
    for other in (OSError(errno.ENOENT, "x"), _raised(OSError(errno.EACCES, "x")), ValueError("x")):
        assert open_files_message(other) is None


def test_a_cycle_of_causes_ends() -> None:
    first, second = ValueError("x"), ValueError("y")
    first.__cause__, second.__cause__ = second, first
    assert open_files_message(first) is None


def test_a_refused_split_of_slots_names_nodes_in_words() -> None:
    error = split_refused(["n1", "n2", "n3"], ["n7"])
    assert error.message == (
        "the slots cannot be split before every node can read the new map: "
        "n1, n2 and n3 run an earlier release; n7 does not answer"
    )
    assert error.help == (
        "upgrade n1, n2 and n3; start n7, or give up what does not start with `mesh cluster lost NODE`"
    )
    assert split_refused(["n1"], []).help == "upgrade n1"
    assert split_refused([], ["n1", "n2"]).message.endswith(": n1 and n2 do not answer")
