"""Frame requests: the address of a step's frame, whole or split by owner, and the report header.

Law: an address is a function of plan, position and rank; its content does not depend on the client or the
time. Splitting a frame is an optimization: a frame whose split fails is requested whole, and repeated
failures pause splitting. Batches are identical either way.
"""

from __future__ import annotations

import math
import operator
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import quote

from meshsdk.client.request import Request
from meshsdk.client.routing import near_caches
from meshsdk.errors import ConfigurationError, CorruptFrameError
from meshsdk.meters import Arrival
from meshwire.cluster.routes import batch_nodes, frame_address
from meshwire.frame.split_frames import SplitFrameReader
from meshwire.frame.tensor_frame import FrameError
from meshwire.http_values.mesh_headers import (
    LOADER_NAME,
    LOADER_REPORT_HEADER,
    SAMPLE_CACHE_HEADER,
    FrameTiming,
    LoaderReport,
    ServerTiming,
    sample_cache_value,
)
from meshwire.plan.loader_state import batch_rows, rank_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from meshsdk.client.arena import Arena
    from meshsdk.client.http_connection import Response
    from meshsdk.client.native_api import PlanInfo
    from meshsdk.client.routing import ClusterDirectory
    from meshsdk.client.settings import Endpoint
    from meshsdk.meters import LoaderStats
    from meshwire.cluster import ClusterMap
    from meshwire.plan.loader_state import Tail


MAX_NODES: Final = 16
ROWS_A_NODE: Final = 2
"""Minimum rows per node of a split frame; for smaller ones the requests would be most of the work."""
_LONGEST: Final = 256  # most steps that are requested whole after repeated failures
_ORIGINS = ("miss", "joined", "hit")  # if the parts differ, the first of these counts


@dataclass(frozen=True, slots=True)
class FrameAddress:
    """The address of a rank's rows of a step, valid at any node and at any time."""

    plan: str
    epoch: int
    step: int
    rank: int
    world: int
    batch: int
    origin: int = 0
    share: str | None = None

    def request(self) -> Request:
        query = f"batch={self.batch}&format=tensors&origin={self.origin}&rank={self.rank}"
        if self.share:
            query += f"&share={quote(self.share, safe='')}"
        query += f"&world={self.world}"
        place = self.rank, self.world, self.batch, self.origin
        meets = frame_address(self.plan, self.epoch, self.step, *place)
        return Request("GET", f"/-/plans/{self.plan}/{self.epoch}/{self.step}", query, meets=meets)


@dataclass(frozen=True, slots=True)
class SplitRequest:
    """How to request parts of frames.

    `ask(step, version)` returns the request that goes to each node, with the version of the cluster map that
    determines the parts; `rows(step)` returns the number of rows in the frame of a step.
    """

    ask: Callable[[int, int], Request]
    rows: Callable[[int], int]


@dataclass(frozen=True, slots=True)
class FetchSpec:
    """What to fetch.

    Attributes:
        ask: returns the request for a step.
        steps: an ascending range of any stride.
        expected: bytes of a frame if known, else 0.
        verify: whether to verify the checksums of received frames; "all" includes those in shared memory.
        connections: maximum number of frames in flight.
        deadline: seconds for which a step is retried.
        named: returns the step number that the frame of a step carries.
        parts: how to request frames in parts; None to request whole frames.
    """

    ask: Callable[[int], Request]
    steps: range
    expected: int = 0
    verify: Literal[True, False, "all"] = True
    connections: int = 4
    deadline: float = 600.0
    named: Callable[[int], int] = operator.index
    parts: SplitRequest | None = None


@dataclass(slots=True, eq=False)
class SplitFrame:
    """A frame that arrives in parts; `left` is the number of nodes that have not sent theirs yet."""

    step: int
    joining: SplitFrameReader
    left: int
    version: int
    sent: float
    began: float = 0.0
    bytes: int = 0
    origin: str = ""
    server: ServerTiming = field(default_factory=lambda: ServerTiming(FrameTiming(), 0.0))

    def add_part(self, response: Response, timing: ServerTiming, began: float, *, verify: bool) -> None:
        """Receive a part into its place in the frame. Raises CorruptFrameError, ConnectError."""
        if not response.length:
            raise CorruptFrameError(f"step {self.step}: the response has no Content-Length")
        try:
            self.joining.read_part(response.length, response.fill, verify=verify)
        except FrameError as error:
            raise CorruptFrameError(f"step {self.step}: {error}") from error
        self.left -= 1
        self.bytes += response.length
        self.began, self.server = (
            max(self.began, began),
            max(self.server, timing, key=lambda each: each.total),
        )
        origins = {self.origin, response.headers.get("x-mesh-frame", "")}
        self.origin = next((origin for origin in _ORIGINS if origin in origins), "")

    def views(self) -> tuple[Mapping[str, npt.NDArray[Any]], int]:
        """Return the tensors and the size of the complete frame. Raises CorruptFrameError."""
        try:
            return self.joining.tensor_views()
        except FrameError as error:
            raise CorruptFrameError(f"step {self.step}: {error}") from error

    def arrival(self, done: float) -> Arrival:
        """Return the times of the frame's arrival; `done`: when the last part was received."""
        return Arrival(self.sent, self.began, done, self.server)


