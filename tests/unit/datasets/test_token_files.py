"""Token files: Megatron's layout byte for byte, what lies is refused, and a local folder by memory map."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest

from meshsdk.errors import ConfigurationError
from meshsdk.token_files import TokenFiles
from meshwire.formats.token_index import (
    HEADER_BYTES,
    TokenIndexError,
    encode_token_index,
    index_dtype,
    parse_token_index,
    stored_dtype,
)
from meshwire.formats.token_manifest import MANIFEST, TokenManifest, TokenShard, parse_token_manifest
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from pathlib import Path

INDEX = (
    b"MMIDIDX\0\0"
    + struct.pack("<QBQQ", 1, 8, 3, 4)
    + struct.pack("<3i", 2, 0, 3)
    + struct.pack("<3q", 0, 4, 4)
    + struct.pack("<4q", 0, 1, 2, 3)
)
"""Three sequences of uint16, as Megatron writes them."""


def test_an_index_is_megatrons() -> None:
    assert encode_token_index(np.array([2, 0, 3]), "uint16") == INDEX
    assert index_dtype(INDEX[:HEADER_BYTES]) == "uint16"
    found = parse_token_index(INDEX, 10)
    assert found.dtype == "uint16"
    assert found.lengths.tolist() == [2, 0, 3]
    assert found.offsets.tolist() == [0, 4, 4]
    assert found.tokens == 5
    assert parse_token_index(INDEX + b"\0\0\0", 10).tokens == 5  # of several kinds of data
    assert stored_dtype("uint32") == "int32"


def test_an_index_that_lies_is_refused() -> None:
    for wrong, size in (
        (INDEX, 9),  # a sequence beyond the file
        (INDEX[:-1], 10),
        (INDEX + b"\0", 10),
        (b"X" + INDEX[1:], 10),
        (INDEX[:17] + b"\x06" + INDEX[18:], 10),  # float64
        (INDEX[:34] + struct.pack("<i", -1) + INDEX[38:], 10),
        (INDEX[:18] + struct.pack("<Q", 1 << 60) + INDEX[26:], 10),
        (b"", 10),
    ):
        with pytest.raises(TokenIndexError):
            parse_token_index(wrong, size)
    for dtype in ("uint32", "float32"):
        with pytest.raises(TokenIndexError, match=dtype):
            encode_token_index(np.array([1]), dtype)


def test_a_manifest_says_how_far_the_work_got() -> None:
    begun = TokenManifest("p", "s", "uint16", 64, 1000, about={"source": "s3://b/"})
    more = begun.with_shard(TokenShard("00000", 2, 128, 1500, 1)).with_shard(TokenShard("00001", 1, 7, 20))
    found = parse_token_manifest(more.to_bytes())
    assert found == more
    assert (found.steps, found.sequences, found.tokens, found.bad) == (3, 135, 1520, 1)
    assert found.is_of(begun)
    assert not found.is_of(TokenManifest("q", "s", "uint16", 64, 1000))
    for wrong in (b"", b"[]", b'{"format": "shardmesh.tokens", "version": 2}', more.to_bytes()[:-9]):
        with pytest.raises(PlanError):
            parse_token_manifest(wrong)


def test_a_folder_is_read_by_memory_map(tmp_path: Path) -> None:
    rows = [[1, 2], [], [3, 4, 5], [60_000]]
    for name, some in (("00000", rows[:3]), ("00001", rows[3:]), ("00002", [[]])):
        (tmp_path / f"{name}.bin").write_bytes(
            np.array([token for row in some for token in row], np.uint16).tobytes()
        )
        lengths = np.array([len(row) for row in some])
        (tmp_path / f"{name}.idx").write_bytes(encode_token_index(lengths, "uint16"))
    files = TokenFiles(tmp_path)
    assert [row.tolist() for row in files] == [*rows, []]
    assert len(files) == 5
    assert files.tokens == 6
    assert files[-2].tolist() == [60_000]
    assert isinstance(files[0].base, np.memmap)
    assert TokenFiles(tmp_path / "00001")[0].tolist() == [60_000]
    with pytest.raises(IndexError):
        files[5]
    (tmp_path / MANIFEST).write_bytes(TokenManifest("p", "s", "uint16", 64, 1000).to_bytes())
    with pytest.raises(ConfigurationError, match="incomplete"):
        TokenFiles(tmp_path)
    with pytest.raises(ConfigurationError):
        TokenFiles(tmp_path / "00009")
