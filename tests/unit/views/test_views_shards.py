"""Shard layouts: a legal tar whatever the names, any window of it, samples that never part."""

from __future__ import annotations

import io
import json
import tarfile
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire.dataset.fields import sample_key
from meshwire.formats.shard_encoding import SourceObject, TarShard
from meshwire.strict_json import PlanError
from meshwire.views.sample_groups import Evaluation
from meshwire.views.shard_view import ShardsView, lay_out_shards
from meshwire.views.view_kinds import parse_view

if TYPE_CHECKING:
    from meshwire.formats.shard_encoding import Shard
    from meshwire.views.shard_view import ShardLayout

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
    shard = TarShard.from_members("s.tar", items, "p/")
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
    layout = lay_out_shards(view, listing(50))
    members = [member for shard in layout.shards.values() for member in shard.members]
    assert sorted(members) == listing(50)
    for shard in layout.shards.values():
        stems = [sample_key(member.key)[0] for member in shard.members]
        assert all(stems.count(stem) == 2 for stem in stems)
        if "count" in document:
            assert len(set(stems)) <= document["count"]
    assert list(layout.shards) == sorted(layout.shards)
    assert layout.shards == lay_out_shards(view, listing(50)).shards


def test_new_data_moves_no_sample_to_the_other_part() -> None:
    view = parse_view({"kind": "shards", "count": 5, "split": {"train": 0.8, "val": 0.2}}, "b")
    assert isinstance(view, ShardsView)

    def part_of(count: int) -> dict[str, str]:
        shards = lay_out_shards(view, listing(count)).shards.values()
        return {member.key: shard.key.partition("/")[0] for shard in shards for member in shard.members}

    before, after = part_of(30), part_of(60)
    assert before.items() <= after.items()
    assert set(after.values()) == {"train", "val"}


def test_a_shard_is_named_by_its_content() -> None:
    items = listing(3)
    changed = [items[0]._replace(etag="other"), *items[1:]]
    assert TarShard.from_members("s", items, "").etag == TarShard.from_members("t", items, "").etag
    assert TarShard.from_members("s", items, "").etag != TarShard.from_members("s", changed, "").etag


def test_shuffling_is_a_permutation_by_seed() -> None:
    def order(seed: int | None) -> list[str]:
        view = ShardsView("b", count=1000, shuffle=seed)
        (shard,) = lay_out_shards(view, listing(40)).shards.values()
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
        ({"format": "zip"}, "format"),
        ({"samples": "tgz"}, "samples"),
        ({"sort": "size +"}, "sort"),
        ({"sort": "szie"}, "sort"),
        ({"sort": "size", "shuffle": 1}, "sort"),
        ({"where": "prt(key, '/', 1)"}, "where"),
        ({"group": 1}, "group"),
        ({"split_by": "part(stem, '/', 1)"}, "split_by"),
        ({"features": {"cls": "int64"}}, "features"),
        ({"features": {"cls": "int32"}, "format": "tfrecord"}, "features.cls"),
    ],
)
def test_documents_are_read_strictly(document: dict[str, Any], path: str) -> None:
    with pytest.raises(PlanError) as error:
        parse_view({"kind": "shards", **document}, "b")
    assert error.value.path.startswith(path)


def test_documents_come_back() -> None:
    view = parse_view({"kind": "shards", "size": 5000, "split": {"a": 0.25, "b": 0.75}, "shuffle": 9}, "b")
    assert parse_view(view.to_json(), "b") == view
    later: dict[str, Any] = {"sort": "size", "format": "tfrecord", "where": "size > 1", "samples": "archives"}
    later["features"] = {"cls": "int64"}
    view = parse_view({"kind": "shards", "group": "part(stem, '/', 0)", **later}, "b")
    assert parse_view(view.to_json(), "b") == view
    assert later.items() <= json.loads(view.to_json()).items()


def laid_out(files: list[SourceObject], evaluation: Evaluation | None = None, **fields: Any) -> ShardLayout:
    view = parse_view({"kind": "shards", **fields}, "b")
    assert isinstance(view, ShardsView)
    return lay_out_shards(view, files, evaluation)


def test_samples_in_the_order_of_an_expression() -> None:
    (shard,) = laid_out(listing(30), sort="-size").shards.values()
    assert [item.key for item in shard.members[:2]] == ["train/0029.cls", "train/0029.jpg"]
    (shard,) = laid_out(listing(30), sort="number(slice(base(stem), -1)) % 5").shards.values()
    stems = [item.key for item in shard.members[::2]]
    assert stems == sorted(stems, key=lambda key: int(key[9]) % 5)  # ties stay in stored order


