"""Image codecs: decode JPEG with libjpeg-turbo, PNG, WebP and other formats with Pillow, to RGB or gray.

Law: decoding returns what was asked for or raises BadSampleError; a truncated file is never half an
image. At most MAX_PIXELS. EXIF orientation is ignored, alpha is dropped, CMYK becomes RGB. A JPEG can be
decoded at 1/2, 1/4 or 1/8 size and only down to some row; those rows equal the whole image's but for the
last two. Headers: ITU-T T.81, B.1.1 and B.2.2. Values as stored: see `stored_values`.
"""

from __future__ import annotations

import io
import re
import warnings
import zlib
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from meshd.transform.builtin.resample_window import resample_window
from meshd.transform.builtin.resize import CenterCropFloor, WindowOp
from meshd.transform.errors import BadSampleError
from meshd.transform.op_types import ImageSize
from meshwire.formats.image_headers import read_image_header

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from meshd.transform.builtin.resample_window import ResampleWindow
    from meshd.transform.op_types import FieldType
    from meshd.transform.registry import Operation
    from meshwire.formats.image_headers import ImageHeader
    from meshwire.plan.keyed_random import KeyedRandom

    Pixels = npt.NDArray[np.uint8]

CHROMA_MARGIN_ROWS = 2
"""Rows at the lower edge that differ from those of the whole image."""
_MARKER, _LENGTH = 2, 2
_FRAME_HEADERS = frozenset((0xC0, 0xC1))  # baseline and extended sequential, Huffman codes
_SCAN_HEADER = 0xDA
_PASSED_BY = frozenset((0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)))  # tables, restart interval, COM, APPn
_REST = re.compile(r"\d+ extraneous bytes before marker 0xd[0-79]\b")  # RST0-7, or the end of the image


def truncate_rows(jpeg: bytes, height: int, at: int) -> bytes:
    """Return the file with `height` rows in its header: at least one, fewer than it has.

    `at`: the result of `find_height_offset`.
    """
    parts = memoryview(jpeg)
    return b"".join((parts[:at], height.to_bytes(2, "big"), parts[at + 2 :]))


def is_trailing_data_warning(complaint: str) -> bool:
    """Return whether a decoder's first warning is that codes follow the last row, and a marker after them."""
    return _REST.search(complaint) is not None


def find_height_offset(jpeg: bytes) -> int | None:
    """Return the offset of the height in the frame header.

    None unless the rows follow each other in a single scan, the only one that a decoder reads: for a file
    with several scans, or none, or with markers of rarer processes before the first.
    """
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


Mode = Literal["rgb", "gray"]
MAX_PIXELS = 1 << 26  # 67 megapixels, 200 MB as RGB: the limit for one sample
MAX_SCANS = 200  # limit for a progressive JPEG: a scan is a pass over the whole image, however few its bytes
_MANY_PIXELS = 1 << 20
_MOST_WORK = 1 << 28  # limit of pixels times scans for a smaller image
_WORTHWHILE = 16  # minimum of rows to skip; with fewer, skipping saves nothing
FORMATS = ("PNG", "WEBP", "JPEG", "GIF", "BMP", "TIFF")
JPEG = b"\xff\xd8\xff"
NOT_AN_IMAGE = "not a JPEG, PNG, WebP, GIF, BMP or TIFF file"
_PNG = b"\x89PNG\r\n\x1a\n"

Image.MAX_IMAGE_PIXELS = None  # our own bound is checked before a pixel is decoded
# The bad sample reports a problem of a file once, with its name; a log could be filled by the file.
warnings.filterwarnings("ignore", module=r"PIL\.")


class JpegHead(msgspec.Struct, frozen=True):
    """The header of a JPEG: size in pixels as stored; `colorspace` as libjpeg-turbo names it.

    `rows_at`: the offset of the height in the file, if its rows follow each other in one scan.
    """

    height: int
    width: int
    colorspace: str
    rows_at: int | None


def read_jpeg_head(data: bytes) -> JpegHead:
    """Read the header of a JPEG.

    Raises BadSampleError if it is not a JPEG, too large, or designed to keep a decoder busy.
    """
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError as error:
        raise BadSampleError(f"not a readable JPEG: {error}") from error
    check_pixels(height, width)
    rows_at = find_height_offset(data)
    if rows_at is None:
        _check_scans(data, height * width)
    return JpegHead(height, width, colorspace, rows_at)


