"""What must be in the environment before the heavy libraries are imported.

Law: called once, first. One thread a library: processes are the parallelism, and forking needs one thread.
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
    """Thread counts, and where the processes share their metrics."""
    for name in _ONE_THREAD:
        env[name] = "1"
    env["PROMETHEUS_MULTIPROC_DIR"] = str(settings.metrics_dir)
