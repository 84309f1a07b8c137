"""What a slice will read is begun to be read; what cannot be is told of when it is read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from meshd.transform.compiler import compile_program
from meshd.transform.messages import RenderRequest, Row
from meshd.transform.source_files import READAHEAD_BYTES, SourceFiles, SourceGoneError
from meshd.transform.worker import SliceRenderer
from meshwire.plan.plan_spec import parse_spec

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(offset, length) of what the kernel was told of."""
    told: list[tuple[int, int]] = []

    def advise(fd: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        told.append((offset, length))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return told


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(200)))
    return str(path)


def test_a_slice_begins_to_read_all_its_rows(begun: list[tuple[int, int]], data: str) -> None:
    rows = (Row(0, 5, (((0, 10, 4),),)), Row(1, 6, (((0, 100, 3), (0, 50, 2)),)))
    request = RenderRequest(1, "", "", 0, 0, (None,), (data,), rows)
    known: list[list[tuple[int, int]]] = []
    program = compile_program(parse_spec({"ops": []}), ["b"], [])
    renderer = SliceRenderer(SourceFiles(), program, request, -1, clock=lambda: 0.0)
    reply, scratch = renderer.render(lambda row: known.append(list(begun)), is_full=lambda: False)
    assert scratch is not None
    assert os.pread(scratch, 100, 0) == bytes([10, 11, 12, 13, 100, 101, 102, 50, 51])
    os.close(scratch)
    assert reply.rendered == (0, 1)
    assert known == [[(10, 4), (100, 3), (50, 2)]] * 2


def test_what_is_not_there_is_told_of_when_it_is_read(begun: list[tuple[int, int]], data: str) -> None:
    files = SourceFiles()
    gone = data + ".gone"
    files.readahead([(gone, 0, 5), (f"/proc/{os.getpid()}/fd/0", 0, 5), (data, 1, 2)])
    assert begun == [(1, 2)]
    with pytest.raises(SourceGoneError):
        files.read_pieces([(gone, 0, 5)])
    files.close()


def test_no_more_is_begun_than_a_bound(begun: list[tuple[int, int]], data: str) -> None:
    files = SourceFiles()
    half = READAHEAD_BYTES // 2
    files.readahead([(data, 0, half), (data, 1, half), (data, 2, 1)])
    assert begun == [(0, half), (1, half)]
    files.close()
