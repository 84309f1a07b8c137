"""Shard layouts, whatever the view and the source: every sample once, true sizes, legal keys; any page of
their listing is what S3's rules say."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.views.shards.reader import _page
from meshwire.dataset.fields import sample_key
from meshwire.formats.shard_encoding import SourceObject
from meshwire.names import check_key
from meshwire.s3.operations import ListObjects
from meshwire.strict_json import PlanError
from meshwire.views.sample_groups import Evaluation, file_name
from meshwire.views.shard_view import ShardsView, lay_out_shards
from meshwire.views.view_kinds import parse_view

if TYPE_CHECKING:
    from meshwire.views.shard_view import ShardLayout

NAMES = st.text("ab/.-é", min_size=1, max_size=6).filter(lambda name: not name.startswith("/"))
EXTENSIONS = st.sampled_from(["jpg", "cls", "json", "seg.png"])
EXPRESSIONS = st.sampled_from(
    [
        "size",
        "-size",
        "ext",
        "stem",
        "part(stem, '/', 0)",
        "number(cls)",
        "json.a",
        "none",
        "files > 1",
        "key",
    ]
)
VIEWS = st.fixed_dictionaries(
    {},
    optional={
        "count": st.integers(1, 4),
        "where": EXPRESSIONS,
        "group": EXPRESSIONS,
        "split": st.just({"a": 0.5, "b": 0.5}),
        "format": st.sampled_from(["tar", "tfrecord"]),
        "samples": st.sampled_from(["objects", "archives"]),
        "match": st.lists(EXTENSIONS.map(".{}".format), max_size=2),
    },
).flatmap(
    lambda fields: st.fixed_dictionaries(
        {name: st.just(value) for name, value in fields.items()},
        optional={"sort": EXPRESSIONS} if len(fields) % 2 else {"shuffle": st.integers(0, 9)},
    )
)
FILES = st.dictionaries(st.tuples(NAMES, EXTENSIONS), st.integers(0, 2000), max_size=14)


def contents(item: SourceObject) -> bytes | None:
    return json.dumps({"a": item.size % 3}).encode() if item.size % 2 else b"%d" % (item.size % 4)


def source(view: ShardsView, found: dict[tuple[str, str], int], archives: int) -> list[SourceObject]:
    """Objects by key, or members spread over archives."""
    if view.samples == "objects":
        files = [SourceObject(f"{stem}.{ext}", f"e{size}", size) for (stem, ext), size in found.items()]
        return sorted(files)
    return sorted(
        SourceObject(f"x/{size % archives}.tar", "e", size, name=f"{stem}.{ext}", offset=512)
        for (stem, ext), size in found.items()
    )


def identity(item: SourceObject) -> tuple[Any, ...]:
    return item.key, item.offset, item.size, sample_key(item.name)[1]


@given(VIEWS, FILES, st.integers(1, 3))
@settings(max_examples=75, deadline=None)
def test_every_sample_once(fields: dict[str, Any], found: dict[tuple[str, str], int], archives: int) -> None:
    view = parse_view({"kind": "shards", **fields}, "b")
    assert isinstance(view, ShardsView)
    files = source(view, found, archives)
    layout = lay_out_shards(view, files, Evaluation(contents))
    laid = [item for shard in layout.shards.values() for item in shard.members]
    wanted = [item for item in files if view.includes_file(file_name(item))]
    if view.where:
        assert Counter(map(identity, laid)) <= Counter(map(identity, wanted))
    else:
        assert Counter(map(identity, laid)) == Counter(map(identity, wanted))
    for shard in layout.shards.values():
        check_key(shard.key)
        assert shard.key.endswith(f".{view.format}")
        assert sum(piece.length for piece in shard.pieces(0, shard.size)) == shard.size
        samples = {(item.key if item.name else "", sample_key(file_name(item))[0]) for item in shard.members}
        assert len(samples) <= view.count
    again = lay_out_shards(view, files, Evaluation(contents))
    assert {key: shard.etag for key, shard in again.shards.items()} == {
        key: shard.etag for key, shard in layout.shards.items()
    }


def plain_page(layout: ShardLayout, operation: ListObjects) -> tuple[list[str], list[str], bool]:
    """Keys, prefixes, and whether there is more, by looking at every key."""
    shown: list[str] = []
    for key in sorted(layout.shards):
        if key.startswith(operation.prefix):
            at = key.find(operation.delimiter, len(operation.prefix)) if operation.delimiter else -1
            text = key[: at + len(operation.delimiter)] if at >= 0 else key
            if text > operation.after and text not in shown:
                shown.append(text)
    page = shown[: operation.max_keys]
    keys = [text for text in page if text in layout.shards]
    prefixes = [text for text in page if text not in layout.shards]
    return keys, prefixes, 0 < operation.max_keys < len(shown)


@given(
    st.lists(st.sampled_from(["a", "a/b", "b", "é"]), min_size=1, max_size=8),
    st.sampled_from(["", "a", "a/", "b/s", "x"]),
    st.sampled_from(["", "/", "-"]),
    st.integers(0, 4),
    st.sampled_from(["", "a/", "a/shard-000000.tar", "a/b/", "b/shard-000001.tar", "zz"]),
)
@settings(deadline=None)
def test_any_page(groups: list[str], prefix: str, delimiter: str, limit: int, after: str) -> None:
    view = ShardsView("b", count=1, group="folder(key)")
    files = sorted(SourceObject(f"{group}/{n}.jpg", "e", 1) for n, group in enumerate(groups))
    layout = lay_out_shards(view, files)
    operation = ListObjects("b--v", 2, prefix, delimiter, limit, after)
    found = _page(layout, operation)
    keys = [entry.key for entry in found.entries]
    assert (keys, list(found.common_prefixes), found.truncated) == plain_page(layout, operation)


FIELDS = "count size shuffle split name format samples where sort group split_by features match prefix x"
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | EXPRESSIONS
shares = st.dictionaries(st.text(max_size=4), st.text(max_size=6) | st.floats(0, 1), max_size=2)
values = scalars | st.lists(st.text(max_size=4), max_size=2) | shares
view_like = st.dictionaries(st.sampled_from(FIELDS.split()), values, max_size=6)


@given(view_like)
@settings(max_examples=75)
def test_any_document_is_a_view_or_says_where_it_is_wrong(document: dict[str, Any]) -> None:
    with contextlib.suppress(PlanError):
        view = parse_view(document | {"kind": "shards"}, "b")
        assert parse_view(view.to_json(), "b") == view
