"""Archive paths: which objects are archives or compressed, member paths in keys, pages of member names.

Law: the extension of the key decides, without regard to case; the content must then agree.
Law: member names are sorted and unique, and the cost of a page is proportional to what it returns.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, NewType

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


ArchiveKind = Literal["tar", "tgz", "tar.zst", "zip"]
ARCHIVE_EXTENSIONS: Final[dict[str, ArchiveKind]] = {
    ".tar": "tar",
    ".tar.gz": "tgz",
    ".tgz": "tgz",
    ".tar.zst": "tar.zst",
    ".tzst": "tar.zst",
    ".zip": "zip",
}
CompressionKind = Literal["zst", "gz"]
"""Compression of single files that are read through a decompressed copy, like archive members; none has
members."""
COMPRESSION_EXTENSIONS: Final[dict[str, CompressionKind]] = {".zstd": "zst", ".zst": "zst", ".gz": "gz"}
SlicedTable = NewType("SlicedTable", str)
"""The records of some slices of a table: `table-3`, with the bits of the slices as a hexadecimal number."""
CopyKind = ArchiveKind | CompressionKind | Literal["parquet", "table"] | SlicedTable
TABLE_ENDINGS: Final = (".parquet", ".pq", ".arrow", ".arrows", ".feather", ".ipc")
TABLE_COPY_UNIT: Final = 4096
"""The size of the copy of a table's records is a multiple of it; that of another copy seldom is."""
SLICES: Final = 16
"""Slices of a Parquet file at most: each row group is one, or has as many neighbours as that takes."""
MEMBERS: Final = 1 << SLICES
"""Beside the bits of slices: the copy has the members of structs in lists, too."""
_SLICED: Final = 1 << 44
"""What snapshots add to the size of a copy of some slices, times their bits."""
_WITH_MEMBERS: Final = 1 << 43
"""What snapshots add to the size of a copy with members."""
MEMBER_SEPARATOR: Final = "/-/"
"""Separates an archive's key from a member name: `shard.tar/-/a/b.jpg`."""
_ENDINGS: Final = tuple(ARCHIVE_EXTENSIONS)


class ArchiveError(ValueError):
    """An archive that is damaged, hostile, or of an unsupported kind; the message says which."""


class MemberPath(NamedTuple):
    """A member as named by a key."""

    key: str
    member: str


def archive_kind(key: str) -> ArchiveKind | None:
    """Return the archive kind of an object by its key, or None if it is not an archive."""
    lower = key[-8:].lower()
    if not lower.endswith(_ENDINGS):
        return None
    return next(kind for ending, kind in ARCHIVE_EXTENSIONS.items() if lower.endswith(ending))


def compression_kind(key: str) -> CompressionKind | None:
    """Return the compression of a single file by its key, or None for anything else, including archives."""
    return None if archive_kind(key) is not None else COMPRESSION_EXTENSIONS.get(_packing(key))


def copy_kind(key: str) -> CompressionKind | Literal["parquet"] | None:
    """Return the kind of copy through which a single file is read, or None if it is read directly."""
    return "parquet" if key[-8:].lower().endswith((".parquet", ".pq")) else compression_kind(key)


def is_table(key: str) -> bool:
    """Return whether a file is a table by its key: Parquet, or an Arrow (Feather) file."""
    return key[-8:].lower().endswith(TABLE_ENDINGS)


def is_read_directly(key: str) -> bool:
    """Return whether offsets of samples in an object refer to the object itself, not to a copy of it."""
    return archive_kind(key) in (None, "tar") and copy_kind(key) is None and not is_table(key)


def table_kind(slices: int) -> CopyKind:
    """Return the kind of the copy of these slices of a table, given as bits; 0: of the whole file."""
    return SlicedTable(f"table-{slices:x}") if slices else "table"


def slices_of(kind: str) -> tuple[str, int]:
    """Return a kind of copy without slices, and the bits of these."""
    whole, _, slices = kind.partition("-")
    return whole, int(slices, 16) if slices else 0


def pinned_size(slices: int, size: int) -> int:
    """Return the size under which a snapshot pins a copy of `size` bytes. Raises ArchiveError."""
    if size >= _WITH_MEMBERS:
        raise ArchiveError(f"its copy of records has {size} bytes; {_WITH_MEMBERS} are too many")
    members, bits = divmod(slices, MEMBERS)
    return bits * _SLICED + members * _WITH_MEMBERS + size


def pinned_table(pinned: int) -> tuple[CopyKind, int]:
    """Return the kind of the copy that a snapshot pins under a size, and its bytes."""
    bits, rest = divmod(pinned, _SLICED)
    members, size = divmod(rest, _WITH_MEMBERS)
    return table_kind(bits + members * MEMBERS), size


def uncompressed_name(key: str) -> str:
    """Return the key without the ending of a compressed file."""
    return key if compression_kind(key) is None else key[: len(key) - len(_packing(key))]


def prefer_uncompressed(keys: Iterable[str]) -> dict[str, str]:
    """Map each uncompressed name to the key to read; the uncompressed file wins if both exist."""
    found: dict[str, str] = {}
    for key in keys:
        name = uncompressed_name(key)
        if name == key or name not in found:
            found[name] = key
    return found


def _packing(key: str) -> str:
    lower = key[-5:].lower()
    return next((ending for ending in COMPRESSION_EXTENSIONS if lower.endswith(ending)), "")


def archive_stem(key: str) -> str:
    """Return the key of an archive without its ending."""
    ending = max((end for end in ARCHIVE_EXTENSIONS if key.lower().endswith(end)), key=len, default="")
    return key[: len(key) - len(ending)]


def member_paths(key: str) -> list[MemberPath]:
    """Return the possible readings of a key as `ARCHIVE/-/MEMBER`, the shortest archive first."""
    found: list[MemberPath] = []
    at = key.find(MEMBER_SEPARATOR)
    while at >= 0:
        archive, member = key[:at], key[at + len(MEMBER_SEPARATOR) :]
        if archive_kind(archive) is not None:
            found.append(MemberPath(archive, member))
        at = key.find(MEMBER_SEPARATOR, at + 1)
    return found


_BEYOND = "\U0010ffff"


class NamePage(NamedTuple):
    """A page of names. `places`: indices of the names; `next_after`: the last name or prefix returned, None
    at the end."""

    places: list[int]
    prefixes: list[str]
    next_after: str | None


def name_page(names: Sequence[str], prefix: str, delimiter: str, after: str, limit: int) -> NamePage:
    """Return at most `limit` names and common prefixes that begin with `prefix` and sort after `after`."""
    found = NamePage([], [], None)
    at = max(bisect_left(names, prefix), bisect_right(names, after) if after else 0)
    last = ""
    while at < len(names) and names[at].startswith(prefix):
        cut = names[at].find(delimiter, len(prefix)) if delimiter else -1
        rolled = names[at][: cut + len(delimiter)] if cut >= 0 else ""
        if rolled and rolled <= after:  # returned on an earlier page
            at = bisect_left(names, rolled + _BEYOND, at + 1)
            continue
        if len(found.places) + len(found.prefixes) == limit:
            return found._replace(next_after=last)
        if rolled:
            found.prefixes.append(rolled)
            last, at = rolled, bisect_left(names, rolled + _BEYOND, at + 1)
        else:
            found.places.append(at)
            last, at = names[at], at + 1
    return found
