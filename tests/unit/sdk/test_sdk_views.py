"""How a person writes an op on the command line of `mesh view create`; documents the SDK makes."""

from __future__ import annotations

from typing import Any

import pytest

from meshsdk.admin import views
from meshsdk.cli.view import parse_op
from meshsdk.errors import ConfigurationError
from meshwire.views.shard_view import ShardsView
from meshwire.views.view_kinds import parse_view


@pytest.mark.parametrize(
    ("text", "args"),
    [
        ("decode", {}),
        ("resize size=256", {"size": 256}),
        ("resize  size=[1, 2] ", {"size": [1, 2]}),
        ('text_label classes=["a b", "c=d"]', {"classes": ["a b", "c=d"]}),
        ("encode format=webp lossless=true", {"format": "webp", "lossless": True}),
    ],
)
def test_ops_as_a_person_writes_them(text: str, args: dict[str, Any]) -> None:
    assert parse_op(text) == {"op": text.split()[0], "args": args}


@pytest.mark.parametrize("text", ["", " ", "size=3", "resize 256"])
def test_what_is_no_op(text: str) -> None:
    with pytest.raises(ConfigurationError, match="KEY=VALUE"):
        parse_op(text)


def test_the_document_of_shards_is_one_the_node_takes() -> None:
    plain = views.shards_view(prefix="train/")
    assert parse_view(plain, "b") == ShardsView("b", prefix="train/")
    full = views.shards_view(
        size=1 << 20,
        match=[".jpg"],
        split={"train": 0.9, "val": 0.1},
        format="tfrecord",
        samples="archives",
        where="size > 1",
        sort="stem",
        group="number(cls)",
        split_by="part(stem, '-', 0)",
        features={"cls": "int64"},
    )
    view = parse_view(full, "b")
    assert isinstance(view, ShardsView)
    assert (view.sort, view.features, view.samples) == ("stem", (("cls", "int64"),), "archives")
