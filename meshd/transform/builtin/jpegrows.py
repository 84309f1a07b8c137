"""The upper rows of a JPEG, without decoding what lies below them.

The height in the file's header is lowered: libjpeg decodes that many rows, then walks to the end-of-image
marker and warns of the codes it passes over. Law: the rows are byte for byte those of the whole image, except
the last two, in whose colours the row below may have a part. Whatever a decoder would do otherwise with such
a file is not tried: `height_at` gives None, and any other complaint is not `of_rest`.
ITU-T T.81, B.1.1 (markers) and B.2.2 (frame header).
"""

from __future__ import annotations

import re

MARGIN = 2
"""Rows at the lower edge that are not the whole image's."""
_MARKER, _LENGTH = 2, 2
_FRAME_HEADERS = frozenset((0xC0, 0xC1))  # baseline and extended sequential, Huffman codes
_SCAN_HEADER = 0xDA
_PASSED_BY = frozenset((0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)))  # tables, restart interval, COM, APPn
_REST = re.compile(r"\d+ extraneous bytes before marker 0xd[0-79]\b")  # RST0-7, or the end of the image


def shortened(jpeg: bytes, height: int, at: int) -> bytes:
    """The file with `height` rows in its header, at least one and fewer than it has. `at`: of `height_at`."""
    parts = memoryview(jpeg)
    return b"".join((parts[:at], height.to_bytes(2, "big"), parts[at + 2 :]))


def of_rest(complaint: str) -> bool:
    """Whether a decoder's first warning is that codes follow the last row, and a marker them."""
    return _REST.search(complaint) is not None


def height_at(jpeg: bytes) -> int | None:
    """Where the frame header has its height; None for a file whose rows do not follow each other in one scan,
    the only one that a decoder takes: with several scans, or none, or markers of rarer processes before the
    first."""
    at, found, components = 2, None, 0
    while at + 10 <= len(jpeg) and jpeg[at] == 0xFF:
        marker, body = jpeg[at + 1], at + _MARKER + _LENGTH
        if marker == _SCAN_HEADER:
            return found if jpeg[body] == components else None
        if marker in _FRAME_HEADERS and found is None:
            found, components = body + 1, jpeg[body + 5]
        elif marker not in _PASSED_BY:
            return None
        at += _MARKER + int.from_bytes(jpeg[at + _MARKER : body], "big")
    return None
