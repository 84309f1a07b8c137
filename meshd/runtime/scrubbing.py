"""The scrubber of a node, put together; and what every process does about damage that it came upon."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from functools import partial
from typing import TYPE_CHECKING, Final

from meshd.cluster.debts import Debts
from meshd.cluster.mending import Mender
from meshd.cluster.pulling import RemoteHolder
from meshd.cluster.scrubbing import Pace, Scrubber, tell_disks
from meshd.control.interface import ControlError
from meshd.kit.pulse import Courtesy
from meshd.runtime.moving import copies_asked, offers
from meshd.store.inventory import Held, HeldVersion

if TYPE_CHECKING:
    from meshd.cluster.moving import Mover
    from meshd.runtime.node import Node
    from meshd.store.store import Store

_log = logging.getLogger("meshd.disks")
_PROBES: Final = 4  # of a disk that failed one, before the next turn
_DOUBT: Final = 1.0  # seconds between two of them
_LAST_WORD: Final = 5.0  # seconds for it


def scrubber(node: Node, mover: Mover | None) -> Scrubber:
    """The one of this node, to be run in its steward."""
    rest = Courtesy(node.clock).rest
    mender = Mender(node.store, offers(node), node.mesh, partial(RemoteHolder, node.peers), rest)
    return Scrubber(
        node.settings.node_id,
        node.store,
        node.control,
        node.clock,
        mend=mender.mend,
        compare=_nobody if mover is None else mover.compared,
        rest=Pace(node.clock, rest, node.settings.scrub_rate).rest,
        every=node.settings.scrub_interval,
        debts=Debts(node.mesh, offers(node), lambda: copies_asked(node), node.clock).count,
    )


async def _nobody() -> None:
    """A lone node has nobody to be compared with."""


async def watch_disks(node: Node) -> None:
    """Disks that fail go out of service; a node of a mesh that has none left, or whose index's device fails,
    ends, so that the others do without it."""
    disks = node.store.disks
    watched = [disks] if node.shelf is None else [disks, node.shelf.cache.disks]
    for _ in range(_PROBES):
        if not any([await each.look() for each in watched]):
            break
        await asyncio.sleep(_DOUBT)
    if node.settings.cluster.control is None or (disks.any and not disks.index_failed):
        return
    if disks.index_failed:
        _log.critical(
            "the device of this node's index has failed: the node ends; the others have its share",
            extra={"disk": str(node.settings.store.index_dir), "why": disks.index_failed},
        )
    else:
        _log.critical("every disk of this node has failed: it ends; the others have its share")
    last = [disks.index_state()] if disks.index_failed else disks.states()
    try:
        await asyncio.wait_for(tell_disks(node.control, node.settings.node_id, tuple(last)), _LAST_WORD)
    except (ControlError, TimeoutError) as error:
        _log.warning("nobody could be told", extra={"why": str(error)})
    os.kill(os.getppid(), signal.SIGTERM)


async def replace_disks(node: Node) -> None:
    """Disks that were emptied or taken away go out of service, and empty ones in."""
    await node.store.disks.look_for_gone()
    if node.shelf is not None:
        await node.shelf.cache.disks.look_for_gone()


async def examine(node: Node) -> None:
    """What readers of this process found damaged goes into quarantine; out of the cache it goes for good. A
    disk that the steward found to fail is out of service here, too."""
    node.store.disks.heed()
    await node.store.examine()
    if node.shelf is None:
        return
    node.shelf.cache.disks.heed()
    if await node.shelf.cache.examine() or node.shelf.cache.disks.take_news():
        await _evict_damaged(node.shelf.cache)


async def _evict_damaged(cache: Store) -> None:
    after = None
    while found := cache.quarantined(after=after):
        records = [(name, stamp, cache.at(name, stamp)) for name, stamp, _ in found]
        await cache.drop(
            [Held(name, (HeldVersion(each.version, stamp),)) for name, stamp, each in records if each]
        )
        after = found[-1][:2]
    await cache.sweep_quarantine()
