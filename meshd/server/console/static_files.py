"""The built front end: its files in memory, and the headers that confine the page.

The page may load scripts and styles that carry the nonce of its response, and connect to its own host; it may
load nothing else, and no other page may embed it. Nothing that is stored in the mesh is ever a script here.
"""

from __future__ import annotations

import gzip
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from meshd.server.response import Header

DIRECTORY: Final = Path(__file__).with_name("files")
_PAGE: Final = "index.html"
_TYPES: Final = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_POLICY: Final = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src blob: data:; "
    "media-src blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
CONFINEMENT: Final[tuple[Header, ...]] = (
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)
"""Headers of every response of the console."""
NOT_BUILT: Final = (
    "This installation does not contain the console. Everything else works without it. In a clone, run "
    "`make console` (it installs Node.js from a wheel if needed) and reload this page.\n"
)


class StaticFile(msgspec.Struct, frozen=True):
    """The bytes of a file, plain and compressed."""

    content_type: str
    plain: bytes
    compressed: bytes


class StaticFiles:
    """Files below `DIRECTORY`, read at first use and cached."""

    def __init__(self) -> None:
        self._files: dict[str, StaticFile] = {}

    def __repr__(self) -> str:
        return f"<StaticFiles {DIRECTORY}>"

    def find(self, name: str) -> StaticFile | None:
        """Return a file of `assets/` by its name, such as `index-1a2b.js`; None if there is none."""
        if name not in self._files:
            path = DIRECTORY / "assets" / name
            if "/" in name or name.startswith(".") or path.suffix not in _TYPES or not path.is_file():
                return None
            data = path.read_bytes()
            self._files[name] = StaticFile(_TYPES[path.suffix], data, gzip.compress(data, 9, mtime=0))
        return self._files[name]

    def page(self) -> tuple[bytes, list[Header]] | None:
        """Return the page and the headers that confine it, with a new nonce; None if it is not built."""
        found = DIRECTORY / _PAGE
        if not found.is_file():
            return None
        nonce = secrets.token_urlsafe(16)
        text = found.read_text(encoding="utf-8")
        for element in ("<script ", '<link rel="stylesheet" '):
            text = text.replace(element, f'{element}nonce="{nonce}" ')
        headers = [
            ("Content-Type", "text/html; charset=utf-8"),
            ("Content-Security-Policy", _POLICY.format(nonce=nonce)),
            *CONFINEMENT,
        ]
        return text.encode(), headers