def test_groups_are_folders() -> None:
    files = [SourceObject(f"{kind}/{n}.jpg", f"{n}", 10) for kind in ("a b", "c", "é") for n in range(3)]
    layout = laid_out(files, group="part(stem, '/', 0)", count=2)
    assert list(layout.shards) == [
        f"{folder}/shard-00000{number}.tar" for folder in ("%C3%A9", "a%20b", "c") for number in range(2)
    ]
    odd = {"": "empty", "..": "%2E%2E", "x/../y": "x/%2E%2E/y", "q" * 300: None}
    for value, folder in odd.items():
        (key,) = laid_out(files[:1], group=f"'{value}'").shards
        assert len(key) < 230
        assert folder is None or key == f"{folder}/shard-000000.tar"
    (key,) = laid_out(files[:1], group="size / 4", split={"t": 1.0}, name="x").shards
    assert key == "t/2.5/x-000000.tar"


def test_where_leaves_out() -> None:
    layout = laid_out(listing(20), where="number(slice(base(stem), -1)) < 2 and files == 2")
    (shard,) = layout.shards.values()
    assert {item.key[9] for item in shard.members} == {"0", "1"}
    assert not laid_out(listing(20), where="false").shards


def test_parts_by_an_expression() -> None:
    files = [SourceObject(f"p{n % 12:02d}/{n:03d}.jpg", "e", 5) for n in range(240)]
    files.sort()
    layout = laid_out(files, split={"a": 0.5, "b": 0.5}, split_by="part(stem, '/', 0)")
    parts: dict[str, set[str]] = {}
    for shard in layout.shards.values():
        parts.setdefault(shard.key[0], set()).update(item.key[:3] for item in shard.members)
    assert parts["a"] | parts["b"] == {f"p{n:02d}" for n in range(12)}
    assert not parts["a"] & parts["b"]


def test_expressions_read_small_files_once() -> None:
    read: list[str] = []

    def contents(item: SourceObject) -> bytes | None:
        read.append(item.key)
        return None if item.key == "train/0003.cls" else str(int(item.key[8:10]) % 2).encode()

    evaluation = Evaluation(contents)
    layout = laid_out(listing(6), evaluation, group="number(cls)")
    assert {shard.key: shard.members[0].key for shard in layout.shards.values()} == {
        "0/shard-000000.tar": "train/0000.cls",
        "1/shard-000000.tar": "train/0001.cls",
        "none/shard-000000.tar": "train/0003.cls",
    }
    assert read == [f"train/000{n}.cls" for n in range(6)]
    changed = [item._replace(etag="new") if item.key == "train/0005.cls" else item for item in listing(6)]
    again = Evaluation(contents, evaluation.results)
    assert list(laid_out(changed, again, group="number(cls)").shards) == list(layout.shards)
    assert read[6:] == ["train/0005.cls"]
    assert len(again.results) == 6


def test_samples_of_tars_are_regrouped() -> None:
    def member(tar: str, name: str, offset: int) -> SourceObject:
        return SourceObject(f"in/{tar}.tar", tar, 10, name=name, offset=offset)

    one = [member("one", "0.jpg", 512), member("one", "0.cls", 1536), member("one", "1.jpg", 2560)]
    two = [member("two", "2.jpg", 512), member("two", "0.jpg", 1536)]
    layout = laid_out(one + two, samples="archives", count=2)
    names = [[item.name for item in shard.members] for shard in layout.shards.values()]
    # Two samples are called 0: each by its tar.
    assert names == [["one/0.jpg", "one/0.cls", "1.jpg"], ["2.jpg", "two/0.jpg"]]
    (first, _) = layout.shards.values()
    pieces = [piece for piece in first.pieces(0, first.size) if piece.object is not None]
    assert [(piece.object.key, piece.offset) for piece in pieces if piece.object] == [
        ("in/one.tar", 512),
        ("in/one.tar", 1536),
        ("in/one.tar", 2560),
    ]
    moved = laid_out([one[0]._replace(offset=1024), *one[1:]], samples="archives", count=2)
    same = laid_out(one, samples="archives", count=2)
    assert [shard.etag for shard in moved.shards.values()] != [shard.etag for shard in same.shards.values()]
