"""The end of the process, for certain.

kopf waits for all tasks that it has cancelled. A watch that is cancelled while it begins anew takes that for
a failed request (kopf 1.45.2), tries again, and waits for credentials that nobody brings any more: the
process stays, does nothing, and no other one is started in its place.
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
