"""Which objects are archives, and the way to a member that is written into a key.

Law: the ending of the key decides, in any case of letters; what is in the object must then agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

ArchiveKind = Literal["tar", "tgz", "tar.zst", "zip"]
ENDINGS: Final[dict[str, ArchiveKind]] = {
    ".tar": "tar",
    ".tar.gz": "tgz",
    ".tgz": "tgz",
    ".tar.zst": "tar.zst",
    ".tzst": "tar.zst",
    ".zip": "zip",
}
PackedKind = Literal["zst", "gz"]
"""Of single files that are read through an inflated copy, as members of archives are; none has members."""
PACKED: Final[dict[str, PackedKind]] = {".zstd": "zst", ".zst": "zst", ".gz": "gz"}
CopyKind = ArchiveKind | PackedKind | Literal["parquet"]
MARK: Final = "/-/"
"""Between an archive's key and the name of a member: `shard.tar/-/a/b.jpg`."""
_ENDINGS: Final = tuple(ENDINGS)


class ArchiveError(ValueError):
    """An archive that is damaged, hostile, or of a make that is not read; the message says which."""


class MemberPath(NamedTuple):
    """A member, as a key names it."""

    key: str
    member: str


def archive_kind(key: str) -> ArchiveKind | None:
    """The kind of archive an object of this name is; None for anything else."""
    lower = key[-8:].lower()
    if not lower.endswith(_ENDINGS):
        return None
    return next(kind for ending, kind in ENDINGS.items() if lower.endswith(ending))


def packed_kind(key: str) -> PackedKind | None:
    """The kind of packed file an object of this name is; None for anything else, archives among it."""
    return None if archive_kind(key) is not None else PACKED.get(_packing(key))


def copied_kind(key: str) -> PackedKind | Literal["parquet"] | None:
    """The kind of copy that a single file of this name is read through; None where it is read itself."""
    return "parquet" if key[-8:].lower().endswith((".parquet", ".pq")) else packed_kind(key)


def unpacked_name(key: str) -> str:
    """The key without the ending of a packed file."""
    return key if packed_kind(key) is None else key[: len(key) - len(_packing(key))]


def plain_first(keys: Iterable[str]) -> dict[str, str]:
    """Of files that lie there plain, packed or both, by their plain names: the key that is read."""
    found: dict[str, str] = {}
    for key in keys:
        name = unpacked_name(key)
        if name == key or name not in found:
            found[name] = key
    return found


def _packing(key: str) -> str:
    lower = key[-5:].lower()
    return next((ending for ending in PACKED if lower.endswith(ending)), "")


def archive_stem(key: str) -> str:
    """The key of an archive without its ending."""
    ending = max((end for end in ENDINGS if key.lower().endswith(end)), key=len, default="")
    return key[: len(key) - len(ending)]


def member_paths(key: str) -> list[MemberPath]:
    """The ways to read a key as `ARCHIVE/-/MEMBER`, the shortest archive first."""
    found: list[MemberPath] = []
    at = key.find(MARK)
    while at >= 0:
        archive, member = key[:at], key[at + len(MARK) :]
        if archive_kind(archive) is not None:
            found.append(MemberPath(archive, member))
        at = key.find(MARK, at + 1)
    return found
