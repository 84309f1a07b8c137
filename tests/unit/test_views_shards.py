"""Shard layouts: a legal tar whatever the names, any window of it, samples that never part."""

from __future__ import annotations

import io
import tarfile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire.documents import PlanError
from meshwire.fields import sample_key
from meshwire.shardviews import Shard, ShardsView, SourceObject, lay_out
from meshwire.views import parse_view

names = st.text("abcé/._-", min_size=1, max_size=120).filter(lambda name: not name.startswith("/"))


def content(item: SourceObject) -> bytes:
    return (item.etag.encode() * item.size)[: item.size]


def bytes_of(shard: Shard, offset: int = 0, length: int | None = None) -> bytes:
    wanted = shard.size - offset if length is None else length
    return b"".join(
        piece.data if piece.object is None else content(piece.object)[piece.offset :][: piece.length]
        for piece in shard.pieces(offset, wanted)
    )


@given(st.dictionaries(names, st.integers(0, 1500), min_size=1, max_size=12), st.data())
def test_any_window_of_a_legal_tar(sizes: dict[str, int], data: st.DataObject) -> None:
    items = [
        SourceObject(f"p/{name}", f"e{number}", size) for number, (name, size) in enumerate(sizes.items())
    ]
    shard = Shard.of("s.tar", items, "p/")
    whole = bytes_of(shard)
    assert len(whole) == shard.size
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        found = [(member.name, tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]
    assert [body for _, body in found] == [content(item) for item in items]
    first = data.draw(st.integers(0, shard.size - 1))
    length = data.draw(st.integers(0, shard.size - first))
    assert bytes_of(shard, first, length) == whole[first : first + length]


def listing(count: int) -> list[SourceObject]:
    return [
        SourceObject(f"train/{number:04d}.{ext}", f"{number}{ext}", 100 + number)
        for number in range(count)
        for ext in ("cls", "jpg")
    ]


@pytest.mark.parametrize(
    "document",
    [
        {"count": 7},
        {"size": 3000},
        {"count": 10, "shuffle": 3},
        {"count": 5, "split": {"train": 0.8, "val": 0.2}},
        {"count": 4, "shuffle": 1, "split": {"a": 0.5, "b": 0.5}, "name": "part"},
    ],
)
def test_every_sample_once_and_whole(document: dict[str, Any]) -> None:
    view = parse_view({"kind": "shards", **document}, "b")
    assert isinstance(view, ShardsView)
    layout = lay_out(view, listing(50))
    members = [member for shard in layout.shards.values() for member in shard.members]
    assert sorted(members) == listing(50)
    for shard in layout.shards.values():
        stems = [sample_key(member.key)[0] for member in shard.members]
        assert all(stems.count(stem) == 2 for stem in stems)
        if "count" in document:
            assert len(set(stems)) <= document["count"]
    assert list(layout.shards) == sorted(layout.shards)
    assert layout.shards == lay_out(view, listing(50)).shards


def test_new_data_moves_no_sample_to_the_other_part() -> None:
    view = parse_view({"kind": "shards", "count": 5, "split": {"train": 0.8, "val": 0.2}}, "b")
    assert isinstance(view, ShardsView)

    def part_of(count: int) -> dict[str, str]:
        shards = lay_out(view, listing(count)).shards.values()
        return {member.key: shard.key.partition("/")[0] for shard in shards for member in shard.members}

    before, after = part_of(30), part_of(60)
    assert before.items() <= after.items()
    assert set(after.values()) == {"train", "val"}


def test_a_shard_is_named_by_its_content() -> None:
    items = listing(3)
    changed = [items[0]._replace(etag="other"), *items[1:]]
    assert Shard.of("s", items, "").etag == Shard.of("t", items, "").etag
    assert Shard.of("s", items, "").etag != Shard.of("s", changed, "").etag


def test_shuffling_is_a_permutation_by_seed() -> None:
    def order(seed: int | None) -> list[str]:
        view = ShardsView("b", count=1000, shuffle=seed)
        (shard,) = lay_out(view, listing(40)).shards.values()
        return [member.key for member in shard.members]

    assert order(None) == sorted(order(1))
    assert order(1) != order(2)
    assert order(1) == order(1)


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ({"count": 0}, "count"),
        ({"count": 1, "size": 5000}, "size"),
        ({"size": 10}, "size"),
        ({"split": {"a": 0.5}}, "split"),
        ({"split": {"a/b": 1.0}}, "split"),
        ({"name": "../x"}, "name"),
        ({"match": ["jpg"]}, "match[0]"),
        ({"shufle": 1}, ""),
    ],
)
def test_documents_are_read_strictly(document: dict[str, Any], path: str) -> None:
    with pytest.raises(PlanError) as error:
        parse_view({"kind": "shards", **document}, "b")
    assert error.value.path.startswith(path)


def test_documents_come_back() -> None:
    view = parse_view({"kind": "shards", "size": 5000, "split": {"a": 0.25, "b": 0.75}, "shuffle": 9}, "b")
    assert parse_view(view.to_json(), "b") == view
