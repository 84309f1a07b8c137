"""Manifest of a folder of token files, `tokens.json`: which plan made them, and how far it got.

Law: the files listed are finished and never change; what is not listed may be incomplete.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from meshwire.strict_json import (
    MAX_INTEGER,
    PlanError,
    checked_integer,
    checked_object,
    checked_text,
    read_json,
    required_field,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

MANIFEST: Final = "tokens.json"
_FORMAT, _VERSION = "shardmesh.tokens", 1


@dataclass(frozen=True, slots=True)
class TokenShard:
    """A token file. `steps`: batches of the plan that are in it; `bad`: samples left out."""

    name: str
    steps: int
    sequences: int
    tokens: int
    bad: int = 0


@dataclass(frozen=True, slots=True)
class TokenManifest:
    """The files that a plan made. `batch`: samples of a step; `shard_tokens`: tokens after which a file ends;
    `about`: what a person may want to know, such as the source.
    """

    plan: str
    snapshot: str
    dtype: str
    batch: int
    shard_tokens: int
    complete: bool = False
    shards: tuple[TokenShard, ...] = ()
    about: Mapping[str, str] | None = None

    @property
    def steps(self) -> int:
        """The batches of the plan that are in the files."""
        return sum(shard.steps for shard in self.shards)

    @property
    def sequences(self) -> int:
        """The sequences in the files."""
        return sum(shard.sequences for shard in self.shards)

    @property
    def tokens(self) -> int:
        """The tokens in the files."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def bad(self) -> int:
        """The samples that were left out."""
        return sum(shard.bad for shard in self.shards)

    def with_shard(self, shard: TokenShard) -> TokenManifest:
        """Return the manifest with one more file."""
        return replace(self, shards=(*self.shards, shard))

    def is_of(self, other: TokenManifest) -> bool:
        """Return whether both describe the same work, however far it got."""
        mine, theirs = (
            (each.plan, each.snapshot, each.dtype, each.batch, each.shard_tokens) for each in (self, other)
        )
        return mine == theirs

    def to_bytes(self) -> bytes:
        """Return the manifest as a JSON document; `parse_token_manifest` restores it."""
        document: dict[str, Any] = {
            "format": _FORMAT,
            "version": _VERSION,
            "plan": self.plan,
            "snapshot": self.snapshot,
            "dtype": self.dtype,
            "batch": self.batch,
            "shard_tokens": self.shard_tokens,
            "complete": self.complete,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "about": dict(self.about or {}),
            "shards": [
                {
                    "name": shard.name,
                    "steps": shard.steps,
                    "sequences": shard.sequences,
                    "tokens": shard.tokens,
                    "bad": shard.bad,
                }
                for shard in self.shards
            ],
        }
        return json.dumps(document, indent=1).encode()


def parse_token_manifest(document: bytes) -> TokenManifest:
    """Parse a manifest. Raises PlanError with the path of the bad field."""
    value = read_json(document, MANIFEST)
    if not isinstance(value, dict) or value.get("format") != _FORMAT or value.get("version") != _VERSION:
        raise PlanError(MANIFEST, f"not a manifest of token files in version {_VERSION}")
    shards = value.get("shards")
    if not isinstance(shards, list):
        raise PlanError(f"{MANIFEST}.shards", "expected a list")
    about = value.get("about")

    def number(name: str) -> int:
        return checked_integer(required_field(value, name, MANIFEST), f"{MANIFEST}.{name}", 1, MAX_INTEGER)

    return TokenManifest(
        checked_text(value.get("plan"), f"{MANIFEST}.plan", at_most=64),
        checked_text(value.get("snapshot"), f"{MANIFEST}.snapshot", at_most=64),
        checked_text(value.get("dtype"), f"{MANIFEST}.dtype", at_most=20),
        number("batch"),
        number("shard_tokens"),
        value.get("complete") is True,
        tuple(_parse_shard(item, f"{MANIFEST}.shards[{index}]") for index, item in enumerate(shards)),
        {str(key): str(text) for key, text in about.items()} if isinstance(about, dict) else None,
    )


def _parse_shard(value: Any, path: str) -> TokenShard:
    document = checked_object(value, path, ("name", "steps", "sequences", "tokens", "bad"))
    numbers = [
        checked_integer(document.get(name, 0), f"{path}.{name}", 0, MAX_INTEGER)
        for name in ("steps", "sequences", "tokens", "bad")
    ]
    return TokenShard(checked_text(document.get("name"), f"{path}.name", at_most=200), *numbers)
