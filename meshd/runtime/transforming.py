"""The body of a transform process, as the supervisor starts it.

Law: holds no store and no event loop; ends when it is told, in the middle of a sample if need be: the pool
renders those rows elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.telemetry import logs, verbosity
from meshd.transform import process
from meshd.transform.limiting import Limits
from meshd.transform.userops.calling import Confinement
from meshd.transform.userops.modules import MODULES
from meshd.transform.userops.processes import ConfinedProcesses

if TYPE_CHECKING:
    import socket

    from meshd.config import NodeSettings
    from meshd.runtime.children import Reporter


def confinement(settings: NodeSettings) -> Confinement | None:
    """What users' ops are granted, None where they are not run."""
    if not settings.transform.user_ops:
        return None
    store = settings.store
    hidden = {store.data_dir, store.index_dir, *store.disks}
    return Confinement(
        tuple(sorted(map(str, hidden))), settings.transform.user_op_seconds, settings.transform.user_op_memory
    )


def run_transform(settings: NodeSettings, index: int, listener: socket.socket, reporter: Reporter) -> None:
    """Transform process `index`, until SIGTERM."""
    logs.configure(settings.log_format, settings.log_level, f"transform-{index}")
    verbosity.follow(settings.log_level)
    granted = confinement(settings)
    if granted is not None:
        MODULES.processes = ConfinedProcesses(granted)
    reporter.ready()
    process.main(listener, Limits(memory=settings.transform.process_bytes))
