"""Forced exit: a timer that ends the process when kopf does not.

A watch cancelled while it reconnects (kopf 1.45.2) treats that as a failed request, retries, and waits
for credentials forever; the process would stay without working, and no other would start.
Law: standard library only; a bare process can import this module.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Final

PATIENCE: Final = 10.0
"""Seconds from the end of the operator's own work: kopf gives what is left five."""
_log = logging.getLogger(__name__)


def exit_within(seconds: float = PATIENCE) -> None:
    """End this process after so many seconds, with status 1, if nothing else has by then."""
    timer = threading.Timer(seconds, _exit)
    timer.daemon = True  # it keeps nobody who leaves in order
    timer.start()


def _exit() -> None:
    _log.error("the operator's loop does not end: it is left as it is")
    os._exit(1)
