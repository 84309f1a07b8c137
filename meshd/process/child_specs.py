"""The processes of a node: their names, what each runs, and the order in which they end.

It imports nearly all of the daemon.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from meshd.process.child_process import ChildSpec
from meshd.process.coordinator import run_coordinator
from meshd.process.rebalance_process import REBALANCE_PROCESS, run_rebalance_process
from meshd.process.supervisor import Stage
from meshd.process.transform_process import run_transform
from meshd.process.worker import run_worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.config import NodeSettings
    from meshd.process.listen_sockets import ListenSockets
    from meshd.process.supervisor import ProcessStatus


_TRANSFORM_DELAY = 0.2  # a sample may crash one; other clients must not be slowed down by it
_STAGE_GRACE = 5.0  # seconds after a stage's own limit before its children are killed


def child_names(settings: NodeSettings) -> tuple[list[str], list[str]]:
    """Return the names of the processes of a node, and of those that start on demand."""
    workers = [f"worker-{index}" for index in range(settings.workers)]
    transforms = [f"transform-{index}" for index in range(settings.transform.processes)]
    coordinator = ["coordinator-0"] if settings.workers > 1 else []
    on_demand = [REBALANCE_PROCESS] if settings.cluster.control is not None else []
    return [*workers, *coordinator, *transforms], on_demand


def child_spec(settings: NodeSettings, sockets: ListenSockets, board: ProcessStatus, name: str) -> ChildSpec:
    """Return what the supervisor has to know of a process: its body, and the sockets that it inherits."""
    role, _, number = name.partition("-")
    index = int(number)
    if role == "transform":
        sock = sockets.transforms[index]
        body = partial(run_transform, settings, index, sock)
        return ChildSpec(name, body, frozenset([sock.fileno()]), _TRANSFORM_DELAY)
    if role == "rebalancer":
        listen_socket = sockets.rebalancer.fileno()
        return ChildSpec(
            name,
            partial(run_rebalance_process, settings, sockets),
            frozenset([listen_socket]),
            listen_fd=listen_socket,
        )
    if role == "coordinator":
        return ChildSpec(
            name, partial(run_coordinator, settings, sockets), frozenset([sockets.coordinator.fileno()])
        )
    own = {sockets.http.fileno()} | ({sockets.coordinator.fileno()} if settings.workers == 1 else set())
    return ChildSpec(
        name, partial(run_worker, settings, index, sockets, board.unready_reason), frozenset(own)
    )


def child_stages(settings: NodeSettings) -> Sequence[Stage]:
    """Order the stages: workers finish their requests first, which may need the coordinator and the
    transforms."""
    return (
        Stage(frozenset({"worker"}), settings.http.drain_timeout + _STAGE_GRACE),
        Stage(frozenset({"coordinator", "rebalancer"}), _STAGE_GRACE),
        Stage(frozenset({"transform"}), _STAGE_GRACE),
    )
