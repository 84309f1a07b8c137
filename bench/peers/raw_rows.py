"""The small raw samples that every loader of the row reads, and who reads them.

Law: the standard library only, so that the report and the peers' environment read it at no cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

OURS: Final = "meshsdk"
FORMATS: Final = {
    "webdataset": "tar",
    "streaming": "mds",
    "litdata": "lit",
    "datasets": "txt",
    "arrayrecord": "ar",
}
"""By peer, the folder with its shards; the lines of text are ours, too."""
PEERS: Final = tuple(FORMATS)
BEYOND: Final = ("litdata",)
"""Peers that the target does not name."""
BUCKET: Final = "raw"
WIDTH, BATCH, WORKERS, SHARDS, BUFFER = 59, 1024, 2, 8, 10_000
"""Bytes of a sample, samples of a batch, worker processes and shards of a peer, samples of its shuffle
buffer."""


def samples(shard: int, lines: int) -> Iterator[bytes]:
    """Yield the samples of a shard: numbers in decimal digits, each once."""
    return (b"%0*d" % (WIDTH, number) for number in range(shard, lines, SHARDS))
