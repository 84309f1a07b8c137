"""The environment of a node's processes, set before any heavy import.

Each library gets one thread: processes provide the parallelism, and forking requires a single thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from meshd.config import NodeSettings


_ONE_THREAD = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "OPENCV_FOR_THREADS_NUM",
)


def set_environment(settings: NodeSettings, env: MutableMapping[str, str]) -> None:
    """Set the thread counts, and the directory in which the processes share their metrics."""
    for name in _ONE_THREAD:
        env[name] = "1"
    env["PROMETHEUS_MULTIPROC_DIR"] = str(settings.metrics_dir)
