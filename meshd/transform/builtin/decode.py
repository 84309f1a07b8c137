"""The op `decode`: an image file to pixels, or to the values that it stores.

Law: fused with the window op that follows, the result is that of both, except that a JPEG is not decoded
below its window, and at a smaller size where the filter "fast" allows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from meshd.transform.builtin.image_codecs import decode, decode_all_rows, decode_jpeg_rows, fuse_window
from meshd.transform.builtin.stored_values import decode_indices, decode_unchanged, stored_type
from meshd.transform.op_types import image
from meshd.transform.parameters import Parameter, choice, dtype_or_none, whole_or_none
from meshd.transform.registry import operation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from meshd.transform.builtin.image_codecs import Mode, Pixels
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
class DecodeWhole(msgspec.Struct, frozen=True):
    """Version 1: a JPEG is decoded whole; floats and 32-bit integers are clipped to 0…255."""

    mode: Mode

    def infer(self, field: FieldType) -> FieldType:
        _require_bytes(field)
        return image(None, None, 3 if self.mode == "rgb" else 1)

    def apply(self, value: bytes, random: KeyedRandom) -> Pixels:
        return decode(value, self.mode, clip=True)

    def fuse(self, following: Operation) -> Operation | None:
        return fuse_window(self.mode, following, decode_all_rows, clip=True)


@operation("decode", _MODE, version="2")
class DecodeRows(DecodeWhole, frozen=True):
    """Version 2: a JPEG is not decoded below the window that the next op keeps."""

    def fuse(self, following: Operation) -> Operation | None:
        return fuse_window(self.mode, following, decode_jpeg_rows, clip=True)


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
class Decode(msgspec.Struct, frozen=True):
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
        stored, count = stored_type(first())
        return {"dtype": stored, "channels": count, **args}

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
        return fuse_window(self.mode, following, decode_jpeg_rows, clip=False)
