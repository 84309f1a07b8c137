"""Origin of a backed bucket: its URL, how it is read and written, and its cache settings.

Law: nothing here connects or holds a secret: `credentials` is the name of a credential.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMES: Final = ("s3", "gs", "az", "https", "http", "file")
WRITES: Final = ("through", "back", "off")
ANONYMOUS: Final = "anonymous"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_MOST_TTL = 10 * 365 * 86400.0
_MOST_HOMES = 4096
_HOME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class OriginError(ValueError):
    """The description of an origin is not acceptable; the message says why."""


@dataclass(frozen=True, slots=True)
class Origin:
    """url: `s3://BUCKET/PREFIX` (also gs, az), `https://HOST/PATH`, `file:///FOLDER` on the daemon's machine.
    endpoint: of an S3 service other than AWS, as `http://127.0.0.1:8333`. region: of the S3 bucket.
    credentials: the name of a file of the daemon's, `anonymous`, or "" for what its environment gives.
    ttl: seconds for which what was read is taken to be so; then the origin is asked whether it changed.
    immutable: its objects never change: they are not asked about again.
    write: "through" (answered when the origin has it), "back" (when this store has it), "off".
    quota: most bytes of the cache; 0: no limit but the cache's.
    pins: prefixes of keys that stay in the cache once they are there.
    homes: ids of nodes of which each answers for every name and keeps a copy of what is read; () lays the
    names over all nodes that store. Of a bucket that is only read.
    """

    url: str
    endpoint: str = ""
    region: str = ""
    credentials: str = ""
    ttl: float = 60.0
    immutable: bool = False
    write: str = "through"
    quota: int = 0
    pins: tuple[str, ...] = ()
    homes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_url(self.url)
        if self.endpoint and (self.scheme != "s3" or not _is_http(self.endpoint)):
            raise OriginError("an endpoint is of s3:// only, as http://HOST:PORT or https://HOST")
        if self.credentials and not _NAME.fullmatch(self.credentials):
            raise OriginError("credentials are a name of letters, digits, dots and dashes; no secret")
        if not 0 <= self.ttl <= _MOST_TTL:
            raise OriginError("ttl is a number of seconds, 0 or more")
        if self.write not in WRITES:
            raise OriginError(f"write is one of {', '.join(WRITES)}")
        if self.quota < 0:
            raise OriginError("quota is a number of bytes, 0 for none")
        if self.is_web and self.write != "off":
            raise OriginError("an origin on the web is only read: say write=off")
        _check_homes(self)

    @property
    def scheme(self) -> str:
        return urlsplit(self.url).scheme

    @property
    def is_web(self) -> bool:
        """It is a web server: not written to, not listed."""
        return self.scheme in {"http", "https"}

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def parse_origin(document: Mapping[str, Any]) -> Origin:
    """The origin in a JSON document; one on the web is not written to. Raises OriginError."""
    known = {field.name: field.type for field in fields(Origin)}
    unknown = sorted(set(document) - set(known))
    if unknown:
        raise OriginError(f"unknown field {unknown[0]!r}; known are {', '.join(known)}")
    if not isinstance(document.get("url"), str):
        raise OriginError("url is required, as s3://bucket/prefix")
    given = dict(document)
    for name, what in (("pins", "prefixes"), ("homes", "ids of nodes")):
        if name in given:
            if not isinstance(given[name], list | tuple) or not all(isinstance(p, str) for p in given[name]):
                raise OriginError(f"{name} is a list of {what}")
            given[name] = tuple(given[name])
    for name, value in document.items():
        if name in ("pins", "homes"):
            continue
        kinds: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float)}
        wanted = kinds.get(str(known[name]), (str,))
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            raise OriginError(f"{name} must be {'a number' if int in wanted else wanted[0].__name__}")
    if urlsplit(given["url"]).scheme in {"http", "https"}:
        given.setdefault("write", "off")
    return Origin(**given)


def _check_homes(origin: Origin) -> None:
    if origin.homes and origin.write != "off":
        raise OriginError("homes are of a bucket that is only read: say write=off")
    if len(origin.homes) > _MOST_HOMES or len(set(origin.homes)) < len(origin.homes):
        raise OriginError(f"homes are at most {_MOST_HOMES} nodes, each named once")
    wrong = next((home for home in origin.homes if not _HOME.fullmatch(home)), None)
    if wrong is not None:
        raise OriginError(f"homes: {wrong[:80]!r} is no id of a node")


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise OriginError(
            f"{url[:100]!r} is no origin: s3://BUCKET/PREFIX, gs://, az://, https:// or file:///FOLDER"
        )
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise OriginError("an origin's URL has no query and no password; name credentials instead")
    if parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/") or ".." in parts.path.split("/"):
            raise OriginError("a folder is given as file:///ABSOLUTE/PATH")
    elif parts.scheme in {"http", "https"}:
        if not parts.netloc:
            raise OriginError("the URL names no host")
    elif not _BUCKET.fullmatch(parts.netloc):
        raise OriginError(f"{parts.netloc[:80]!r} is no bucket's name")


def _is_http(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in {"http", "https"} and bool(parts.netloc) and not parts.path.strip("/")
