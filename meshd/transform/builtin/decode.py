"""The op `decode`: an image file to pixels, or to the values that it stores.

Law: fused with the window op that follows, the result is that of both, except that a JPEG is not decoded
below its window, and at a smaller size where the filter "fast" allows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from meshd.transform.builtin.image_codecs import (
    JPEG,
    decode,
    decode_jpeg,
    decode_jpeg_rows,
    decode_other,
    read_jpeg_head,
)
from meshd.transform.builtin.resample_window import resample_window
from meshd.transform.builtin.resize import CenterCropFloor, WindowOp
from meshd.transform.builtin.stored_values import decode_indices, decode_unchanged, read_header
from meshd.transform.op_types import ImageSize, image
from meshd.transform.parameters import Parameter, choice, dtype_or_none, whole_or_none
from meshd.transform.registry import operation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from meshd.transform.builtin.image_codecs import JpegHead, Mode, Pixels
    from meshd.transform.builtin.resample_window import ResampleWindow
    from meshd.transform.op_types import FieldType
    from meshd.transform.registry import Operation
    from meshwire.plan.keyed_random import KeyedRandom

_MODE = Parameter("mode", choice("rgb", "gray"), "rgb")
_TAKES = "bytes of a JPEG, PNG, WebP, GIF, BMP or TIFF file"
_MORE = "over 67 megapixels; more scans or text than an image needs"


def _require_bytes(field: FieldType) -> None:
    if field.kind != "bytes":
        raise ValueError(f"needs the source's bytes, not {field}; make it the first op")


@operation("decode", _MODE)
@dataclass(frozen=True, slots=True)
class DecodeWhole:
    """Version 1: a JPEG is decoded whole; floats and 32-bit integers are clipped to 0…255."""

    mode: Mode

    def infer(self, field: FieldType) -> FieldType:
        _require_bytes(field)
        return image(None, None, 3 if self.mode == "rgb" else 1)

    def apply(self, value: bytes, random: KeyedRandom) -> Pixels:
        return decode(value, self.mode, clip=True)

    def fuse(self, following: Operation) -> Operation | None:
        return _fused(self.mode, following, _whole, clip=True)


@operation("decode", _MODE, version="2")
class DecodeRows(DecodeWhole):
    """Version 2: a JPEG is not decoded below the window that the next op keeps."""

    __slots__ = ()

    def fuse(self, following: Operation) -> Operation | None:
        return _fused(self.mode, following, decode_jpeg_rows, clip=True)


@operation(
    "decode",
    Parameter("mode", choice("rgb", "gray", "index", "unchanged"), "rgb"),
    Parameter("dtype", dtype_or_none, None),
    Parameter("channels", whole_or_none(1, 4), None),
    version="3",
    takes=_TAKES,
    gives='uint8 [h, w, 3]; [h, w, 1] with `mode` "gray" or "index"; `dtype` [h, w, `channels`] with '
    '"unchanged"',
    refuses="not such a file, truncated, or damaged within the rows that the next window op needs; floats, "
    "and "
    '32-bit integers, unless "unchanged"; a file without indices ("index"); another dtype or number of '
    "channels "
    f'("unchanged"); {_MORE}',
)
@dataclass(frozen=True, slots=True)
class Decode:
    """An image file decoded to uint8 [height, width, channels]: 3 channels, or 1 with mode "gray". "index":
    the class numbers of a mask, which are the indices of a palette image or the values of a gray one.
    "unchanged": the values as stored, such as 16-bit integers or floats; without `dtype` and `channels`, a
    plan takes them from the dataset's first sample. A JPEG is not decoded below the window that the next op
    keeps."""

    mode: Literal["rgb", "gray", "index", "unchanged"]
    dtype: str | None
    channels: int | None

    @staticmethod
    def complete(args: Mapping[str, Any], first: Callable[[], bytes]) -> dict[str, Any]:
        """Return the arguments, for mode "unchanged" with dtype and channels of the first sample unless
        given.

        Raises BadSampleError.
        """
        if args.get("mode") != "unchanged" or ("dtype" in args and "channels" in args):
            return dict(args)
        header = read_header(first())
        return {"dtype": header.dtype, "channels": header.channels, **args}

    def infer(self, field: FieldType) -> FieldType:
        _require_bytes(field)
        if self.mode != "unchanged":
            if (self.dtype, self.channels) != (None, None):
                raise ValueError('dtype and channels are arguments of the mode "unchanged"')
            return image(None, None, 3 if self.mode == "rgb" else 1)
        if self.dtype is None or self.channels is None:
            raise ValueError('the mode "unchanged" needs dtype and channels here, such as "uint16" and 1')
        return image(None, None, self.channels, dtype=self.dtype)

    def apply(self, value: bytes, random: KeyedRandom) -> npt.NDArray[Any]:
        if self.mode == "index":
            return decode_indices(value)
        if self.mode == "unchanged":
            assert self.dtype is not None
            assert self.channels is not None
            return decode_unchanged(value, self.dtype, self.channels)
        return decode(value, self.mode)

    def fuse(self, following: Operation) -> Operation | None:
        if self.mode == "index" or self.mode == "unchanged":  # narrows the type
            return None
        return _fused(self.mode, following, decode_jpeg_rows, clip=False)


def _fused(
    mode: Mode,
    following: Operation,
    decode_rows: Callable[[bytes, JpegHead, Mode, int, int], Pixels],
    *,
    clip: bool,
) -> Operation | None:
    if isinstance(following, WindowOp) and not isinstance(following, CenterCropFloor):
        return _WindowedDecode(mode, following, decode_rows, partial(decode_other, clip=clip))
    return None


def _whole(data: bytes, head: JpegHead, mode: Mode, rows: int, shrink: int) -> Pixels:
    return decode_jpeg(data, head, mode, shrink)


@dataclass(frozen=True, slots=True)
class _OpenedImage:
    """An image file whose size is known. `pixels`: the whole image, for a file that is not decoded at a
    smaller size; `head`: the header of a JPEG that is."""

    size: ImageSize
    data: bytes
    head: JpegHead | None
    pixels: Pixels | None


@dataclass(frozen=True, slots=True)
class _WindowedDecode:
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
