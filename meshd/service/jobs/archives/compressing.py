"""Shards compressed while they are written.

Law: one stream a shard, at a fixed level: the same tar gives the same bytes with the same library.
"""

from __future__ import annotations

import sys
import zlib
from typing import TYPE_CHECKING, Final, Protocol

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshd.store.interface import Buffer

_GZIP_LEVEL: Final = 6
_ZSTD_LEVEL: Final = 3
_GZIP: Final = 31  # zlib's window bits: a gzip member, whose header has no time


class Compressor(Protocol):
    """Takes bytes, gives bytes when it has some."""

    def compress(self, data: Buffer, /) -> bytes: ...

    def flush(self) -> bytes: ...


def _zstd() -> Compressor:
    options = {
        int(zstd.CompressionParameter.compression_level): _ZSTD_LEVEL,
        int(zstd.CompressionParameter.checksum_flag): 1,
    }
    made: Compressor = zstd.ZstdCompressor(options=options)
    return made


COMPRESSORS: Final[Mapping[str, Callable[[], Compressor]]] = {
    "tgz": lambda: zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP),
    "tar.zst": _zstd,
}
