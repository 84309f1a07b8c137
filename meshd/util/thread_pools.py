"""Thread pools whose threads all run from the beginning."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Returns a pool with all its threads started, or as many as the system allows.

    A pool that starts them on demand fails when the system has no room for another thread, after it queued
    the call, which then runs although its caller was told that it failed.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    together = threading.Barrier(threads)  # none is idle until all have started
    try:
        for _ in range(threads):
            pool.submit(together.wait)
    except RuntimeError:
        together.abort()
    return pool
