"""Whether a node may start though one of its disks is gone.

Law: only where nothing is lost by it: by the map, all that the node has is also at another that is up. Else
somebody has to say so (`--lost-disk`), for a disk may just not be mounted, and what is given up is never
looked for on it again.
"""

from __future__ import annotations

import logging
from contextlib import closing
from typing import TYPE_CHECKING

from meshd.control.buckets import BucketTable
from meshd.control.clustermaps import ClusterMaps
from meshd.control.opening import open_control
from meshd.kit.clock import SystemClock
from meshd.store.errors import FormatError
from meshwire.cluster import transitions as turn

if TYPE_CHECKING:
    from pathlib import Path

    from meshd.config import NodeSettings

_log = logging.getLogger("meshd.disks")


def spare_disk(settings: NodeSettings, path: Path, how: str) -> None:
    """Raises FormatError where the node must not do without a disk that `is missing` or `cannot be read`."""
    if path in settings.lost_disks:
        _log.warning("a disk is given up, as --lost-disk says", extra={"disk": str(path), "why": how})
    elif settings.cluster.control is None:
        raise FormatError(
            f"disk {path} {how}; mount it and start again with its --disk. Is it lost for good: "
            f"--lost-disk {path} starts without what was on it"
        )
    elif _is_covered(settings):
        told = {"disk": str(path), "why": how}
        _log.error("a disk is out of service: what it had comes from other nodes", extra=told)
    else:
        raise FormatError(
            f"disk {path} {how}, and by the map no other node that is up has all that this one has: "
            "mount it, or bring the other nodes back first. Is it lost for good, and what only it had: start "
            f"once with --lost-disk {path}"
        )


def _is_covered(settings: NodeSettings) -> bool:
    with closing(open_control(settings, SystemClock())) as control:
        cluster = ClusterMaps(control).current()
        if cluster is None:
            return False
        copies = BucketTable(control).fewest_copies(cluster.copies, cluster.counts)
        return turn.covered(cluster, settings.node_id, copies)
