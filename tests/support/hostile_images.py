"""Image files made to hurt: small bytes, large claims. Each is a bad sample, whatever reads it."""

from __future__ import annotations

import io
import struct
import zlib
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

_ZEROS = 64 << 20


def encoded(form: str, width: int = 64, height: int = 48, **options: Any) -> bytes:
    """A harmless file."""
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, form, **options)
    return out.getvalue()


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_of(
    width: int, height: int, pixels: bytes, *chunks: bytes, bits: int = 8, interlaced: int = 0
) -> bytes:
    """A PNG with these packed pixels, whatever its header claims; `chunks` come before them."""
    head = struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, interlaced)
    parts = (png_chunk(b"IHDR", head), *chunks, png_chunk(b"IDAT", pixels), png_chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def jpeg_claiming(width: int, height: int, data: bytes) -> bytes:
    """A JPEG whose frame header says another size."""
    found, at = bytearray(data), 2
    while found[at + 1] not in (0xC0, 0xC1, 0xC2):
        at += 2 + int.from_bytes(found[at + 2 : at + 4], "big")
    found[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(found)


def jpeg_scanned(data: bytes, times: int) -> bytes:
    """A progressive JPEG whose last scan is there `times` more often."""
    last = data[data.rfind(b"\xff\xda") : -2]
    return data[:-2] + last * times + b"\xff\xd9"


def gif_claiming(width: int, height: int, *, frame: bool) -> bytes:
    """A GIF whose screen, or whose first frame, says another size."""
    found = bytearray(encoded("GIF", 8, 8))
    at = found.index(b",\0\0\0\0") + 5 if frame else 6
    found[at : at + 4] = struct.pack("<HH", width, height)
    return bytes(found)


def bmp_claiming(width: int, height: int) -> bytes:
    found = encoded("BMP", 8, 8)
    return found[:18] + struct.pack("<ii", width, height) + found[26:]


def tiff_of(*changes: tuple[int, int, int, int], pixels: bytes = b"") -> bytes:
    """A deflated grey TIFF of 8×8, with these (tag, type, count, value) put in or in the place of others."""
    packed = pixels or zlib.compress(bytes(64))
    tags = {tag: (3, 1, value) for tag, value in ((256, 8), (257, 8), (258, 8), (259, 8), (262, 1), (277, 1))}
    tags |= {278: (4, 1, 8), 279: (4, 1, len(packed))}
    tags |= {tag: (kind, count, value) for tag, kind, count, value in changes}
    tags[273] = (4, 1, 8 + 2 + 12 * (len(tags) + (273 not in tags)) + 4)
    entries = b"".join(struct.pack("<HHII", tag, *rest) for tag, rest in sorted(tags.items()))
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + struct.pack("<I", 0) + packed


def webp_canvas(width: int, height: int) -> bytes:
    """An animation of one small frame on a large canvas."""
    still = encoded("WEBP", 16, 16, lossless=True)[12:]
    size = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    frame = bytes(6) + struct.pack("<I", 15)[:3] * 2 + struct.pack("<I", 100)[:3] + b"\0" + still
    body = b"WEBP" + b"VP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + size
    body += b"ANIM" + struct.pack("<I", 6) + bytes(6) + b"ANMF" + struct.pack("<I", len(frame)) + frame
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes((data[at] ^ 0x55,)) + data[at + 1 :]


@cache
def hostile_images() -> dict[str, bytes]:
    """By name; none is larger than a few hundred kilobytes."""
    zeros, small = zlib.compress(bytes(_ZEROS), 9), zlib.compress(bytes(8 * 25))
    text = b"k\0\0" + zeros
    jpeg, progressive = encoded("JPEG"), encoded("JPEG", progressive=True)
    flat = io.BytesIO()
    Image.new("RGB", (1024, 1024)).save(flat, "JPEG", progressive=True)
    found = {
        "png-pixels": png_of(60000, 60000, zlib.compress(bytes(1000))),
        "png-just-over": png_of(8193, 8192, zeros),
        "png-text": png_of(8, 8, small, png_chunk(b"zTXt", text)),
        "png-international-text": png_of(8, 8, small, png_chunk(b"iTXt", b"k\0\1\0\0\0" + zeros)),
        "png-profile": png_of(8, 8, small, png_chunk(b"iCCP", text)),
        "png-interlaced-short": png_of(4000, 4000, small, interlaced=1),
        "png-checksum": _flipped(encoded("PNG"), 400),
        "jpeg-pixels": jpeg_claiming(65500, 65500, jpeg),
        "jpeg-claims-more": jpeg_claiming(2000, 2000, jpeg),
        "jpeg-scans": jpeg_scanned(flat.getvalue(), 3000),
        "jpeg-scans-of-a-small-one": jpeg_scanned(progressive, 100_000)[: 1 << 22],
        "jpeg-empty": b"\xff\xd8\xff\xd9",
        "webp-canvas": webp_canvas(16383, 16383),
        "gif-canvas": gif_claiming(65535, 65535, frame=False),
        "gif-frame": gif_claiming(65535, 65535, frame=True),
        "bmp-pixels": bmp_claiming(60000, 60000),
        "bmp-claims-more": bmp_claiming(4000, 4000),
        "tiff-pixels": tiff_of((256, 4, 1, 60000), (257, 4, 1, 60000)),
        "tiff-samples": tiff_of((277, 3, 1, 65535)),
        "tiff-tag-beyond-the-end": tiff_of((279, 4, 0x0FFFFFF0, 8)),
        "tiff-damaged": tiff_of(pixels=zlib.compress(bytes(64))[:-9]),
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"/>',
        "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\nshowpage\n",
        "nothing": b"",
    }
    for form in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):
        whole = encoded(form)
        found[f"{form.lower()}-truncated"] = whole[: len(whole) * 2 // 3]
    return found
