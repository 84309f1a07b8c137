"""Notes of the nodes on plans, logged as warnings.

Invariant: a process logs each note once, however often it registers the plan.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshsdk.client.native_api import PlanInfo

_log = logging.getLogger("meshsdk")
_logged: set[str] = set()


def log_notes(plan: PlanInfo) -> None:
    """Log the notes on a registered plan."""
    for note in plan.notes:
        if note not in _logged:
            _logged.add(note)
            _log.warning("%s", note)
