"""Frames taken in parts: of each node that stores the rows whose bytes it has; they cross the network once.

Law: a short cut, never a condition: what does not come in parts at the first try is asked for as one frame,
of one node; after trouble for a while everything is. Which is done is not to be seen in a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from meshsdk.errors import CorruptFrameError
from meshsdk.routing import near_caches
from meshsdk.stalls import Arrival
from meshwire.cluster.meeting import assemblers
from meshwire.frameparts import Joining
from meshwire.frames import FrameError
from meshwire.servertimings import ServerTiming, Took

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from meshsdk.arenas import Arena
    from meshsdk.connections import Response
    from meshsdk.maps import Directory
    from meshsdk.settings import Endpoint
    from meshsdk.transport import Request
    from meshwire.cluster import ClusterMap

MAX_NODES: Final = 16
ROWS_A_NODE: Final = 2
"""A frame has so many rows for each node at least; of smaller ones the requests would be most of the work."""
_LONGEST: Final = 256  # steps that are asked for whole after trouble upon trouble
_ORIGINS = ("miss", "joined", "hit")  # of parts that came differently, the first of these counts


@dataclass(frozen=True, slots=True)
class Parts:
    """How a loader asks: `ask(step, version)` each node that goes by that version of the map; the frame of a
    step has `rows(step)` rows."""

    ask: Callable[[int, int], Request]
    rows: Callable[[int], int]


@dataclass(slots=True, eq=False)
class Joint:
    """A frame that is on its way in parts, from so many nodes still."""

    step: int
    joining: Joining
    left: int
    version: int
    sent: float
    began: float = 0.0
    bytes: int = 0
    origin: str = ""
    server: ServerTiming = field(default_factory=lambda: ServerTiming(Took(), 0.0))

    def take(self, response: Response, timing: ServerTiming, began: float, *, verify: bool) -> None:
        """A part. Raises CorruptFrameError, ConnectError."""
        if not response.length:
            raise CorruptFrameError(f"step {self.step}: the answer has no Content-Length")
        try:
            self.joining.take(response.length, response.fill, verify=verify)
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
        """What all parts make. Raises CorruptFrameError."""
        try:
            return self.joining.views()
        except FrameError as error:
            raise CorruptFrameError(f"step {self.step}: {error}") from error

    def arrival(self, done: float) -> Arrival:
        """When what happened."""
        return Arrival(self.sent, self.began, done, self.server)


class Parting:
    """Which steps are asked for in parts; one a pass. `parts`: None, none are."""

    def __init__(self, parts: Parts | None, directory: Directory, arena: Arena) -> None:
        self._parts, self._directory, self._arena = parts, directory, arena
        self._pause, self._wait = 1, 0

    def __repr__(self) -> str:
        return f"<Parting, {self._wait} steps as one>"

    def begin(self, step: int, now: float) -> tuple[Joint, Request, list[Endpoint]] | None:
        """How a step is asked for in parts, and of whom; None: as one frame."""
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
        joining = Joining(rows, step, lambda size: self._arena.lease(size).view)
        joint = Joint(step, joining, len(nodes), cluster.version, now)
        return joint, self._parts.ask(step, cluster.version), nodes

    def _nodes(self, cluster: ClusterMap, rows: int) -> list[Endpoint]:
        """Those that store, if it is they that make batches, and none of them failed lately."""
        storing = [node for node in cluster.nodes if node.stores and node.state in ("up", "draining")]
        if not 2 <= len(storing) <= MAX_NODES or rows < ROWS_A_NODE * len(storing):
            return []
        if near_caches(cluster) or {*storing} != {*assemblers(cluster)}:
            return []
        found = [self._directory.endpoint(node) for node in storing]
        return [] if any(map(self._directory.shunned, found)) else found

    def failed(self) -> None:
        """A frame did not come in parts: for a while none is asked for so."""
        self._wait, self._pause = self._pause, min(2 * self._pause, _LONGEST)

    def worked(self) -> None:
        """One did."""
        self._pause = 1
