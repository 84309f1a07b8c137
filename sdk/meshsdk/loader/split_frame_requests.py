"""Split frames: in a mesh, the client requests the rows of a frame from the nodes that store their bytes.

Law: splitting is an optimization. If it fails, the whole frame is requested from one node, and after repeated
failures splitting is paused. Batches are identical either way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from meshsdk.client.arena import no_memory
from meshsdk.client.routing import near_caches
from meshsdk.errors import CorruptFrameError
from meshsdk.loader_stats import Arrival
from meshwire.cluster.routes import batch_nodes
from meshwire.frame.split_frames import SplitFrameReader
from meshwire.frame.tensor_frame import FrameError
from meshwire.http_values.mesh_headers import FrameTiming, ServerTiming

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from meshsdk.client.arena import Arena
    from meshsdk.client.http_connection import Response
    from meshsdk.client.request import Request
    from meshsdk.client.routing import ClusterDirectory
    from meshsdk.client.settings import Endpoint
    from meshwire.cluster import ClusterMap


MAX_NODES: Final = 16
ROWS_A_NODE: Final = 2
"""Minimum rows per node of a split frame; for smaller ones the requests would be most of the work."""
_LONGEST: Final = 256  # most steps that are requested whole after repeated failures
_ORIGINS = ("miss", "joined", "hit")  # if the parts differ, the first of these counts


@dataclass(frozen=True, slots=True)
class SplitRequest:
    """How to request parts of frames.

    `ask(step, version)` returns the request that goes to each node, with the version of the cluster map that
    determines the parts; `rows(step)` returns the number of rows in the frame of a step.
    """

    ask: Callable[[int, int], Request]
    rows: Callable[[int], int]


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
        except MemoryError as error:
            raise no_memory(response.length) from error
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
    """Decides which steps of an epoch are requested in parts."""

    def __init__(self, parts: SplitRequest, directory: ClusterDirectory, arena: Arena) -> None:
        self._parts, self._directory, self._arena = parts, directory, arena
        self._pause, self._wait = 1, 0

    def __repr__(self) -> str:
        return f"<SplitPlanner, {self._wait} steps whole>"

    def begin_split(
        self, step: int, cluster: ClusterMap, now: float
    ) -> tuple[SplitFrame, Request, list[Endpoint]] | None:
        """Return a split frame, its request and the nodes to send it to; None to request a whole frame."""
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