class SplitPlanner:
    """Decides which steps of an epoch are requested in parts; with `parts` None, none are."""

    def __init__(self, parts: SplitRequest | None, directory: ClusterDirectory, arena: Arena) -> None:
        self._parts, self._directory, self._arena = parts, directory, arena
        self._pause, self._wait = 1, 0

    def __repr__(self) -> str:
        return f"<SplitPlanner, {self._wait} steps whole>"

    def begin_split(self, step: int, now: float) -> tuple[SplitFrame, Request, list[Endpoint]] | None:
        """Return a split frame, its request and the nodes to send it to; None to request a whole frame."""
        if self._parts is None:
            return None
        cluster = self._directory.current()
        if cluster is None:
            return None
        if self._wait:
            self._wait -= 1
            return None
        rows = self._parts.rows(step)
        nodes = self._nodes(cluster, rows)
        if not nodes:
            return None
        joining = SplitFrameReader(rows, step, lambda size: self._arena.acquire_slot(size).view)
        joint = SplitFrame(step, joining, len(nodes), cluster.version, now)
        return joint, self._parts.ask(step, cluster.version), nodes

    def _nodes(self, cluster: ClusterMap, rows: int) -> list[Endpoint]:
        """Return the storing nodes, if they also build batches and none failed recently; else none."""
        storing = [node for node in cluster.nodes if node.stores and node.state in ("up", "draining")]
        if not 2 <= len(storing) <= MAX_NODES or rows < ROWS_A_NODE * len(storing):
            return []
        if near_caches(cluster) or {*storing} != {*batch_nodes(cluster)}:
            return []
        found = [self._directory.endpoint(node) for node in storing]
        return [] if any(map(self._directory.is_shunned, found)) else found

    def pause_splitting(self) -> None:
        """Pause splitting after a failure, for twice as many steps each time."""
        self._wait, self._pause = self._pause, min(2 * self._pause, _LONGEST)

    def resume_splitting(self) -> None:
        """Reset the pause after a frame arrived in parts."""
        self._pause = 1


_EVERY: Final = 1.0  # minimum seconds between reports


class LoaderReporter:
    """Makes the report headers of one loader, on any thread. Raises ConfigurationError for a bad name."""

    def __init__(self, name: str, stats: Callable[[], LoaderStats]) -> None:
        if LOADER_NAME.fullmatch(name) is None:
            raise ConfigurationError(
                f"report={name!r}: expected a name for this job in the metrics, of up to 63 letters, digits "
                "and . _ - /"
            )
        self._name, self._stats = name, stats
        self._sent: LoaderStats | None = None
        self._due = 0.0

    def __repr__(self) -> str:
        return f"<LoaderReporter {self._name}>"

    def headers(self) -> Mapping[str, str]:
        """Return the headers to add to a request: at most one report per second, otherwise none."""
        now = time.monotonic()
        if now < self._due:
            return {}
        stats = self._stats()
        before, self._sent, self._due = self._sent, stats, now + _EVERY

        def gained(figure: str, most: float) -> float:
            since = float(getattr(before, figure)) if before is not None else 0.0
            return min(max(float(getattr(stats, figure)) - since, 0.0), most)

        samples = stats.samples - (before.samples if before is not None else 0)
        seconds = gained("seconds", math.inf)
        waited = gained("waited", seconds)
        preprocessing = gained("preprocessing", waited)
        fetch = gained("fetch", waited - preprocessing)
        report = LoaderReport(self._name, samples, waited, seconds, preprocessing, fetch)
        return {LOADER_REPORT_HEADER: report.to_header()}


@dataclass(frozen=True, slots=True)
class FrameRequests:
    """Makes the requests for one rank's frames.

    `parted`: frames may be split by node; `cache`: bytes of decoded samples that a node may keep, None if it
    decides.
    """

    plan: PlanInfo
    batch: int
    rank: int
    world: int
    tail: Tail
    share: str | None
    parted: bool
    reporter: LoaderReporter | None = None
    cache: int | None = None

    def bare_request(self, epoch: int, step: int, origin: int) -> Request:
        """Return the request for a frame, without a report."""
        share = self.share
        request = FrameAddress(
            self.plan.hash, epoch, step, self.rank, self.world, self.batch, origin, share
        ).request()
        if self.cache is None:
            return request
        return replace(request, headers={SAMPLE_CACHE_HEADER: sample_cache_value(self.cache)})

    def frame_request(self, epoch: int, step: int, origin: int) -> Request:
        """Return the request for a frame, with the job's report if that is due."""
        request = self.bare_request(epoch, step, origin)
        reported = self.reporter.headers() if self.reporter is not None else None
        return replace(request, headers={**request.headers, **reported}) if reported else request

    def split_request(self, epoch: int, origin: int) -> SplitRequest | None:
        """Return how to request an epoch's frames in parts; None if they must not be split."""
        if not self.parted:
            return None

        def ask(step: int, version: int) -> Request:
            request = self.frame_request(epoch, step, origin)
            return replace(request, query=f"{request.query}&part={version}")

        def rows(step: int) -> int:
            whole = batch_rows(self.plan.positions, self.batch, origin, step, self.tail)
            first, end = rank_rows(whole, self.rank, self.world)
            return end - first

        return SplitRequest(ask, rows)
