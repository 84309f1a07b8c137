"""Versions whose bytes are damaged: what the index remembers of them until they are restored or removed.

Law: a version in quarantine keeps its place and its facts; its bytes are never given out. Its record names an
extent of no file (`NOWHERE`), so that whoever reads it fails without having to ask here first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from meshd.store.records import Extent  # noqa: TC001  msgspec reads the annotations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.store.index import Index

NOWHERE: Final = 0
"""No data file has this number."""
_STAMP = 9  # NUL and the stamp behind a name


class Quarantined(msgspec.Struct, frozen=True, array_like=True):
    """A damaged version: which extents, found when (ms since the epoch), and what is wrong."""

    extents: tuple[Extent, ...]
    found: int
    why: str = ""


def _key(name: bytes, stamp: int) -> bytes:
    return name + b"\0" + stamp.to_bytes(_STAMP - 1, "big")


def quarantined(index: Index, txn: Any, name: bytes, stamp: int) -> bool:
    """Whether this version's bytes are known to be damaged."""
    return index.quarantine.get(txn, _key(name, stamp)) is not None


def confine(index: Index, txn: Any, name: bytes, stamp: int, about: Quarantined) -> None:
    """Remembers a damaged version."""
    index.quarantine.put(txn, _key(name, stamp), msgspec.msgpack.encode(about))


def discharge(index: Index, txn: Any, name: bytes, stamp: int) -> None:
    """Forgets it: the version was restored, or is gone."""
    index.quarantine.delete(txn, _key(name, stamp))


def all_quarantined(index: Index, txn: Any) -> Iterator[tuple[bytes, int, Quarantined]]:
    """(name, stamp, what is known) of every damaged version, in order."""
    for key, raw in index.quarantine.items(txn):
        stamp = int.from_bytes(key[1 - _STAMP :], "big")
        yield key[:-_STAMP], stamp, msgspec.msgpack.decode(raw, type=Quarantined)
