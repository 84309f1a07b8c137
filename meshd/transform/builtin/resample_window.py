"""Resampling of images: windows of the full-size image, and the filters that resample them.

Law: a window follows from the full-size height and width alone, so a decoder can produce less than the whole
image. uint8 is resampled in integers, so machines agree to the bit; in float32 the last bits differ between
x86-64 and arm64. The filters "bilinear", "bicubic" and "box" are Pillow's, antialiased when they shrink, to
the bit. "nearest" takes pixels as they are. "fast" is our own (OpenCV fixed point, IPP off): halve an axis by
2-pixel means while it is at least twice the target (doubling an odd last row or column, as libjpeg does),
blur with a 3-tap Gaussian of σ = ½√(r²-1) if the ratio r is above 1.15, then resample bilinearly with aligned
pixel centres.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import cv2
import msgspec
import numpy as np
from PIL import Image as Pictures

from meshd.transform.builtin.portable_pixels import linear_resize
from meshd.transform.image_annotations import Motion

if TYPE_CHECKING:
    import numpy.typing as npt

    Image = npt.NDArray[Any]

Filter = Literal["bilinear", "bicubic", "box", "nearest", "fast"]

# "fast" is closer to Pillow's bilinear filter than INTER_AREA, at a third of INTER_AREA's time (0.22 instead
# of 0.65 ms from 314² to 224²).
BLUR_ABOVE = 1.15
SHRINKS = (8, 4, 2)

cv2.setNumThreads(1)  # the pool's processes provide the parallelism
cv2.ipp.setUseIPP(False)  # its results differ between CPUs


class ResampleWindow(msgspec.Struct, frozen=True):
    """A rectangle of the full-size image, in pixels, and the size it is resampled to.

    `filter`: only "fast" takes an image that was shrunk while it was decoded.
    """

    top: int
    left: int
    height: int
    width: int
    out_height: int
    out_width: int
    filter: Filter = "fast"

    def motion(self) -> Motion:
        """Return where the content of the image goes."""
        across, down = self.out_width / self.width, self.out_height / self.height
        return Motion(
            self.out_height,
            self.out_width,
            xx=across,
            x0=-self.left * across,
            yy=down,
            y0=-self.top * down,
        )

    def shrink(self) -> int:
        """Return the largest of 8, 4, 2 by which the image can be shrunk before cropping, or 1."""
        for factor in SHRINKS if self.filter == "fast" else ():
            if self.height >= factor * self.out_height and self.width >= factor * self.out_width:
                return factor
        return 1

    def first_row(self, shrink: int) -> int:
        """Return the first row of the image, shrunk by `shrink`, that the window needs."""
        return (self.top + shrink // 2) // shrink

    def rows(self, shrink: int) -> int:
        """Return how many rows of the image, shrunk by `shrink`, the window needs, from the top."""
        return (self.top + self.height + shrink // 2) // shrink


def pixels(image: Image) -> Image:
    """Restore the channel axis, which OpenCV drops from gray images."""
    return image[:, :, None] if image.ndim == 2 else image


def resample_window(image: Image, window: ResampleWindow, shrink: int = 1, first: int = 0) -> Image:
    """Return the window of `image`, which was shrunk by `shrink` from the size the window is measured in.

    `first`: the row of the shrunk image that `image` begins with.
    """
    half = shrink // 2  # edges move to the nearest pixel of the shrunk image
    left, right = (window.left + half) // shrink, (window.left + window.width + half) // shrink
    kept = image[window.first_row(shrink) - first : window.rows(shrink) - first, left:right]
    if kept.shape[:2] == (window.out_height, window.out_width):
        return kept
    if window.filter == "fast":
        return resample(kept, window.out_height, window.out_width)
    return resample_as_pillow(kept, window.out_height, window.out_width, window.filter)


RESAMPLED = frozenset({"uint8", "uint16", "int32", "float32"})
"""The dtypes that the filters other than "nearest" and "fast" take."""
_PILLOW = {
    "bilinear": Pictures.Resampling.BILINEAR,
    "bicubic": Pictures.Resampling.BICUBIC,
    "box": Pictures.Resampling.BOX,
}
# Channels are independent: as RGBA, Pillow would weight the colors by the fourth.
_MODES = {3: "RGB", 4: "CMYK"}


def resample_as_pillow(image: Image, height: int, width: int, filter: Filter) -> Image:
    """Return `image` ([h, w, channels]) resampled to [height, width] as Pillow's `Image.resize` does.

    dtypes: RESAMPLED, with "nearest" any.
    """
    if filter == "nearest":
        return pixels(cv2.resize(image, (width, height), interpolation=cv2.INTER_NEAREST_EXACT))
    how, channels = _PILLOW[filter], image.shape[2]
    mode = _MODES.get(channels) if image.dtype == np.uint8 else None
    if mode is None:
        planes = [_resize_plane(image[:, :, number], height, width, how) for number in range(channels)]
        return planes[0][:, :, None] if channels == 1 else np.stack(planes, axis=2)
    picture = Pictures.frombuffer(mode, image.shape[1::-1], np.ascontiguousarray(image), "raw", mode, 0, 1)
    return np.asarray(picture.resize((width, height), how))


def _resize_plane(plane: Image, height: int, width: int, how: Pictures.Resampling) -> Image:
    # Pillow has no 16-bit filters that round; a float32 holds every uint16, and its sums are exact enough.
    wide = plane.dtype == np.uint16
    picture = Pictures.fromarray(np.ascontiguousarray(plane, np.float32 if wide else None))
    made = np.asarray(picture.resize((width, height), how))
    return np.clip(np.floor(made + 0.5), 0, 65535).astype(np.uint16) if wide else made


def resample(image: Image, height: int, width: int) -> Image:
    """Return `image` ([h, w, channels] uint8) resampled to [height, width].

    The result is a view or the image itself if nothing changes.
    """
    image = _halve(image, height, width)
    rows, columns = image.shape[:2]
    if (rows, columns) == (height, width):
        return image
    sigma_y, sigma_x = _sigma(rows / height), _sigma(columns / width)
    if sigma_y or sigma_x:
        taps = 3 if sigma_x else 1, 3 if sigma_y else 1
        image = pixels(cv2.GaussianBlur(image, taps, sigmaX=sigma_x or 1.0, sigmaY=sigma_y or 1.0))
    return linear_resize(image, height, width)


def _halve(image: Image, height: int, width: int) -> Image:
    while True:
        rows, columns = image.shape[:2]
        by_y, by_x = 2 if rows >= 2 * height else 1, 2 if columns >= 2 * width else 1
        if by_y == by_x == 1:
            return image
        odd_y, odd_x = rows % by_y, columns % by_x
        if odd_y or odd_x:
            image = pixels(cv2.copyMakeBorder(image, 0, odd_y, 0, odd_x, cv2.BORDER_REPLICATE))
        image = (
            _rows_halved(image) if by_x == 1 else _columns_halved(image) if by_y == 1 else _halve_image(image)
        )


def _halve_image(image: Image) -> Image:
    rows, columns = image.shape[:2]
    return pixels(cv2.resize(image, (columns // 2, rows // 2), interpolation=cv2.INTER_AREA))


# For one axis, INTER_AREA computes the same means, with halves rounded to even, but in scalar code: 0.34 ms
# for 460×300, instead of 0.04 (rows) and 0.13 (columns).


def _rows_halved(image: Image) -> Image:
    return pixels(cv2.addWeighted(image[::2], 0.5, image[1::2], 0.5, 0.0))


def _columns_halved(image: Image) -> Image:
    rows, columns = image.shape[:2]
    means = np.empty_like(image)  # means of each pixel and the next one; every other mean is used
    cv2.addWeighted(image[:, :-1], 0.5, image[:, 1:], 0.5, 0.0, means[:, :-1])
    return pixels(cv2.resize(means, (columns // 2, rows), interpolation=cv2.INTER_NEAREST))


def _sigma(ratio: float) -> float:
    return 0.5 * math.sqrt(ratio * ratio - 1.0) if ratio > BLUR_ABOVE else 0.0
