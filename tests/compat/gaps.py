"""What clients cannot do with this server yet: (client, job) → the reason, in our words.

Law: strict. A listed job that passes fails the run, so that the list can only shrink.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# Where the server is at fault.
GAPS: Mapping[tuple[str, str], str] = MappingProxyType({})

# Where the client is: it fails in the same way against Amazon's S3, or before it asks anyone.
QUIRKS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("s5cmd", "copy metadata"): "it copies with the directive REPLACE and sends no metadata",
        (
            "s3torchconnector",
            "copy odd keys",
        ): "its runtime puts the target's key into the path without encoding it",
    }
)


def expected(client: str, job: str) -> str:
    """Why the job is expected to fail; empty when it is not."""
    return GAPS.get((client, job)) or QUIRKS.get((client, job), "")
