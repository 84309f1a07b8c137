"""Decoders of chunks of Zarr arrays: the codecs of numcodecs, each with a bound on what it may produce.

Law: no decoder allocates more than `most` bytes, whatever the chunk says. What the standard library decodes
needs no other package; the rest is numcodecs'.
"""

from __future__ import annotations

import bz2
import lzma
import sys
import zlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from awscrt.checksums import crc32c

from meshd.transform.errors import BadSampleError, MissingLibraryError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_MISSING: Final = float(np.finfo(np.float32).max)
_GROWTH = 8
"""Filters that change the type of numbers make at most that many times the bytes."""


def require_codecs(codecs: Sequence[Mapping[str, Any]]) -> None:
    """Check that this node can decode all of them. Raises MissingLibraryError, ValueError (the settings)."""
    for codec in codecs:
        if codec["id"] == "grib":
            _eccodes()
        elif codec["id"] not in _BUILT_IN:
            _configure_codec(codec)


def decode_chunk(codecs: Sequence[Mapping[str, Any]], data: bytes, size: int) -> bytes:
    """Return the `size` bytes of an encoded chunk. Raises BadSampleError."""
    for codec in reversed(codecs):
        name = codec["id"]
        try:
            data = _decode(codec, data, size * _GROWTH + 64)
        except BadSampleError:
            raise
        except Exception as error:
            raise BadSampleError(f"a chunk is no {name}: {str(error)[:200]}") from error
    if len(data) != size:
        raise BadSampleError(f"a chunk of {len(data)} bytes; the metadata says {size}")
    return data


def _decode(codec: Mapping[str, Any], data: bytes, most: int) -> bytes:
    name = codec["id"]
    if name in _STREAMS:
        stream = _STREAMS[name](codec)
        made = bytes(stream.decompress(data, most))
        if not stream.eof:
            raise BadSampleError(f"a chunk of {name} is cut short, or larger than the metadata says")
        return made
    if name == "grib":
        return _grib_values(data, str(codec.get("dtype") or "float32"), most)
    if name == "crc32c_end":
        if len(data) < 4 or crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
            raise BadSampleError("a chunk does not match its crc32c")
        return data[:-4]
    if name == "blosc":  # its decoder believes the header
        whole, size = int.from_bytes(data[4:8], "little"), int.from_bytes(data[12:16], "little")
        if len(data) < 16 or size != len(data) or whole > most:
            raise BadSampleError("a chunk of blosc is cut short, or larger than the metadata says")
    if name == "lz4" and not 0 <= int.from_bytes(data[:4], "little") <= most:
        raise BadSampleError("a chunk of lz4 says that it is larger than a chunk")
    if name == "packbits" and len(data) * 8 > most + 64:
        raise BadSampleError("a chunk of packed bits is larger than a chunk")
    if len(data) > most:
        raise BadSampleError("a chunk is larger than the metadata says")
    return np.ascontiguousarray(_configure_codec(codec).decode(data)).tobytes()


def _grib_values(message: bytes, dtype: str, most: int) -> bytes:
    """Return the values of a GRIB message, NaN where its bitmap says that there is none."""
    library = _eccodes()
    handle = library.codes_new_from_message(message)
    try:
        count = library.codes_get_size(handle, "values")
        if count * 8 > most:
            raise BadSampleError(f"a GRIB message of {count} values is larger than the metadata says")
        if library.codes_get(handle, "bitmapPresent"):
            library.codes_set(handle, "missingValue", _MISSING)
        found = np.asarray(library.codes_get_values(handle))
    finally:
        library.codes_release(handle)
    return np.where(found == _MISSING, np.nan, found).astype(dtype).tobytes()


def _lzma(codec: Mapping[str, Any]) -> lzma.LZMADecompressor:
    kind, filters = int(codec.get("format", 1)), codec.get("filters")
    if kind == lzma.FORMAT_RAW:
        return lzma.LZMADecompressor(kind, filters=filters)
    return lzma.LZMADecompressor(lzma.FORMAT_AUTO)


_STREAMS: Final[dict[str, Callable[[Mapping[str, Any]], Any]]] = {
    "zlib": lambda _: zlib.decompressobj(wbits=47),
    "gzip": lambda _: zlib.decompressobj(wbits=47),
    "zstd": lambda _: zstd.ZstdDecompressor(),
    "bz2": lambda _: bz2.BZ2Decompressor(),
    "lzma": _lzma,
}
_BUILT_IN = (*_STREAMS, "crc32c_end")


def _configure_codec(codec: Mapping[str, Any]) -> Any:
    return _numcodecs().get_codec(dict(codec))


def _eccodes() -> Any:
    try:
        import eccodes
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingLibraryError("eccodes", "grib") from error
    return eccodes


def _numcodecs() -> Any:
    try:
        import numcodecs
    except ImportError as error:
        raise MissingLibraryError("numcodecs", "science") from error
    import numcodecs.blosc

    numcodecs.blosc.use_threads = False  # a transform process has one
    return numcodecs
