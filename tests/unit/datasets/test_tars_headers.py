"""Tar headers: what we write, Python's and our own reader understand; what lies is refused."""

from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire.formats import tar
from meshwire.formats.tar import END, TarError, padding, scan_tar, tar_member_header

if TYPE_CHECKING:
    from meshwire.formats.tar import TarMember

NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=300)
PAX = st.dictionaries(
    st.text("ABCabc.", min_size=1, max_size=8).map(lambda text: f"TEST.{text}"),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=200),
    max_size=3,
)


def members(data: bytes) -> list[TarMember]:
    return list(scan_tar(lambda offset, length: data[offset : offset + length], 0, len(data)))


def one(name: str, body: bytes, **header: object) -> bytes:
    return tar_member_header(name, len(body), **header) + body + bytes(padding(len(body)))  # type: ignore[arg-type]  # keywords


@given(
    st.lists(
        st.tuples(NAMES, st.binary(max_size=1200), PAX, st.sampled_from([None, 8192, 16384])), max_size=4
    )
)
@settings(max_examples=30, deadline=None)
def test_scan_reads_what_member_header_writes(
    entries: list[tuple[str, bytes, dict[str, str], int | None]],
) -> None:
    data = b"".join(
        one(name, body, mtime=7, pax=pax, reserve=reserve) for name, body, pax, reserve in entries
    )
    found = members(data + END)
    assert [(member.name, member.size, member.mtime) for member in found] == [
        (name, len(body), 7) for name, body, _, _ in entries
    ]
    for member, (_, body, pax, reserve) in zip(found, entries, strict=True):
        assert data[member.data_offset :][: member.size] == body
        assert {key: value for key, value in member.pax.items() if key in pax} == pax
        assert reserve is None or member.data_offset - member.start == reserve


@given(st.lists(st.tuples(NAMES, st.binary(max_size=1200)), max_size=4))
@settings(max_examples=25, deadline=None)
def test_python_reads_it_too(entries: list[tuple[str, bytes]]) -> None:
    data = b"".join(one(name, body, pax={"TEST.a": "ü"}, reserve=2048) for name, body in entries) + END
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        # Python drops slashes at the end of a name that is in a PAX header, not of one in the header itself.
        found = [(member.name.rstrip("/"), member.size) for member in tar]
    assert found == [(name.rstrip("/"), len(body)) for name, body in entries]


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tars_of_others_are_read(kind: int) -> None:
    names = ["a.jpg", "deep/" * 18 + "b.cls", "ü.txt" if kind != tarfile.USTAR_FORMAT else "u.txt"]
    if kind != tarfile.USTAR_FORMAT:
        names.append("long/" * 60 + "c")
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind) as tar:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name in names:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(name), 11
            tar.addfile(info, io.BytesIO(name.encode()[: info.size]))
    found = members(out.getvalue())
    assert [member.name.rstrip("/") for member in found] == ["folder", *names]
    assert [member.type for member in found] == ["5"] + ["0"] * len(names)
    assert all(member.mtime == 11 for member in found[1:])


def test_a_size_beyond_octal_is_kept() -> None:
    size = 9 * 8**11
    header = tar_member_header("big", size)
    found = next(scan_tar(lambda offset, length: header[offset : offset + length], 0, len(header) + size))
    assert (found.size, found.next_offset) == (size, len(header) + size)


def test_a_reserve_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        tar_member_header("a", 1, pax={"k": "v" * 2000}, reserve=2048)


def _patched(data: bytes, at: int, piece: bytes) -> bytes:
    """`data` with bytes replaced and the first header's checksum made right again."""
    block = bytearray(data)
    block[at : at + len(piece)] = piece
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block[:512])
    return bytes(block)


LIES = {
    "checksum": b"x" + one("a", b"data")[1:],
    "size past the end": _patched(one("a", b"data"), 124, b"00000100000\0"),
    "size not a number": _patched(one("a", b"data"), 124, b"0000000zz00\0"),
    "negative size": _patched(one("a", b"data"), 124, b"\xff" * 12),
    "huge binary size": _patched(one("a", b"data"), 124, b"\x80" + b"\xff" * 11),
    "cut in the header": one("a", b"data")[:300],
    "cut in the data": one("a", b"x" * 900)[:1000],
    "pax size past the end": _patched(one("a", b"", pax={"k": "v"}), 124, b"00000100000\0"),
    "pax of gigabytes": _patched(one("a", b"", pax={"k": "v"}), 124, b"77777777777\0"),
    "pax record length": one("a", b"", pax={"k": "v"}).replace(b"6 k=v\n", b"9 k=v\n"),
    "pax record without length": one("a", b"", pax={"k": "v"}).replace(b"6 k=v\n", b"x k=v\n"),
    "pax size not a number": one("a", b"", pax={"size": "many"}),
    "pax negative size": one("a", b"", pax={"size": "-1"}),
    "pax mtime": one("a", b"", pax={"mtime": "nan"}),
    "sparse": one("a", b"", pax={"GNU.sparse.major": "1"}),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused(lie: str) -> None:
    with pytest.raises(TarError, match="tar header at byte"):
        members(LIES[lie])


@given(st.binary(max_size=2000), st.integers(0, 3000), st.integers(0, 255))
@settings(max_examples=40, deadline=None)
def test_any_bytes_are_members_or_an_error(junk: bytes, at: int, byte: int) -> None:
    good = one("a", b"data" * 100, pax={"k": "v" * 300}) + one("b" * 150, b"x")
    for data in (junk, good[:512] + junk, good[: at % len(good)], _flip(good, at % len(good), byte)):
        try:
            found = members(data)
        except TarError:
            continue
        assert all(member.data_offset + member.size <= len(data) for member in found)


def _flip(data: bytes, at: int, byte: int) -> bytes:
    return data[:at] + bytes((byte,)) + data[at + 1 :]


def test_a_global_header_counts_for_all_that_follow() -> None:
    block = one("a", b"", pax={"comment": "x", "mtime": "5"})
    data = _patched(block, 156, b"g") + one("b", b"")
    assert [member.mtime for member in members(data)] == [5, 5]


def test_many_extended_headers_before_a_member_cost_what_they_weigh() -> None:
    pax = one("a", b"", pax={"k": "v"})[:1024]
    reads = 0

    def read(offset: int, length: int) -> bytes:
        nonlocal reads
        reads += length
        return data[offset : offset + length]

    data = pax * 500
    assert list(scan_tar(read, 0, len(data))) == []
    assert reads <= len(data)


def test_nothing_is_believed_above_the_limit() -> None:
    header = _patched(one("a", b"", pax={"k": "v"}), 124, b"%011o\0" % (tar.MAX_PAX + 1))
    with pytest.raises(TarError, match="too large"):
        next(scan_tar(lambda offset, length: header[offset : offset + length], 0, 1 << 40))
