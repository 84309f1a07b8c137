"""Image headers: size, channels and number format of an image file as stored, without decoding it.

Law: pure, and bounded by the bytes given. Anything that is not a readable header gives None. Sources: PNG
(third edition) 11.2, TIFF 6.0 section 2 and tags, ITU-T T.81 B.2.2, GIF89a 18, BITMAPINFOHEADER, the WebP
container.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["uint", "int", "float"]

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_PNG_CHANNELS: Final = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_PNG_PALETTE: Final = 3
_JPEG_NOT_FRAMES: Final = frozenset((0xC4, 0xC8, 0xCC))
_TIFF_KINDS: Final[dict[int, Kind]] = {1: "uint", 2: "int", 3: "float", 4: "uint"}
_TIFF_SIZES: Final = {3: "H", 4: "I", 16: "Q"}  # SHORT, LONG, and LONG8 of BigTIFF
_TIFF_PALETTE: Final = 3
_TIFF_PLANES: Final = 2
_MOST_TAGS: Final = 1000
_CLASS_COLORS: Final = bytes((0, 0, 0, 128, 0, 0, 0, 128, 0, 128, 128, 0))
"""The first entries of Pascal VOC's palette, which DAVIS, ADE20K exports and labelme use, too."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What the header of an image file says.

    `format`: "png", "tiff", "jpeg", "gif", "bmp" or "webp"; `channels`: 1 for a palette image; `bits` of a
    value in a channel, and their `kind`; `class_colors`: the palette is one of those that masks of class
    numbers have.
    """

    format: str
    height: int
    width: int
    channels: int
    bits: int = 8
    kind: Kind = "uint"
    palette: bool = False
    class_colors: bool = False
    planar: bool = False

    @property
    def dtype(self) -> str:
        """The name of the smallest dtype that holds the stored values."""
        bits = next((size for size in (8, 16, 32) if self.bits <= size), 64)
        return f"{self.kind}{bits}"


def read_image_header(data: bytes) -> ImageHeader | None:
    """Return the header of a PNG, TIFF, JPEG, GIF, BMP or WebP file; None for anything else.

    `data`: the whole file; for all formats but TIFF, its first 64 KiB usually suffice.
    """
    try:
        return _read(bytes(data))
    except (struct.error, IndexError, KeyError, OverflowError):
        return None


def _read(data: bytes) -> ImageHeader | None:
    if data.startswith(_PNG):
        return _png(data)
    if data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return _tiff(data)
    if data.startswith(b"\xff\xd8\xff"):
        return _jpeg(data)
    if data[:6] in (b"GIF87a", b"GIF89a"):
        width, height = struct.unpack_from("<HH", data, 6)
        return ImageHeader("gif", height, width, 1, palette=True)
    if data.startswith(b"BM"):
        return _bmp(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp(data)
    return None


def _png(data: bytes) -> ImageHeader:
    width, height, bits, color = struct.unpack_from(">IIBB", data, 16)
    palette = color == _PNG_PALETTE
    colors = palette and _png_palette(data).startswith(_CLASS_COLORS)
    return ImageHeader("png", height, width, _PNG_CHANNELS[color], bits, palette=palette, class_colors=colors)


def _png_palette(data: bytes) -> bytes:
    at = len(_PNG)
    while at + 8 <= len(data):
        length, name = struct.unpack_from(">I4s", data, at)
        if name in (b"PLTE", b"IDAT", b"IEND"):
            return data[at + 8 : at + 8 + length] if name == b"PLTE" else b""
        at += 12 + length
    return b""


def _tiff(data: bytes) -> ImageHeader:
    order = "<" if data.startswith(b"II") else ">"
    is_big = b"+" in data[:4]
    offset, total, head = ("Q", "Q", "HHQ") if is_big else ("I", "H", "HHI")
    room, first = struct.calcsize(offset), struct.calcsize("<" + total)
    size = struct.calcsize("<" + head) + room
    (at,) = struct.unpack_from(order + offset, data, 8 if is_big else 4)
    (count,) = struct.unpack_from(order + total, data, at)
    tags: dict[int, int] = {}
    for number in range(min(count, _MOST_TAGS)):
        entry = at + first + size * number
        tag, kind, values = struct.unpack_from(order + head, data, entry)
        form = _TIFF_SIZES.get(kind)
        if form is None or not values:
            continue
        place = entry + size - room
        if values * struct.calcsize(form) > room:
            (place,) = struct.unpack_from(order + offset, data, place)
        (tags[tag],) = struct.unpack_from(order + form, data, place)
    color, bits, channels = tags.get(262, 1), tags.get(258, 1), tags.get(277, 1)
    palette, kind_of = color == _TIFF_PALETTE, _TIFF_KINDS[tags.get(339, 1)]
    planar = channels > 1 and tags.get(284) == _TIFF_PLANES
    return ImageHeader("tiff", tags[257], tags[256], channels, bits, kind_of, palette, planar=planar)


def _jpeg(data: bytes) -> ImageHeader | None:
    at = 2
    while data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        if 0xC0 <= marker <= 0xCF and marker not in _JPEG_NOT_FRAMES:
            bits, height, width, components = struct.unpack_from(">BHHB", data, at + 4)
            return ImageHeader("jpeg", height, width, 1 if components == 1 else 3, bits)
        at += 2 + struct.unpack_from(">H", data, at + 2)[0]
    return None


def _bmp(data: bytes) -> ImageHeader:
    (size,) = struct.unpack_from("<I", data, 14)
    form, at = ("<HH", 24) if size == 12 else ("<ii", 28)
    width, height = struct.unpack_from(form, data, 18)
    (bits,) = struct.unpack_from("<H", data, at)
    palette = bits <= 8
    return ImageHeader("bmp", abs(height), width, 1 if palette else 3, palette=palette)


def _webp(data: bytes) -> ImageHeader:
    form = data[12:16]
    if form == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        return ImageHeader("webp", height, width, 4 if data[20] & 0x10 else 3)
    if form == b"VP8L":
        (head,) = struct.unpack_from("<I", data, 21)
        width, height = (head & 0x3FFF) + 1, (head >> 14 & 0x3FFF) + 1
        return ImageHeader("webp", height, width, 4 if head >> 28 & 1 else 3)
    width, height = (value & 0x3FFF for value in struct.unpack_from("<HH", data, 26))
    return ImageHeader("webp", height, width, 3)
