"""The last word of a node that cannot read its index any more.

Law: in a mesh such a node ends, for the others do without it and wait for nothing; what it says last stays in
`mesh cluster status`. It does not start again before somebody has looked: it would take part, and die of the
next read.
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING, Final

from meshd.cluster.scrubbing import tell_disks
from meshd.control.opening import open_control
from meshd.kit.clock import SystemClock
from meshd.store.probing import DiskState
from meshd.store.unreadable import mark_unreadable

if TYPE_CHECKING:
    from meshd.config import NodeSettings

_PATIENCE: Final = 10.0
_WHY: Final = "has the index, and cannot be read: the node has ended, and its log says what to do"


def remember_loss(settings: NodeSettings) -> None:
    """For the next start, and, in a mesh, for those who look after it. In a child: it opens the control
    store. Raises ControlError, TimeoutError."""
    mark_unreadable(settings.store)
    if settings.cluster.control is None:
        return
    state = DiskState(str(settings.store.index_dir), False, _WHY)
    with closing(open_control(settings, SystemClock())) as control:
        asyncio.run(asyncio.wait_for(tell_disks(control, settings.node_id, (state,)), _PATIENCE))
