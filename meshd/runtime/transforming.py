"""The body of a transform process, as the supervisor starts it.

Law: holds no store and no event loop; ends when it is told, in the middle of a sample if need be: the pool
renders those rows elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.telemetry import logs
from meshd.transform import process
from meshd.transform.limiting import Limits

if TYPE_CHECKING:
    import socket

    from meshd.config import NodeSettings
    from meshd.runtime.children import Reporter


def run_transform(settings: NodeSettings, index: int, listener: socket.socket, reporter: Reporter) -> None:
    """Transform process `index`, until SIGTERM."""
    logs.configure(settings.log_format, settings.log_level, f"transform-{index}")
    reporter.ready()
    process.main(listener, Limits(memory=settings.transform.process_bytes))
