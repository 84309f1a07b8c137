"""Batches handed to a job on the node's own host as shared memory instead of bytes on a connection.

Law: a node says in its answers where its directory is and what the file `id` there holds; who reads the same
there is on its host, and says the id with a question. The answer then has no body but names a socket of the
directory and a ticket, good once: who sends the ticket there gets a descriptor. The memory is the node's
until that connection ends.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote_from_bytes

from meshwire.percents import PercentError, decode, to_bytes

HEADER: Final = "x-mesh-local"
"""In answers `<id> <directory, percent-encoded>`, in questions `<id>`."""
HANDED: Final = "x-mesh-handed"
"""In answers `<socket> <ticket> <bytes>`."""
ID_FILE: Final = "id"
TICKET_BYTES: Final = 32
_ID = re.compile(r"[0-9a-f]{32}")
_PLACE = re.compile(r"([0-9a-f]{32}) (/[!-~]{1,3000})")
_HANDED = re.compile(r"([A-Za-z0-9_.\-]{1,100}\.sock) ([0-9a-f]{32}) ([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class Place:
    """A node's directory, and what tells it from another of the same name."""

    id: str
    directory: str

    def to_header(self) -> str:
        return f"{self.id} {quote_from_bytes(to_bytes(self.directory), safe='/')}"


@dataclass(frozen=True, slots=True)
class Handed:
    """What an answer gives in place of a body of `size` bytes."""

    socket: str
    ticket: str
    size: int

    def to_header(self) -> str:
        return f"{self.socket} {self.ticket} {self.size}"


def parse_place(text: str) -> Place | None:
    """None for what is none."""
    found = _PLACE.fullmatch(text)
    if found is None:
        return None
    try:
        directory = decode(found[2])
    except PercentError:
        return None
    return Place(found[1], directory) if directory.isprintable() else None


def parse_handed(text: str) -> Handed | None:
    """None for what is none."""
    found = _HANDED.fullmatch(text)
    return None if found is None else Handed(found[1], found[2], int(found[3]))


def is_id(text: str) -> bool:
    """Whether this can be what an id file holds."""
    return _ID.fullmatch(text) is not None
