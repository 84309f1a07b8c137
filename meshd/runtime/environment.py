"""What must be in the environment before the heavy libraries are imported.

Law: called once, first. One thread a library: processes are the parallelism, and forking needs one thread.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping

    from meshd.config import NodeSettings

_ONE_THREAD = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "OPENCV_FOR_THREADS_NUM",
)
_AUTHORITIES: Final = "SSL_CERT_FILE"  # where OpenSSL looks for the system's


def set_environment(settings: NodeSettings, env: MutableMapping[str, str]) -> None:
    """Thread counts, and where the processes share their metrics."""
    for name in _ONE_THREAD:
        env[name] = "1"
    env["PROMETHEUS_MULTIPROC_DIR"] = str(settings.metrics_dir)


@contextmanager
def unread_authorities(env: MutableMapping[str, str]) -> Iterator[None]:
    """While modules load, the system's authorities seem to be none; afterwards they are where they were.
    aiohttp's client, which a node does not use, reads them when it is imported: half of its time."""
    before = env.get(_AUTHORITIES)
    env[_AUTHORITIES] = os.devnull
    try:
        yield
    finally:
        del env[_AUTHORITIES]
        if before is not None:
            env[_AUTHORITIES] = before
