"""Lossless and 12-bit JPEG in DICOM files: a plugin of pydicom, by the libjpeg-turbo of imagecodecs.

Law: a frame is decoded only if its own header has the size of the file's. Colours and signs stay as they are
stored; pydicom converts them.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

import numpy as np

LABEL: Final = "shardmesh"
_EXTENDED: Final = "1.2.840.10008.1.2.4.51"
_LOSSLESS: Final = "1.2.840.10008.1.2.4.57"
_LOSSLESS_SV1: Final = "1.2.840.10008.1.2.4.70"
_SEQUENTIAL: Final = frozenset({0xC0, 0xC1})
_LOSSLESS_MARKER: Final = 0xC3
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers of frame headers (T.81, table B.1): C4, C8 and CC are tables and extensions."""

DECODER_DEPENDENCIES: Final = {
    uid: ("numpy", "imagecodecs>=2024.6") for uid in (_EXTENDED, _LOSSLESS, _LOSSLESS_SV1)
}
"""By transfer syntax; pydicom reads it."""


class FrameHeader(NamedTuple):
    """The frame header of a JPEG stream."""

    marker: int
    precision: int
    rows: int
    columns: int
    components: int


def install(decoder_of: Any) -> None:
    """Add the plugin to pydicom's decoders, which `decoder_of` finds by syntax, unless it is there."""
    for uid in DECODER_DEPENDENCIES:
        decoder = decoder_of(uid)
        if LABEL not in (*decoder.available_plugins, *decoder.missing_dependencies):
            decoder.add_plugin(LABEL, (__name__, "decode_frame"))


def is_available(uid: str) -> bool:
    """Return whether a transfer syntax is decoded; pydicom asks."""
    try:
        from imagecodecs import JPEG8
    except (ImportError, OSError):
        return False
    return uid in DECODER_DEPENDENCIES and bool(getattr(JPEG8, "available", False))


def decode_frame(source: bytes, runner: Any) -> bytes:
    """Return the values of a frame in the file's byte width; pydicom calls it, and reports what it raises."""
    from imagecodecs import jpeg8_decode

    header = read_header(source)
    wanted = (runner.rows, runner.columns, runner.samples_per_pixel)
    if (header.rows, header.columns, header.components) != wanted:
        actual, declared = ("×".join(map(str, size)) for size in (header[2:], wanted))
        raise ValueError(f"a JPEG of {actual} in a file of {declared}")
    if header.marker != _LOSSLESS_MARKER and (header.precision == 8 or header.marker not in _SEQUENTIAL):
        raise NotImplementedError("a JPEG of 8 bits, or progressive: for another decoder")
    if not source.rstrip(b"\0\xff").endswith(b"\xff\xd9"):  # libjpeg would fill the rest
        raise ValueError("the JPEG is truncated")
    if not 2 <= header.precision <= runner.bits_allocated:
        raise ValueError(f"{header.precision} bits in values of {runner.bits_allocated}")
    color = "RGB" if header.components == 3 else "GRAYSCALE"  # the same on both sides: nothing is converted
    found = jpeg8_decode(source, colorspace=color, outcolorspace=color)
    values = np.ascontiguousarray(found).astype(f"<u{runner.bits_allocated // 8}")
    if header.components > 1:
        runner.set_option("planar_configuration", 0)
    return values.tobytes()


def read_header(source: bytes) -> FrameHeader:
    """Return the frame header of a JPEG stream. Raises ValueError."""
    at = 2
    while source[:2] == b"\xff\xd8" and at + 9 < len(source) and source[at] == 0xFF:
        marker = source[at + 1]
        if marker == 0xFF:  # fill bytes
            at += 1
            continue
        if marker in _FRAMES:
            precision, rows, columns, components = struct.unpack_from(">BHHB", source, at + 4)
            return FrameHeader(marker, precision, rows, columns, components)
        at += 2 + max(2, int.from_bytes(source[at + 2 : at + 4], "big"))
    raise ValueError("no JPEG stream with a frame header")
