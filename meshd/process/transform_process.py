"""Transform process: the body of a process that decodes and augments samples.

It has no store and no event loop. It stops on SIGTERM, in the middle of a sample if necessary: the pool
renders those rows in another process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.telemetry import logs
from meshd.transform import worker
from meshd.transform.resource_limits import RowLimits
from meshd.transform.sandbox.process_pool import SandboxProcessPool
from meshd.transform.sandbox.sandbox_process import SandboxPolicy
from meshd.transform.sandbox.user_op_definitions import MODULES

if TYPE_CHECKING:
    import socket

    from meshd.config import NodeSettings
    from meshd.process.child_process import ChildReporter


def sandbox_limits(settings: NodeSettings) -> SandboxPolicy | None:
    """Return the limits of users' ops; None if they are disabled."""
    if not settings.transform.user_ops:
        return None
    store = settings.store
    hidden = {store.data_dir, store.index_dir, settings.decoded_cache_dir, *store.disks}
    return SandboxPolicy(
        tuple(sorted(map(str, hidden))), settings.transform.user_op_seconds, settings.transform.user_op_memory
    )


def run_transform(
    settings: NodeSettings, index: int, listener: socket.socket, reporter: ChildReporter
) -> None:
    """Run transform process `index` until SIGTERM."""
    logs.configure(settings.log_format, settings.log_level, f"transform-{index}")
    logs.follow_runtime_level(settings.log_level)
    granted = sandbox_limits(settings)
    if granted is not None:
        MODULES.processes = SandboxProcessPool(granted)
    reporter.report_ready()
    worker.main(listener, RowLimits(memory=settings.transform.process_bytes))
