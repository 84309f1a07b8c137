"""Values of an image file as stored: palette indices, 16-bit integers, floats, two to four channels.

Law: the values of the file, or BadSampleError; nothing is scaled, clipped or converted to colors. Files of
more than 8 bits a channel with several channels are decoded by OpenCV, everything else by Pillow. CMYK in a
JPEG becomes RGB, as YCbCr does. Files with many images give their first one.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from PIL import Image, UnidentifiedImageError

from meshd.transform.builtin.image_codecs import (
    FORMATS,
    NOT_AN_IMAGE,
    check_pixels,
    check_planes,
    check_png,
    decode_jpeg,
    described_values,
    read_jpeg_head,
    unsupported_form,
)
from meshd.transform.errors import BadSampleError
from meshwire.formats.image_headers import read_image_header

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshwire.formats.image_headers import ImageHeader

_MOST_CHANNELS = 4
_BIG_ENDIAN_TIFF = b"MM"
"""Of which Pillow swaps the bytes of compressed values that are in order."""

cv2.utils.logging.setLogLevel(0)  # the bad sample reports the problem


def read_header(data: bytes) -> ImageHeader:
    """Return the header of an image file. Raises BadSampleError."""
    header = read_image_header(data)
    if header is None:
        raise BadSampleError(NOT_AN_IMAGE)
    check_pixels(header.height, header.width)
    return header


def stored_type(data: bytes) -> tuple[str, int]:
    """Return dtype and channels of an image file. Raises BadSampleError, also for more channels than are
    decoded."""
    header = read_header(data)
    if header.channels > _MOST_CHANNELS:
        raise BadSampleError(
            f"an image with {described_values(header.dtype, header.channels)}: at most {_MOST_CHANNELS} are "
            "decoded; store more as arrays (.npy, Zarr)"
        )
    return header.dtype, header.channels


def decode_indices(data: bytes) -> npt.NDArray[np.uint8]:
    """Decode a mask to uint8 [h, w, 1]: the indices of a palette image, the values of a gray one.

    Raises BadSampleError.
    """
    header = read_header(data)
    if header.format == "jpeg":
        raise BadSampleError("a JPEG stores colors, with loss, and no indices: store masks as PNG")
    if header.dtype != "uint8" or header.channels != 1:
        what = described_values(header.dtype, header.channels)
        raise BadSampleError(f'an image with {what} has no indices: decode it with mode "rgb" or "unchanged"')
    return _check(_by_pillow(data, header), header, "uint8", 1)


def decode_unchanged(data: bytes, dtype: str, channels: int) -> npt.NDArray[Any]:
    """Decode to [h, w, `channels`] of `dtype`, the values as stored; of a palette image, its indices.

    Raises BadSampleError, also if the file stores another dtype or another number of channels.
    """
    header = read_header(data)
    if (header.dtype, header.channels) != (dtype, channels):
        raise BadSampleError(
            f"the image has {described_values(header.dtype, header.channels)}, the plan says "
            f"{described_values(dtype, channels)}"
        )
    check_planes(header)
    if header.format == "jpeg":
        found: Any = decode_jpeg(data, read_jpeg_head(data), "gray" if channels == 1 else "rgb")
    elif header.bits <= 8 or (channels == 1 and dtype != "float64" and not data.startswith(_BIG_ENDIAN_TIFF)):
        found = _by_pillow(data, header)
    else:
        found = _by_opencv(data, header)
    return _check(found, header, dtype, channels)


def _check(found: npt.NDArray[Any], header: ImageHeader, dtype: str, channels: int) -> npt.NDArray[Any]:
    if found.ndim == 2:
        found = found[:, :, None]
    if found.shape != (header.height, header.width, channels) or found.dtype != dtype:
        raise BadSampleError(unsupported_form(header))
    return found


def _by_pillow(data: bytes, header: ImageHeader) -> npt.NDArray[Any]:
    if header.format == "png":
        check_png(data)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            check_pixels(opened.height, opened.width)
            picture = opened.convert("RGB") if opened.mode == "YCbCr" else opened
            found = np.asarray(picture)
    except (BadSampleError, MemoryError):
        raise
    except UnidentifiedImageError as error:
        raise BadSampleError(unsupported_form(header)) from error
    except Exception as error:  # Pillow's plugins raise many types for hostile bytes; all mean a bad file
        raise BadSampleError(f"not a readable image: {type(error).__name__}: {error}") from error
    if found.dtype == bool:
        return found.astype(np.uint8)
    if header.bits < 8 and not header.palette:
        return found // np.uint8(255 // ((1 << header.bits) - 1))  # Pillow scales them to 0…255
    # A 32-bit unsigned or 16-bit signed integer is an int32 in Pillow, with the same bits.
    same = found.dtype.kind == header.dtype[0] or (found.dtype.kind in "iu" and header.kind != "float")
    return found.astype(header.dtype) if same else found


def _by_opencv(data: bytes, header: ImageHeader) -> npt.NDArray[Any]:
    if header.format == "png":
        check_png(data)
    try:
        found: Any = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error as error:
        raise BadSampleError(f"not a readable image: {error.err or error.code}") from error
    if found is None:
        raise BadSampleError("not a readable image, or one that is cut off")
    values: npt.NDArray[Any] = found if found.ndim == 3 else found[:, :, None]
    if header.channels == 2:  # gray and alpha, which OpenCV gives as blue, green, red and alpha
        return np.ascontiguousarray(values[:, :, ::3])
    return (
        values
        if values.shape[2] == 1
        else np.ascontiguousarray(values[:, :, [2, 1, 0, 3][: header.channels]])
    )
