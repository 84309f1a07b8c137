"""Shardmesh's own headers: release, Server-Timing, loader reports, and local handover of batches.

Law: an unreadable report or timing is ignored, never an error. Reports are increments, so nodes only add.
Law: a node names its handover directory and the id stored there; a client that reads the same id is on the
same host and sends it back. The response then names a socket and a single-use ticket instead of a body; the
memory behind the ticket belongs to the node until that connection closes.
Invariant: `RELEASE` is the version of the distribution in `pyproject.toml`; a test compares them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote_from_bytes

from meshwire.http_values.percent_encoding import PercentError, decode, to_bytes

RELEASE: Final = "0.1.0"
RELEASE_HEADER: Final = "x-mesh-release"
WHOLE_CHECKSUM_PREFIX: Final = "x-mesh-checksum-"
"""With the name of an algorithm: the checksum of the whole object, in base64, beside a range of it."""


DAMAGED_HEADER: Final = "x-mesh-damaged"
"""Of a response: the object is damaged on the node that answers, or on all that store it."""
FINAL_DAMAGE: Final = "final"
"""Its value if trying again cannot help: the bytes are in quarantine, and no node that may have others is
away."""
FORWARDED_TRACE_HEADER: Final = "x-mesh-trace"
"""What `traceparent` says, for a request that a node forwards: a client may have signed its own
`traceparent`, so that one stays as it is."""
SERVER_TIMING_HEADER: Final = "server-timing"
_ENTRY = re.compile(r"(fetch|prepare|total);dur=([0-9]{1,10}(?:\.[0-9]{1,6})?)")
_LONGEST: Final = 256


@dataclass(frozen=True, slots=True)
class FrameTiming:
    """Seconds spent on a frame: `fetch`, until its sources were available; `prepare`, in ops. Both are 0
    for a frame that was ready."""

    fetch: float = 0.0
    prepare: float = 0.0


@dataclass(frozen=True, slots=True)
class ServerTiming:
    """Seconds spent on one response: `total` from the arrival of the request; work that other requests had
    started counts only while this one waited for it."""

    took: FrameTiming
    total: float

    @property
    def fetch(self) -> float:
        """The part of `total` spent waiting for sources."""
        made = self.took.fetch + self.took.prepare
        return self.took.fetch if made <= self.total else self.total * self.took.fetch / made

    @property
    def preprocessing(self) -> float:
        """The rest of `total`: ops and queueing."""
        return max(self.total - self.fetch, 0.0)

    def to_header(self) -> str:
        """Format the header value."""
        took = self.took
        return (
            f"fetch;dur={1000 * took.fetch:.3f}, prepare;dur={1000 * took.prepare:.3f}, "
            f"total;dur={1000 * self.total:.3f}"
        )


def parse_timing(header: str) -> ServerTiming:
    """Parse the header; missing entries are 0."""
    entries = (_ENTRY.fullmatch(entry.strip()) for entry in header[:_LONGEST].split(","))
    found = {entry[1]: float(entry[2]) / 1000 for entry in entries if entry is not None}
    took = FrameTiming(found.get("fetch", 0.0), found.get("prepare", 0.0))
    return ServerTiming(took, found.get("total", 0.0))


LOADER_REPORT_HEADER: Final = "x-mesh-loader"
LOADER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
_FORM = re.compile(
    r"name=([^;]{1,63});samples=([0-9]{1,12});waited=([0-9]{1,7}\.[0-9]{3});seconds=([0-9]{1,7}\.[0-9]{3})"
    r"(?:;preprocessing=([0-9]{1,7}\.[0-9]{3});fetch=([0-9]{1,7}\.[0-9]{3}))?"
)
_ROUNDED: Final = 0.0011  # seconds: each number is rounded separately


@dataclass(frozen=True, slots=True)
class LoaderReport:
    """A loader's report since the previous one: rows delivered, seconds of the training loop, seconds of
    these spent waiting, and the parts of the wait due to nodes' `preprocessing` and `fetch`."""

    name: str
    samples: int
    waited: float
    seconds: float
    preprocessing: float = 0.0
    fetch: float = 0.0

    @property
    def stalls(self) -> dict[str, float]:
        """`waited` by cause."""
        network = max(self.waited - self.preprocessing - self.fetch, 0.0)
        return {"network": network, "preprocessing": self.preprocessing, "fetch": self.fetch}

    def to_header(self) -> str:
        """Format the header value."""
        return (
            f"name={self.name};samples={self.samples};waited={self.waited:.3f};seconds={self.seconds:.3f};"
            f"preprocessing={self.preprocessing:.3f};fetch={self.fetch:.3f}"
        )


def parse_report(header: str | None) -> LoaderReport | None:
    """Parse a loader report, or return None if there is none or it is inconsistent."""
    found = None if header is None else _FORM.fullmatch(header)
    if found is None or LOADER_NAME.fullmatch(found[1]) is None:
        return None
    seconds = (float(text or 0) for text in found.groups()[2:])
    report = LoaderReport(found[1], int(found[2]), *seconds)
    known = report.preprocessing + report.fetch
    return report if report.waited <= report.seconds and known <= report.waited + _ROUNDED else None


LOADER_POSITION_HEADER: Final = "x-mesh-loader-at"
"""Beside a report. A header of its own, since nodes of earlier releases ignore a report with more entries."""
_POSITION = re.compile(r"epoch=([0-9]{1,9});position=([0-9]{1,12})")


