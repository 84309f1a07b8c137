"""Decompresses gzip and zstd streams and deflated zip members, one bounded piece at a time.

Law: sequential; memory is one piece plus the window of the codec. Invariant: the output matches the
checksums of the stream, or ArchiveError is raised; a truncated stream is an error.
"""

from __future__ import annotations

import re
import sys
import zlib
from typing import TYPE_CHECKING, Any, Final

from zlib_ng import zlib_ng

from meshwire.dataset.archive_paths import ArchiveError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from meshwire.dataset.archive_paths import CopyKind

PIECE: Final = 1 << 20
_FIRST: Final = 4 << 10
"""Input bytes that a stream gets first, then twice as many each time. What it leaves of them is copied, and
a hostile file has a stream every few bytes."""
_FILLED: Final = re.compile(rb"[^\0]")
_GZIP, _RAW = 31, -15  # zlib's window bits: a gzip member, a raw deflate stream
_WINDOW_LOG: Final = 27  # 128 MiB: the maximum that zstd writes without --ultra --long
_Codec = Any  # zlib's and zstd's decompressors have no common type


def decompress(kind: CopyKind, packed: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the file inside a gzip or zstd stream in pieces of at most 1 MiB. Raises ArchiveError."""
    gzip = kind in ("tgz", "gz")
    return _streams(packed, _gzip if gzip else _zstd, "gzip" if gzip else "zstd")


def decompress_member(packed: Iterable[bytes], size: int, crc32: int, name: str) -> Iterator[bytes]:
    """Yield a deflated zip member of exactly `size` bytes in pieces of at most 1 MiB. Raises ArchiveError."""
    codec, left, total = zlib.decompressobj(_RAW), size, 0
    for data in packed:
        for piece in _pieces(codec, data, _fed_zlib):
            left -= len(piece)
            if left < 0:
                raise ArchiveError(f"the member {name[:80]!r} inflates to more than its {size} bytes")
            total = zlib_ng.crc32(piece, total)
            yield piece
        if codec.eof:
            break
    if left or not codec.eof:
        raise ArchiveError(f"the member {name[:80]!r} does not inflate to its {size} bytes")
    if total != crc32:
        raise ArchiveError(f"the member {name[:80]!r} does not match its CRC-32")


def _gzip() -> _Codec:
    return zlib.decompressobj(_GZIP)


def _zstd() -> _Codec:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})


def _streams(packed: Iterable[bytes], make: Callable[[], _Codec], name: str) -> Iterator[bytes]:
    """Decompress consecutive streams, which both formats allow; zeros may follow them."""
    codec, begun, ended, most = make(), False, False, _FIRST
    for chunk in packed:
        at = 0
        while at < len(chunk):
            if ended:
                filled = _FILLED.search(chunk, at)
                if filled is None:
                    break
                at = filled.start()
                codec, begun, ended, most = make(), False, False, _FIRST
            begun = True
            data = chunk[at : at + most]
            at, most = at + len(data), min(2 * most, PIECE)
            yield from _pieces(codec, data, _fed_zlib if name == "gzip" else _fed_zstd)
            ended = codec.eof
            at -= len(codec.unused_data) if ended else 0
    if not ended:
        raise ArchiveError(f"the {name} stream is truncated" if begun else f"there is no {name} stream")


def _pieces(
    codec: _Codec, data: bytes, feed: Callable[[_Codec, bytes], tuple[bytes, bytes]]
) -> Iterator[bytes]:
    rest = data
    while True:
        try:
            piece, rest = feed(codec, rest)
        except (zlib.error, zstd.ZstdError) as error:
            raise ArchiveError(f"the compressed bytes are damaged: {str(error)[:100]}") from error
        if piece:
            yield piece
        if codec.eof or (not rest and len(piece) < PIECE):
            return


def _fed_zlib(codec: _Codec, data: bytes) -> tuple[bytes, bytes]:
    piece = codec.decompress(data, PIECE)
    return piece, codec.unconsumed_tail


def _fed_zstd(codec: _Codec, data: bytes) -> tuple[bytes, bytes]:
    return codec.decompress(data, PIECE), b""
