"""Delivery of a dataset's keys: kubelets bring a changed Secret to their daemons one after the other.

Law: a new dataset is ready when every daemon that answers has its keys, so that no load and no reader meets
one that has not. After `PATIENCE` it is ready without those whose kubelets still have not delivered: one
broken machine must not hold back what the others can read.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from meshoperator.daemon_client import DaemonError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshoperator.daemon_client import DaemonClient, MeshAccess

NO_KEYS: Final = "CredentialsMissing"
PATIENCE: Final = 240.0
"""Seconds after the dataset was created; kubelets deliver within about two minutes."""


async def require_keys(
    daemons: DaemonClient,
    nodes: Sequence[MeshAccess],
    bucket: str,
    origin: Mapping[str, Any],
    metadata: Mapping[str, Any],
    now: float,
) -> None:
    """Check that daemons have the keys of a bucket's origin. `metadata`: of the MeshDataset; `now`: seconds
    since 1970. Raises DaemonError `NO_KEYS`."""
    created = datetime.fromisoformat(metadata["creationTimestamp"]).timestamp()
    if now - created > PATIENCE:
        return
    for node in nodes:
        try:
            await daemons.request_json(node, "PUT", f"/-/buckets/{quote(bucket, safe='')}", dict(origin))
        except UnreachableError:
            continue
        except DaemonError as error:
            if error.code == NO_KEYS:  # the pass itself reports anything else
                raise
