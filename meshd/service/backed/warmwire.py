"""What nodes say to each other about bringing objects into their caches: msgpack, answers as they come.

Law: a question is about names of one bucket that the node asked answers for; an answer is a stream of
outcomes, each behind its length, of each name one that is its last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from meshd.origin.interface import Facts

if TYPE_CHECKING:
    from collections.abc import Iterator

WARM: Final = "/-/peer/origins/warm"
MAX_NAMES: Final = 1000
MAX_ASK_BYTES: Final = 8 << 20
_LENGTH: Final = 4
_MOST: Final = 64 << 10

Work = Literal["look", "fetch", "have"]
Verdict = Literal["found", "fetched", "there", "lacking", "failed", "elsewhere", "moved"]


class Wanted(Struct, frozen=True, array_like=True):
    """An object of an origin; of size -1 while only its name is known."""

    key: Annotated[str, Meta(max_length=4096)]
    size: int = -1
    etag: Annotated[str, Meta(max_length=4096)] = ""
    modified: int = 0

    @classmethod
    def of(cls, key: str, facts: Facts) -> Wanted:
        return cls(key, facts.size, facts.etag, facts.modified)

    def facts(self) -> Facts:
        """What is known of it."""
        return Facts(self.size, self.etag, self.modified)


class WarmAsk(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`work`: look (what the origin has under these names), fetch (into the cache), have (which are there).
    `created_ms` tells the bucket from one that had its name before. `rate`: bytes a second at most, 0 for
    any."""

    bucket: Annotated[str, Meta(max_length=63)]
    created_ms: int
    work: Work
    wanted: Annotated[list[Wanted], Meta(max_length=MAX_NAMES)]
    rate: Annotated[int, Meta(ge=0)] = 0


class Outcome(Struct, frozen=True, array_like=True):
    """Of name `number`: `found` (with its facts), `fetched` or `there`, `lacking` (it is not cached),
    `failed` (`text` says why), `elsewhere` (another node answers for it). `moved`: bytes came, and more
    may."""

    number: int
    verdict: Verdict
    size: int = 0
    etag: str = ""
    modified: int = 0
    text: str = ""

    @property
    def last(self) -> bool:
        """Whether nothing more is said of the name."""
        return self.verdict != "moved"


encode_ask = msgspec.msgpack.Encoder().encode
decode_ask = msgspec.msgpack.Decoder(WarmAsk).decode
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Outcome).decode


def framed(outcome: Outcome) -> bytes:
    """An outcome as it is sent."""
    body = _encode(outcome)
    return len(body).to_bytes(_LENGTH, "big") + body


class Outcomes:
    """Outcomes taken out of bytes that arrive in any pieces. Raises msgspec.MsgspecError."""

    def __init__(self) -> None:
        self._held = bytearray()

    def __repr__(self) -> str:
        return f"<Outcomes, {len(self._held)} bytes held>"

    def feed(self, data: bytes) -> Iterator[Outcome]:
        self._held += data
        while len(self._held) >= _LENGTH:
            size = int.from_bytes(self._held[:_LENGTH], "big")
            if size > _MOST:
                raise msgspec.ValidationError("an outcome is too long")
            if len(self._held) < _LENGTH + size:
                return
            outcome = _decode(bytes(self._held[_LENGTH : _LENGTH + size]))
            del self._held[: _LENGTH + size]
            yield outcome