@dataclass(frozen=True, slots=True)
class LoaderPosition:
    """What the training loop has received: `position` samples of `epoch`, over all ranks."""

    epoch: int
    position: int

    def to_header(self) -> str:
        """Format the header value."""
        return f"epoch={self.epoch};position={self.position}"


def parse_position(header: str | None) -> LoaderPosition | None:
    """Parse the position, or return None if there is none or it is invalid."""
    found = None if header is None else _POSITION.fullmatch(header)
    return None if found is None else LoaderPosition(int(found[1]), int(found[2]))


SAMPLE_CACHE_HEADER: Final = "x-mesh-cache"
"""In requests for frames: how many bytes of decoded samples a node may keep for the plan; `off` for none."""
_CACHE_LIMIT = re.compile(r"[0-9]{1,18}")


def sample_cache_value(limit: int) -> str:
    """Return the value of the header for a number of bytes."""
    return str(limit) if limit else "off"


def parse_sample_cache(header: str | None) -> int | None:
    """Return the bytes that a node may keep; None if the node decides: without the header, or a valid one."""
    if header == "off":
        return 0
    return int(header) if header is not None and _CACHE_LIMIT.fullmatch(header) else None


FRAME_SERIES_HEADER: Final = "x-mesh-steps"
"""In requests for a frame: of how many steps, its own first, the response may have frames. Nodes of earlier
releases ignore it."""
FRAME_SIZES_HEADER: Final = "x-mesh-frames"
"""In responses with frames of several steps: the bytes of each, `<bytes>,<bytes>,…`. `x-mesh-frame` then has
as many words."""
MAX_FRAME_SERIES: Final = 32
_SERIES = re.compile(r"[0-9]{1,3}")
_SIZES = re.compile(r"[0-9]{1,18}(?:,[0-9]{1,18}){1,31}")


def parse_series(header: str | None) -> int:
    """Return of how many steps a response may have frames, at most MAX_FRAME_SERIES; 1 without a valid
    header."""
    found = 1 if header is None or _SERIES.fullmatch(header) is None else int(header)
    return min(max(found, 1), MAX_FRAME_SERIES)


def parse_frame_sizes(header: str) -> tuple[int, ...]:
    """Return the bytes of each frame of a response; () if it has a single frame, or the header is invalid."""
    return () if _SIZES.fullmatch(header) is None else tuple(map(int, header.split(",")))


FRAME_BLOCK_HEADER: Final = "x-mesh-block"
"""In requests with a handover id: `1` if frames that are handed over may be in one block of memory. In
responses with a ticket: `<bytes> <offset>,<offset>,…`, the bytes of that block, whose descriptor is the only
one, and where in it each frame begins."""
_BLOCK = re.compile(r"([0-9]{1,18}) ([0-9]{1,18}(?:,[0-9]{1,18}){0,31})")


@dataclass(frozen=True, slots=True)
class HandoverBlock:
    """The memory that frames are in: its bytes, and where each frame begins."""

    size: int
    offsets: tuple[int, ...]

    def to_header(self) -> str:
        return f"{self.size} {','.join(map(str, self.offsets))}"


def parse_handover_block(text: str) -> HandoverBlock | None:
    """Parse the header, or return None if there is none or it is invalid."""
    found = _BLOCK.fullmatch(text)
    return None if found is None else HandoverBlock(int(found[1]), tuple(map(int, found[2].split(","))))


LOCAL_HANDOVER_HEADER: Final = "x-mesh-local"
"""In responses `<id> <directory, percent-encoded>`, in requests `<id>`."""
HANDOVER_TICKET_HEADER: Final = "x-mesh-handed"
"""In responses `<socket> <ticket> <bytes>`."""
HANDOVER_ID_FILE: Final = "id"
TICKET_BYTES: Final = 32
_ID = re.compile(r"[0-9a-f]{32}")
_PLACE = re.compile(r"([0-9a-f]{32}) (/[!-~]{1,3000})")
_HANDED = re.compile(r"([A-Za-z0-9_.\-]{1,100}\.sock) ([0-9a-f]{32}) ([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class HandoverDirectory:
    """A node's handover directory, and the id that distinguishes it from others of the same name."""

    id: str
    directory: str

    def to_header(self) -> str:
        return f"{self.id} {quote_from_bytes(to_bytes(self.directory), safe='/')}"


@dataclass(frozen=True, slots=True)
class HandoverTicket:
    """The reference that a response carries instead of a body of `size` bytes."""

    socket: str
    ticket: str
    size: int

    def to_header(self) -> str:
        return f"{self.socket} {self.ticket} {self.size}"


def parse_handover_directory(text: str) -> HandoverDirectory | None:
    """Parse the header, or return None if it is invalid."""
    found = _PLACE.fullmatch(text)
    if found is None:
        return None
    try:
        directory = decode(found[2])
    except PercentError:
        return None
    return HandoverDirectory(found[1], directory) if directory.isprintable() else None


def parse_handover_ticket(text: str) -> HandoverTicket | None:
    """Parse the header, or return None if it is invalid."""
    found = _HANDED.fullmatch(text)
    return None if found is None else HandoverTicket(found[1], found[2], int(found[3]))


def is_handover_id(text: str) -> bool:
    """Whether the text has the form of the id in an id file."""
    return _ID.fullmatch(text) is not None
