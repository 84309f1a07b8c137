"""How a person writes an op on the command line of `mesh view create`."""

from __future__ import annotations

from typing import Any

import pytest

from meshsdk.cli.viewing import parse_op
from meshsdk.errors import ConfigurationError


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
