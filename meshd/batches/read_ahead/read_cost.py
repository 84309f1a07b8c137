"""Read cost: the time that a rotational disk takes for planned reads, and for reading the same samples one by
one.

Law: pure arithmetic with the figures of a typical drive of 7200 rpm; nothing is measured. The costs of
several disks are added: seconds are the disks' time, not waiting time.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from msgspec.structs import astuple

if TYPE_CHECKING:
    from meshd.batches.read_ahead.extents import Reads

MEDIA_RATE: Final = 200e6
"""Bytes per second of a sequential read."""
SEEK_SECONDS: Final = 0.012
"""A seek to another file, and half a turn."""
SHORT_SEEK_SECONDS: Final = 0.005
"""A seek within a data file, and half a turn."""


class ReadCost(msgspec.Struct, frozen=True):
    """The cost of reading samples from a node's rotational disks.

    Attributes:
        samples: samples whose bytes are on these disks.
        wanted: bytes of these samples.
        read: bytes read, including gaps between samples that are read along with them.
        reads: number of reads.
        seeks: reads that do not begin where the previous one ended.
        seek_seconds: the time of the seeks.
    """

    samples: float = 0.0
    wanted: float = 0.0
    read: float = 0.0
    reads: float = 0.0
    seeks: float = 0.0
    seek_seconds: float = 0.0

    def __add__(self, other: ReadCost) -> ReadCost:
        return ReadCost(*map(operator.add, astuple(self), astuple(other)))

    def scaled(self, factor: float) -> ReadCost:
        """Return the cost of `factor` times as many samples that are stored in the same way."""
        return ReadCost(*(figure * factor for figure in astuple(self)))

    @property
    def disk_seconds(self) -> float:
        """The time that the reads take, seeks included."""
        return self.seek_seconds + self.read / MEDIA_RATE

    @property
    def media_seconds(self) -> float:
        """The time of a sequential read of the samples' bytes alone."""
        return self.wanted / MEDIA_RATE

    def without_read_ahead(self) -> ReadCost:
        """Return the cost if each sample is read when its batch is built: one seek per sample."""
        seeks = self.samples
        return ReadCost(self.samples, self.wanted, self.wanted, seeks, seeks, seeks * SEEK_SECONDS)

    def document(self) -> dict[str, Any]:
        """Return the figures as plain JSON values: counts and bytes are integers, times in seconds."""
        plain = self.without_read_ahead()
        return {
            "samples": round(self.samples),
            "bytes": round(self.wanted),
            "read_bytes": round(self.read),
            "reads": round(self.reads),
            "seeks": round(self.seeks),
            "seeks_per_sample": round(self.seeks / self.samples, 6) if self.samples else 0.0,
            "disk_seconds": round(self.disk_seconds, 6),
            "media_seconds": round(self.media_seconds, 6),
            "without_read_ahead": {
                "seeks": round(plain.seeks),
                "disk_seconds": round(plain.disk_seconds, 6),
            },
        }


def cost_of_reads(reads: Reads, samples: float, wanted: float) -> ReadCost:
    """Return the cost of one disk's reads, which return `samples` samples of `wanted` bytes in total."""
    files, offsets = reads.files, reads.offsets
    another = files[1:] != files[:-1]
    jumps = ~another & (offsets[1:] != offsets[:-1] + reads.lengths[:-1])
    far = min(1, files.size) + int(np.count_nonzero(another))
    near = int(np.count_nonzero(jumps))
    seconds = far * SEEK_SECONDS + near * SHORT_SEEK_SECONDS
    return ReadCost(samples, wanted, reads.bytes, len(reads), far + near, seconds)
