"""The origin of a backed bucket: its URL, how it is read and written, and its cache settings.

Law: nothing here opens a connection or holds a secret; `credentials` is the name of a credential.
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
    """The description of an origin is invalid; the message says why."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin settings of a backed bucket.

    url: `s3://BUCKET/PREFIX` (also gs, az), `https://HOST/PATH`, or `file:///FOLDER` on the daemon's
    machine.
    endpoint: address of an S3 service other than AWS, such as `http://127.0.0.1:8333`.
    region: region of the S3 bucket.
    credentials: name of a credentials file of the daemon, `anonymous`, or "" to use the daemon's
    environment.
    ttl: seconds for which a cached result counts as current; after that the origin is revalidated.
    immutable: objects never change and are not revalidated.
    write: "through" (acknowledged once the origin has the object), "back" (once this store has it), or
    "off".
    quota: maximum bytes in the cache; 0 means no limit other than the cache's own.
    pins: key prefixes that stay in the cache once they are cached.
    homes: ids of nodes that each serve every name and keep a copy of what is read; () distributes the names
    over all storing nodes. Only for buckets with write=off.
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
            raise OriginError(
                "endpoint applies to s3:// origins only and has the form http://HOST:PORT or https://HOST"
            )
        if self.credentials and not _NAME.fullmatch(self.credentials):
            raise OriginError("credentials must be a name of letters, digits, dots and dashes, not a secret")
        if not 0 <= self.ttl <= _MOST_TTL:
            raise OriginError("ttl must be a number of seconds, 0 or more")
        if self.write not in WRITES:
            raise OriginError(f"write must be one of {', '.join(WRITES)}")
        if self.quota < 0:
            raise OriginError("quota must be a number of bytes, or 0 for no quota")
        if self.is_web and self.write != "off":
            raise OriginError("a web origin is read-only; set write=off")
        _check_homes(self)

    @property
    def scheme(self) -> str:
        return urlsplit(self.url).scheme

    @property
    def is_web(self) -> bool:
        """Whether the origin is a web server, which can be neither written nor listed."""
        return self.scheme in {"http", "https"}

    def document(self) -> dict[str, Any]:
        """Return the settings as a JSON-compatible dict."""
        return asdict(self)


def parse_origin(document: Mapping[str, Any]) -> Origin:
    """Parse the origin of a JSON document; for a web origin, `write` defaults to "off". Raises
    OriginError."""
    known = {field.name: field.type for field in fields(Origin)}
    unknown = sorted(set(document) - set(known))
    if unknown:
        raise OriginError(f"unknown field {unknown[0]!r}; known fields are {', '.join(known)}")
    if not isinstance(document.get("url"), str):
        raise OriginError("url is required, for example s3://bucket/prefix")
    given = dict(document)
    for name, what in (("pins", "prefixes"), ("homes", "node ids")):
        if name in given:
            if not isinstance(given[name], list | tuple) or not all(isinstance(p, str) for p in given[name]):
                raise OriginError(f"{name} must be a list of {what}")
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
        raise OriginError("homes require a read-only bucket; set write=off")
    if len(origin.homes) > _MOST_HOMES or len(set(origin.homes)) < len(origin.homes):
        raise OriginError(f"homes may list at most {_MOST_HOMES} nodes, each once")
    wrong = next((home for home in origin.homes if not _HOME.fullmatch(home)), None)
    if wrong is not None:
        raise OriginError(f"homes: {wrong[:80]!r} is not a valid node id")


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise OriginError(
            f"{url[:100]!r} is not an origin; use s3://BUCKET/PREFIX, gs://, az://, https:// or file:///FOLDER"
        )
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise OriginError("an origin URL cannot have a query or a password; set credentials instead")
    if parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/") or ".." in parts.path.split("/"):
            raise OriginError("a folder must have the form file:///ABSOLUTE/PATH")
    elif parts.scheme in {"http", "https"}:
        if not parts.netloc:
            raise OriginError("the URL has no host")
    elif not _BUCKET.fullmatch(parts.netloc):
        raise OriginError(f"{parts.netloc[:80]!r} is not a valid bucket name")


def _is_http(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in {"http", "https"} and bool(parts.netloc) and not parts.path.strip("/")
