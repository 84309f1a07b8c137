"""The rows that every loader of stored tokens reads, and who reads them.

Law: the standard library only, so that the report and the peers' environment read it at no cost. The stream
counts upwards modulo `VALUES`, so each row can be checked.
"""

from __future__ import annotations

from typing import Final

OURS, NUMBERED = "meshsdk", "meshsdk+segments"
"""Tokens alone, as the peers give them; and with segments and positions."""
MAPPED, MAPPED_NUMBERED = "memmap", "memmap+segments"
"""The same two of a local file."""
PEERS: Final = (MAPPED, MAPPED_NUMBERED, "streaming", "litdata")
COMPARED: Final = {
    OURS: (MAPPED, "streaming", "litdata"),
    NUMBERED: (MAPPED_NUMBERED, "streaming", "litdata"),
}
"""Whom each of ours is compared with: a map of the local file, that gives the same, and servers of tokens."""
BUCKET: Final = "tokens"
LENGTH, BATCH, WORKERS, VALUES, FILLING = 2048, 32, 2, 50_000, 65_535
SHARD_ROWS: Final = 2048
