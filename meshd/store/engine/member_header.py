"""Member headers of data files: the pax record SHARDMESH.member with a checksum and a JSON document.

Law: pure. The whole index can be rebuilt from these headers alone.
Invariant: among the unversioned members of a (bucket, key) the highest stamp wins; among the members of
one version the copy that was rewritten last wins.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

import msgspec
from awscrt import checksums

from meshd.store.errors import MetadataTooLargeError
from meshwire.formats import tar
from meshwire.s3.bucket_settings import Acl  # noqa: TC001  msgspec reads the annotations

if TYPE_CHECKING:
    from meshd.store.records import Record

PAX_KEY = "SHARDMESH.member"
RESERVE = 16 << 10  # header room of a large object's file: its data begin at this offset
PAGE = 4 << 10
ALIGNED = 64 << 10  # data of members from this size on begin at a page boundary of the file
MAX_PAX = RESERVE - 2 * tar.BLOCK - 64
_STAMP_DIGITS = 20
_UNSAFE = re.compile(r"[\x00-\x1f\x7f]")
_VERSION = re.compile(r"[0-9a-f]{16}")

Kind = Literal["object", "wasted", "marker", "part", "manifest", "deleted", "upload", "aborted"]
_SUFFIX: dict[str, str] = {
    "marker": ".@marker",
    "manifest": ".@manifest",
    "deleted": ".@deleted",
    "upload": ".@upload",
    "aborted": ".@aborted",
}


class Member(msgspec.Struct, frozen=True, omit_defaults=True):
    """The header record of one member.

    `stamp` is text of fixed width, so that it can be overwritten in place. `file` and `at` are the member's
    own position, which distinguishes it from a copy inside an object's data.

    `object` and `part`: the data are the bytes. `wasted`: an object that was superseded before its commit.
    `manifest`: the data are a Record in JSON. `upload`: the data are an Upload in JSON. `marker`, `deleted`,
    `aborted`: no data. `version`: the id of the version that is made or, for `deleted`, the removed one;
    empty for the null version.
    """

    stamp: str
    kind: Kind
    bucket: str
    key: str
    crc32c: int = 0
    etag: str = ""
    modified: int = 0
    headers: dict[str, str] = {}
    metadata: dict[str, str] = {}
    checksums: dict[str, str] = {}
    checksum_type: str = ""
    owner: str = ""
    upload: str = ""
    part: int = 0
    file: int = 0
    at: int = 0
    moves: int = 0
    version: str = ""
    tags: dict[str, str] = {}
    acl: Acl | None = None
    amended: int = 0
    through: bool = False


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Member)


def cancels_others(member: Member) -> bool:
    """Returns True if a member ends something that older members began, so it must outlive them."""
    return member.kind in ("deleted", "aborted") or (member.kind == "manifest" and member.upload != "")


def object_member(bucket: str, key: str, record: Record, crc32c: int) -> Member:
    """Returns the header of an object that is written again as its record says; `crc32c`: of its bytes."""
    return Member(
        stamp_text(record.stamp),
        "object",
        bucket,
        key,
        crc32c,
        record.etag,
        record.modified,
        record.headers,
        record.metadata,
        record.checksums,
        record.checksum_type,
        record.owner,
        moves=record.moves,
        version=record.version,
        tags=record.tags,
        acl=record.acl,
        amended=record.amended,
        through=record.through,
    )


def stamp_text(stamp: int) -> str:
    """Returns a stamp as text of fixed width."""
    return f"{stamp:0{_STAMP_DIGITS}d}"


def version_id_of(stamp: int) -> str:
    """Returns the version id for a stamp, also of fixed width."""
    return f"{stamp:016x}"


def is_version_id(what: str) -> bool:
    """Returns True for the id of a version, False for that of an upload."""
    return _VERSION.fullmatch(what) is not None


def stamp_of_version_id(version: str) -> int | None:
    """Returns the stamp in a version id; None if it is not a version id."""
    return int(version, 16) or None if _VERSION.fullmatch(version) else None


def safe_name(bucket: str, key: str) -> str:
    """Returns a tar member name close to the key that no tool takes for a directory, an absolute path or a
    parent path."""
    key = _UNSAFE.sub(lambda match: f"%{ord(match.group()):02X}", key)
    if "." in key:
        key = "/".join("%2E" * len(part) if part in (".", "..") else part for part in key.split("/"))
    if key.endswith("/"):
        key = f"{key[:-1]}%2F"
    return f"{bucket}/{key}"


def too_much_metadata(member: Member) -> MetadataTooLargeError:
    """Returns the error of a member whose description is too long."""
    return MetadataTooLargeError(
        f"key, headers and metadata of {member.key[:40]!r} exceed {MAX_PAX} bytes; shorten the metadata"
    )


def render_member_header(member: Member, size: int, *, reserve: int | None = None) -> bytes:
    """Renders the header blocks of a member with `size` bytes of data. Raises MetadataTooLargeError."""
    name = safe_name(member.bucket, member.key)
    name += f".@part-{member.part:05d}" if member.kind == "part" else _SUFFIX.get(member.kind, "")
    raw = _encoder.encode(member)
    text = raw.decode()
    if len(raw) + 2 * len(name.encode()) > MAX_PAX:
        raise too_much_metadata(member)
    value = f"{checksums.crc32c(raw):08x} {text}"
    return tar.tar_member_header(
        name, size, mtime=member.modified // 1000, pax={PAX_KEY: value}, reserve=reserve
    )


def parse_member_header(member: tar.TarMember) -> Member | None:
    """Returns the header record of a scanned member; None if it has none or a damaged one."""
    crc, _, text = member.pax.get(PAX_KEY, "").partition(" ")
    try:
        raw = text.encode()
        return _decoder.decode(raw) if f"{checksums.crc32c(raw):08x}" == crc else None
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return None
