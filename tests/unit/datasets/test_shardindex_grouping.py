"""Shard indexes: grouping by name, lookup by name, and refusal of other bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from meshwire.dataset.archive_index import ShardIndex, index_tar
from meshwire.frame.columns import ColumnError, ColumnWriter, StringColumn


@dataclass(frozen=True)
class Entry:
    name: str
    size: int
    data_offset: int
    type: str = "0"


def entries(*names: str) -> list[Entry]:
    return [Entry(name, 10 + index, 512 + 1024 * index) for index, name in enumerate(names)]


def test_files_of_one_name_make_a_sample_wherever_they_stand() -> None:
    index = index_tar(entries("b.jpg", "a.cls", "b.cls", "a.jpg", "b.seg.png"))
    assert index.samples == 2
    assert index.stems() == ["b", "a"]
    assert index.members_with(["jpg"]).tolist() == [0, 3]
    assert index.members_with(["cls"]).tolist() == [2, 1]
    assert index.members_with(["seg.png"]).tolist() == [4, -1]
    assert index.members_with(["txt"]).tolist() == [-1, -1]


def test_the_first_wanted_extension_wins() -> None:
    index = index_tar(entries("a.jpeg", "a.jpg", "b.jpeg"))
    assert index.members_with(["jpg", "jpeg"]).tolist() == [1, 2]
    assert index.members_with(["jpeg", "jpg"]).tolist() == [0, 2]


def test_of_doubled_files_the_last_counts() -> None:
    index = index_tar(entries("a.jpg", "a.JPG", "a.jpg"))
    assert index.samples == 1
    assert index.members_with(["jpg"]).tolist() == [2]
    assert index.find("a.jpg") == (512 + 2048, 12)


def test_only_files_count_and_only_named_ones_make_samples() -> None:
    special = [Entry("dir/", 0, 512, "5"), Entry("a.jpg", 0, 512, "2")]
    index = index_tar([*special, *entries("README", "__meta__.json", ".hidden.jpg", "dir/x.jpg")])
    assert index.samples == 1
    assert index.stems() == ["dir/x"]
    assert index.find("README") == (512, 10)
    assert index.find("__meta__.json") is not None
    assert index.find("dir/") is None


def test_lookup_is_exact() -> None:
    index = index_tar(entries("a.jpg", "ba.jpg", "a.jpgx", "aa.jpg"))
    assert index.find("a.jpg") == (512, 10)
    assert index.find("a.jp") is None
    assert index.find("") is None
    assert index.find("\ud800") is None


def test_an_empty_tar_has_an_index() -> None:
    index = index_tar([])
    assert (index.samples, index.stems()) == (0, [])
    assert ShardIndex.from_bytes(index.to_bytes()).samples == 0


def test_it_goes_round_and_is_deterministic() -> None:
    index = index_tar(entries("b.jpg", "a.cls", "ü.cls", "a.jpg", "README", "b.jpg"))
    document = index.to_bytes()
    back = ShardIndex.from_bytes(document)
    assert back.to_bytes() == document
    assert back.names == index.names
    assert back.extensions == index.extensions
    assert back.sample.tolist() == index.sample.tolist() == [-1, 0 + 1, 2, 1, -1, 0]
    assert back.find("ü.cls") == index.find("ü.cls")


@pytest.mark.parametrize(
    ("column", "values"),
    [("sample", [1, 3]), ("sample", [2, 2]), ("sample", [1]), ("extension", [0, 1]), ("offsets", [-1, 0])],
)
def test_numbers_that_lie_are_refused(column: str, values: list[int]) -> None:
    columns = {"offsets": [512, 2048], "sizes": [1, 2], "extension": [0, 0], "sample": [1, 2], column: values}
    writer = ColumnWriter("shardmesh.shardindex", 1, {"samples": "2"})
    writer.add_strings("names", StringColumn.from_strings(["a.jpg", "b.jpg"]))
    writer.add_strings("extensions", StringColumn.from_strings(["jpg"]))
    for name, numbers in columns.items():
        writer.add_integers(name, np.array(numbers, dtype=np.int64))
    with pytest.raises(ColumnError):
        ShardIndex.from_bytes(writer.to_bytes())