def _check_scans(data: bytes, pixels: int) -> None:
    most = MAX_SCANS if pixels > _MANY_PIXELS else max(MAX_SCANS, _MOST_WORK // pixels)
    # numpy counts a byte in a few microseconds, which suffices for every file that is not an attack.
    halves = np.count_nonzero(np.frombuffer(data, np.uint8) == 0xDA)
    if halves > most and data.count(b"\xff\xda") > most:
        raise BadSampleError(f"a JPEG with more than {MAX_SCANS} scans is not decoded")


def check_pixels(height: int, width: int) -> None:
    """Raises BadSampleError for an image without pixels, or with more than MAX_PIXELS."""
    if height < 1 or width < 1 or height * width > MAX_PIXELS:
        raise BadSampleError(f"an image of {width}×{height} pixels; at most {MAX_PIXELS} are decoded")


def decode_jpeg(data: bytes, head: JpegHead, mode: Mode, shrink: int = 1) -> Pixels:
    """Decode to [h, w, channels] at 1/`shrink` of the size, rounded up. Raises BadSampleError."""
    if head.colorspace in ("CMYK", "YCCK"):  # libjpeg-turbo converts neither
        return decode_other(data, mode)
    height, width = -(-head.height // shrink), -(-head.width // shrink)
    try:
        decoded: Pixels = simplejpeg.decode_jpeg(
            data, "RGB" if mode == "rgb" else "GRAY", min_height=height, min_width=width, min_factor=shrink
        )
    except ValueError as error:
        raise BadSampleError(f"a damaged JPEG: {error}") from error
    return decoded


def decode_jpeg_rows(data: bytes, head: JpegHead, mode: Mode, rows: int, shrink: int = 1) -> Pixels:
    """Decode like `decode_jpeg`, but only the first `rows` rows: [`rows` or more, w, channels].

    Damage below them may go unnoticed, truncation does not. Raises BadSampleError.
    """
    height = (rows + CHROMA_MARGIN_ROWS) * shrink
    if head.rows_at is None or height + _WORTHWHILE > head.height or head.colorspace in ("CMYK", "YCCK"):
        return decode_jpeg(data, head, mode, shrink)
    made: Pixels = np.empty(
        (rows + CHROMA_MARGIN_ROWS, -(-head.width // shrink), 3 if mode == "rgb" else 1), np.uint8
    )
    try:
        simplejpeg.decode_jpeg(
            truncate_rows(data, height, head.rows_at),
            "RGB" if mode == "rgb" else "GRAY",
            min_height=made.shape[0],
            min_width=made.shape[1],
            min_factor=shrink,
            buffer=made,
        )
    except ValueError as error:
        if not is_trailing_data_warning(str(error)):
            return decode_jpeg(data, head, mode, shrink)  # which reports the damage, or finds none
    return made


def decode_other(data: bytes, mode: Mode, *, clip: bool = False) -> Pixels:
    """Decode any other format to [h, w, channels].

    16-bit gray is divided by 256. `clip`: floats and 32-bit integers are clipped, as decode did before its
    version 3, instead of refused. Raises BadSampleError.
    """
    if data[: len(_PNG)] == _PNG:
        check_png(data)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            check_pixels(opened.height, opened.width)
            if not clip:
                _check_range(opened, data)
            if opened.format == "TIFF" and (header := read_image_header(data)) is not None:
                check_planes(header)
            # Pillow's own conversion of 16 bits a sample would clip instead of scale.
            picture: Image.Image = opened
            if opened.mode == "I;16B":  # which Pillow's `point` does not take
                picture = Image.fromarray((np.asarray(opened) >> 8).astype(np.uint8))
            elif opened.mode.startswith("I"):
                picture = opened.point(lambda value: value / 256).convert("L")
            array = np.asarray(picture.convert("RGB" if mode == "rgb" else "L"))
    except (BadSampleError, MemoryError):
        raise
    except UnidentifiedImageError as error:
        header = read_image_header(data)
        if header is not None and (header.kind == "float" or header.bits > 16):
            raise _no_range(header.dtype) from error
        if header is not None:
            raise BadSampleError(unsupported_form(header)) from error
        raise BadSampleError(NOT_AN_IMAGE) from error
    except Exception as error:  # Pillow's plugins raise many types for hostile bytes; all mean a bad file
        raise BadSampleError(f"not a readable image: {type(error).__name__}: {error}") from error
    return array if array.ndim == 3 else array[:, :, None]


def described_values(dtype: str, channels: int) -> str:
    """Return what a pixel is made of, in words."""
    return f"{channels} {'channel' if channels == 1 else 'channels'} of {dtype}"


def unsupported_form(header: ImageHeader) -> str:
    """Return what is said of an image that its decoder does not take."""
    found = described_values(header.dtype, header.channels)
    return f"a {header.format.upper()} with {found} in a form that is not supported"


def check_planes(header: ImageHeader) -> None:
    """Raises BadSampleError for planes of more than 8 bits, which neither Pillow nor OpenCV reads right."""
    if header.planar and header.bits > 8:
        raise BadSampleError(
            f"a TIFF of {header.bits} bits a value with its {header.channels} channels one after the other "
            "(PlanarConfiguration 2): store them interleaved"
        )


def _check_range(opened: Image.Image, data: bytes) -> None:
    # Earlier releases of Pillow open 16-bit PNG as "I", too.
    if opened.mode == "F" or (opened.mode == "I" and opened.format != "PNG"):
        header = read_image_header(data)
        raise _no_range(header.dtype if header else {"F": "float32", "I": "int32"}[opened.mode])


def _no_range(dtype: str) -> BadSampleError:
    return BadSampleError(
        f'an image of {dtype} has no range that 0…255 could stand for: decode it with mode "unchanged", then '
        "normalize or cast it"
    )


def check_png(data: bytes) -> None:
    """Verify the checksum of every chunk; Pillow does not verify chunks that hold pixels."""
    at = len(_PNG)
    while True:
        body = at + 8 + int.from_bytes(data[at : at + 4], "big")
        if body + 4 > len(data):
            raise BadSampleError("a truncated PNG")
        if zlib.crc32(memoryview(data)[at + 4 : body]) != int.from_bytes(data[body : body + 4], "big"):
            raise BadSampleError("a damaged PNG: the checksum of a chunk is wrong")
        if data[at + 4 : at + 8] == b"IEND":
            return
        at = body + 4


def decode(data: bytes, mode: Mode, *, clip: bool = False) -> Pixels:
    """Decode an image file to uint8 [h, w, channels]; `clip`: see `decode_other`. Raises BadSampleError."""
    if data[:3] == JPEG:
        return decode_jpeg(data, read_jpeg_head(data), mode)
    return decode_other(data, mode, clip=clip)


def fuse_window(
    mode: Mode,
    following: Operation,
    decode_rows: Callable[[bytes, JpegHead, Mode, int, int], Pixels],
    *,
    clip: bool,
) -> Operation | None:
    """Return decode fused with the op that follows, or None if that keeps no window of the image."""
    if isinstance(following, WindowOp) and not isinstance(following, CenterCropFloor):
        return _WindowedDecode(mode, following, decode_rows, partial(decode_other, clip=clip))
    return None


def decode_all_rows(data: bytes, head: JpegHead, mode: Mode, rows: int, shrink: int) -> Pixels:
    """Decode like `decode_jpeg_rows`, but the whole image."""
    return decode_jpeg(data, head, mode, shrink)


class _OpenedImage(msgspec.Struct, frozen=True):
    """An image file whose size is known. `pixels`: the whole image, for a file that is not decoded at a
    smaller size; `head`: the header of a JPEG that is."""

    size: ImageSize
    data: bytes
    head: JpegHead | None
    pixels: Pixels | None


class _WindowedDecode(msgspec.Struct, frozen=True):
    """decode, fused with the window op that follows: it shrinks while decoding if the window allows.

    `decode_rows`: (JPEG, header, mode, rows of the shrunk image to keep, shrink) → pixels; `decode_other`:
    for other formats.
    """

    mode: Mode
    windowing: WindowOp
    decode_rows: Callable[[bytes, JpegHead, Mode, int, int], Pixels]
    decode_other: Callable[[bytes, Mode], Pixels]

    def infer(self, field: FieldType) -> FieldType:
        raise NotImplementedError("types are inferred op by op, before fusing")

    def apply(self, value: bytes, random: KeyedRandom) -> npt.NDArray[Any]:
        opened = self.open(value)
        window, shrink = self.choose_window(opened.size, random)
        return resample_window(self.decode_window(opened, window, shrink), window, shrink)

    def open(self, value: bytes) -> _OpenedImage:
        """See `WindowedDecoder.open`."""
        head = read_jpeg_head(value) if value[:3] == JPEG else None
        if head is None or head.colorspace in ("CMYK", "YCCK"):
            pixels = self.decode_other(value, self.mode)
            return _OpenedImage(
                ImageSize(pixels.shape[0], pixels.shape[1], scales=False), value, None, pixels
            )
        return _OpenedImage(ImageSize(head.height, head.width, scales=True), value, head, None)

    def choose_window(self, size: ImageSize, random: KeyedRandom) -> tuple[ResampleWindow, int]:
        """See `WindowedDecoder.choose_window`."""
        window: ResampleWindow = self.windowing.window(size.height, size.width, random)
        return window, window.shrink() if size.scales else 1

    def needed_rows(self, window: ResampleWindow, shrink: int) -> tuple[int, int]:
        """See `WindowedDecoder.needed_rows`."""
        return window.first_row(shrink), window.rows(shrink)

    def decode_window(self, opened: _OpenedImage, window: ResampleWindow, shrink: int) -> Pixels:
        """See `WindowedDecoder.decode_window`."""
        if opened.head is None:
            return self.decode_whole(opened, shrink)
        return self.decode_rows(opened.data, opened.head, self.mode, window.rows(shrink), shrink)

    def decode_whole(self, opened: _OpenedImage, shrink: int) -> Pixels:
        """See `WindowedDecoder.decode_whole`."""
        if opened.head is None:
            assert opened.pixels is not None
            return opened.pixels
        return decode_jpeg(opened.data, opened.head, self.mode, shrink)

    def cut(self, rows: Pixels, window: ResampleWindow, shrink: int, first: int) -> npt.NDArray[Any]:
        """See `WindowedDecoder.cut`."""
        return resample_window(rows, window, shrink, first)
