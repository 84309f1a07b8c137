"""Members say what they are: render, scan and parse agree, and names mislead no tool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.store.engine.member_header import (
    RESERVE,
    Member,
    parse_member_header,
    render_member_header,
    safe_name,
    stamp_text,
)
from meshd.store.engine.packs import parse_entry, render_entry
from meshd.store.errors import MetadataTooLargeError
from meshd.store.index.listing import common_prefix, successor
from meshwire.formats.tar import scan_tar

if TYPE_CHECKING:
    from meshd.store.engine.member_header import Kind
    from meshwire.formats.tar import TarMember

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300)
NAMES = st.dictionaries(TEXT, TEXT, max_size=3)


def scanned(header: bytes, size: int) -> TarMember:
    return next(scan_tar(lambda offset, length: header[offset : offset + length], 0, len(header) + size))


@given(KEYS, TEXT, NAMES, NAMES, st.booleans())
@settings(max_examples=40, deadline=None)
def test_what_is_rendered_is_parsed(
    key: str, etag: str, headers: dict[str, str], metadata: dict[str, str], own: bool
) -> None:
    member = Member(
        stamp_text(7), "object", "bucket", key, 5, etag, 99_000, headers, metadata, file=3, at=512
    )
    header = render_member_header(member, 11, reserve=RESERVE if own else None)
    found = scanned(header, 11)
    assert parse_member_header(found) == member
    assert (found.size, found.mtime, found.name) == (11, 99, safe_name("bucket", key))
    assert not own or found.data_offset == RESERVE


@given(KEYS, TEXT, NAMES, NAMES, st.sampled_from(["object", "wasted"]))
@settings(max_examples=40, deadline=None)
def test_what_a_pack_says_of_an_entry_is_parsed(
    key: str, etag: str, headers: dict[str, str], metadata: dict[str, str], kind: Kind
) -> None:
    """Also with another stamp and kind, which are overwritten in place."""
    member = Member(stamp_text(7), kind, "bucket", key, 5, etag, 99_000, headers, metadata, file=3, at=512)
    late = msgspec.structs.replace(member, kind="wasted", stamp=stamp_text(1 << 62))
    first, second = (render_entry(each, 11, 1) for each in (member, late))
    assert len(first) == len(second)
    for header, said in ((first, member), (second, late)):
        found = parse_entry(b"xy" + header + b"data", 2, 3, 510)
        assert found is not None
        assert (found.member, found.data, found.size) == (said, 512 + len(header), 11)
    assert parse_entry(first, 0, 3, 513) is None  # a copy inside of data
    assert parse_entry(first, 0, 4, 512) is None


@given(st.integers(0, 127), st.integers(1, 255))
@settings(max_examples=50, deadline=None)
def test_a_changed_byte_never_makes_another_entry(at: int, change: int) -> None:
    header = bytearray(render_entry(Member(stamp_text(7), "object", "b", "k", 5, "e" * 80, at=512), 11, 1))
    header[at] ^= change
    assert parse_entry(bytes(header), 0, 0, 512) is None


@given(st.integers(0, 1023), st.integers(1, 255))
@settings(max_examples=50, deadline=None)
def test_a_changed_byte_never_makes_another_member(at: int, change: int) -> None:
    member = Member(stamp_text(7), "object", "bucket", "key", 5, "etag", 99_000, file=3, at=512)
    header = bytearray(render_member_header(member, 11))
    header[at] ^= change
    try:
        found = parse_member_header(scanned(bytes(header), 11))
    except ValueError:
        return
    assert found in (None, member)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=80))
def test_names_mislead_no_tool(key: str) -> None:
    name = safe_name("b", key)
    parts = name.split("/")
    assert parts[0] == "b"
    assert not name.endswith("/")
    assert not {".", ".."} & set(parts)
    assert all(ord(letter) >= 32 and ord(letter) != 127 for letter in name)


def test_too_much_metadata_is_refused() -> None:
    member = Member(stamp_text(7), "object", "b", "k", metadata={"m": "x" * RESERVE})
    with pytest.raises(MetadataTooLargeError, match="shorten the metadata"):
        render_member_header(member, 1)


@given(st.text(min_size=1).map(str.encode), st.binary(max_size=5))
def test_the_successor_lies_behind_all_with_the_prefix(prefix: bytes, rest: bytes) -> None:
    assert prefix + rest < successor(prefix)
    assert not successor(prefix).startswith(prefix)


def test_keys_roll_up_behind_the_prefix() -> None:
    assert common_prefix(b"a/b/c", b"", b"/") == b"a/"
    assert common_prefix(b"a/b/c", b"a/", b"/") == b"a/b/"
    assert common_prefix(b"a/b", b"a/", b"/") is None
    assert common_prefix(b"a/b", b"", b"") is None
    assert common_prefix(b"xABy", b"", b"AB") == b"xAB"
