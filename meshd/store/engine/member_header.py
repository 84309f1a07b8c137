"""Member headers of data files: the pax record SHARDMESH.member with a checksum and a JSON document.

Law: pure. The whole index can be rebuilt from these headers alone.
Invariant: among the unversioned members of a (bucket, key) the highest stamp wins; among the members of
one version the copy that was rewritten last wins.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec
from awscrt import checksums

from meshd.store.errors import MetadataTooLargeError
from meshwire.formats import tar
from meshwire.s3.bucket_settings import Acl  # noqa: TC001  msgspec reads the annotations

PAX_KEY = "SHARDMESH.member"
RESERVE = 16 << 10  # header room of a file of its own: its data begins at this offset
PAGE = 4 << 10
ALIGNED = 64 << 10  # members from this size on begin with a page of their file
_MAX_PAX = RESERVE - 2 * tar.BLOCK - 64
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
    """One member's truth. `stamp` is text of fixed width, so that it can be changed in place; `file` and
    `at` say where the member itself lies, which tells it from a copy inside somebody's data.

    `object` and `part`: the data are the bytes. `wasted`: an object that was overtaken before its commit.
    `manifest`: the data are a Record in JSON. `upload`: the data are an Upload in JSON. `marker`, `deleted`,
    `aborted`: no data. `version`: the id of the version that is made, or with `deleted` the one that goes;
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


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Member)


def cancels_others(member: Member) -> bool:
    """Whether a member ends something that older members began, and so must outlive them."""
    return member.kind in ("deleted", "aborted") or (member.kind == "manifest" and member.upload != "")


def stamp_text(stamp: int) -> str:
    """The fixed-width text of a stamp."""
    return f"{stamp:0{_STAMP_DIGITS}d}"


def version_id_of(stamp: int) -> str:
    """The id of the version with this stamp, of fixed width, too."""
    return f"{stamp:016x}"


def is_version_id(what: str) -> bool:
    """Whether it is the id of a version, and not an upload's."""
    return _VERSION.fullmatch(what) is not None


def stamp_of_version_id(version: str) -> int | None:
    """The stamp in a version's id, None when it is no such id."""
    return int(version, 16) or None if _VERSION.fullmatch(version) else None


def safe_name(bucket: str, key: str) -> str:
    """A tar name that no tool takes for a directory, an absolute path or a way out; else like the key."""
    key = _UNSAFE.sub(lambda match: f"%{ord(match.group()):02X}", key)
    if "." in key:
        key = "/".join("%2E" * len(part) if part in (".", "..") else part for part in key.split("/"))
    if key.endswith("/"):
        key = f"{key[:-1]}%2F"
    return f"{bucket}/{key}"


def render_member_header(member: Member, size: int, *, reserve: int | None = None) -> bytes:
    """Header blocks of a member with `size` bytes of data. Raises MetadataTooLargeError."""
    name = safe_name(member.bucket, member.key)
    name += f".@part-{member.part:05d}" if member.kind == "part" else _SUFFIX.get(member.kind, "")
    raw = _encoder.encode(member)
    text = raw.decode()
    if len(raw) + 2 * len(name.encode()) > _MAX_PAX:
        raise MetadataTooLargeError(
            f"key, headers and metadata of {member.key[:40]!r} exceed {_MAX_PAX} bytes; shorten the metadata"
        )
    value = f"{checksums.crc32c(raw):08x} {text}"
    return tar.tar_member_header(
        name, size, mtime=member.modified // 1000, pax={PAX_KEY: value}, reserve=reserve
    )


def parse_member_header(member: tar.TarMember) -> Member | None:
    """The truth in a scanned member, None when it has none or a damaged one."""
    crc, _, text = member.pax.get(PAX_KEY, "").partition(" ")
    try:
        raw = text.encode()
        return _decoder.decode(raw) if f"{checksums.crc32c(raw):08x}" == crc else None
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return None
