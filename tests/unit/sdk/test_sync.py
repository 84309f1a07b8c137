"""What `mesh sync` and `mesh cp` decide, before anything moves."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshsdk.byte_sizes import format_size
from meshsdk.cli.command_base import exit_code
from meshsdk.cli.cp import walk
from meshsdk.cli.path_arguments import Local, Remote, Standard, parse_location, relative_name
from meshsdk.cli.sync import Entry, _is_excluded, compare_listings
from meshsdk.client.request import object_path, query_string
from meshsdk.errors import ConfigurationError, ConnectError, NotFoundError

A, B = "a" * 32, "b" * 32


@pytest.mark.parametrize(
    ("ours", "theirs", "copied"),
    [
        (Entry(5, 1000), None, True),
        (Entry(5, 1000), Entry(6, 9000, A), True),
        (Entry(5, 1000), Entry(5, 9000, A), False),
        (Entry(5, 9000), Entry(5, 1000, A), True),
        (Entry(5, 1900), Entry(5, 1000, A), False),  # within the slack of S3's whole seconds
        (Entry(5, 9000, A), Entry(5, 1000, A), False),
        (Entry(5, 1000, A), Entry(5, 9000, B), True),
        (Entry(5, 1000, A), Entry(5, 9000, f"{B}-2"), False),  # ETags of parts say nothing about content
        (Entry(5, 9000, A), Entry(5, 1000), True),
    ],
)
def test_what_differs(ours: Entry, theirs: Entry | None, copied: bool) -> None:
    found = compare_listings({"x": ours}, {"x": theirs} if theirs else {}, delete=False)
    assert found.copy == (("x",) if copied else ())


def test_a_touched_file_of_the_same_content_stays() -> None:
    asked = []

    def same(name: str) -> bool:
        asked.append(name)
        return True

    source = {"new": Entry(1, 9000), "old": Entry(1, 1000), "touched": Entry(1, 9000)}
    target = {"old": Entry(1, 1000, A), "touched": Entry(1, 1000, A)}
    assert compare_listings(source, target, delete=False, same_content=same).copy == ("new",)
    assert asked == ["touched"]


def test_deletion_only_when_asked_for() -> None:
    target = {"b": Entry(1, 0), "a": Entry(1, 0)}
    assert compare_listings({}, target, delete=False).delete == ()
    assert compare_listings({"a": Entry(1, 0)}, target, delete=True).delete == ("b",)


def test_places() -> None:
    assert parse_location("s3://bucket/a/b.txt") == Remote("bucket", "a/b.txt")
    assert parse_location("s3://bucket") == Remote("bucket", "")
    assert parse_location("-") == Standard()
    assert parse_location("./x") == Local(Path("x"))
    assert Remote("b", "train").below("x") == Remote("b", "train/x")
    assert Remote("b", "").below("x") == Remote("b", "x")
    for bad in ("s3://", "http://b/x"):
        with pytest.raises(click.BadParameter):
            parse_location(bad)


@pytest.mark.parametrize("key", ["../x", "a/../../x", "/etc/passwd", "a//b", "a/./b", "", "a\0b"])
def test_no_key_leads_out_of_its_folder(key: str) -> None:
    with pytest.raises(ConfigurationError, match="not a valid file name"):
        Local(Path("here")).below(key)


def test_names_below() -> None:
    assert Local(Path("here")).below("a/b c") == Local(Path("here/a/b c"))
    assert relative_name(Path("here/a/b"), Path("here")) == "a/b"


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")]
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert format_size(size) == text


def test_exit_codes() -> None:
    assert [
        exit_code(error) for error in (NotFoundError("x"), ConfigurationError("x"), ConnectError("x"))
    ] == [3, 2, 1]


def test_paths_and_queries_are_encoded() -> None:
    assert object_path("bkt", "a b/ü+?#") == "/bkt/a%20b/%C3%BC%2B%3F%23"
    assert query_string(prefix="a b", **{"list-type": 2}) == "list-type=2&prefix=a%20b"
    for bucket, key in (("B", "k"), ("b/../c", "k"), ("bkt", "k\0"), ("bkt", "k" * 1025)):
        with pytest.raises(ConfigurationError):
            object_path(bucket, key)


ENTRIES = st.builds(Entry, st.integers(0, 3), st.integers(0, 5000), st.sampled_from(["", A, B, f"{A}-2"]))
SIDES = st.dictionaries(st.sampled_from("abcde"), ENTRIES)


@given(SIDES, SIDES, st.booleans())
def test_what_was_synced_is_in_sync(source: dict[str, Entry], target: dict[str, Entry], delete: bool) -> None:
    found = compare_listings(source, target, delete=delete)
    after = target | {name: replace(source[name], modified_ms=9000) for name in found.copy}
    for name in found.delete:
        del after[name]
    again = compare_listings(source, after, delete=delete)
    assert (again.copy, again.delete) == ((), ())
    assert set(found.delete).isdisjoint(source)
    assert after.keys() == (source.keys() if delete else source.keys() | target.keys())


def test_a_folder_of_which_the_names_alone_can_be_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mode r--, for users other than root: the rest of the tree is copied all the same."""
    (tmp_path / "names/sub").mkdir(parents=True)
    for name in ("names/a", "readable.txt"):
        (tmp_path / name).write_text("text")
    told: list[OSError] = []
    with monkeypatch.context() as patched:
        for call in ("lstat", "stat", "scandir"):
            patched.setattr(os, call, refusing(getattr(os, call), f"{tmp_path}/names/"))
        found = [path.name for path, _ in walk(tmp_path, told.append)]
        excluded = [
            [_is_excluded(error, Local(tmp_path), [pattern]) for error in told]
            for pattern in ("names/*", "*.png")
        ]
    assert found == ["readable.txt"]
    assert sorted(error.filename for error in told) == [f"{tmp_path}/names/{name}" for name in ("a", "sub")]
    assert excluded == [[True, True], [False, False]]


def refusing(call: Any, below: str) -> Any:
    def refuse(path: Any, *args: Any, **more: Any) -> Any:
        if isinstance(path, (str, Path)) and str(path).startswith(below):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return call(path, *args, **more)

    return refuse
