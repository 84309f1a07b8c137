"""The op `encode`: JPEG with libjpeg-turbo, PNG and WebP with Pillow.

Law: the same pixels and arguments give the same file with one codec release, with nothing of the clock,
machine or source metadata.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import simplejpeg
from PIL import Image

from meshd.transform.errors import BadSampleError
from meshd.transform.op_types import BYTES, channels_of, check_image
from meshd.transform.parameters import Parameter, choice, flag, whole
from meshd.transform.registry import operation

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from meshd.transform.op_types import FieldType
    from meshwire.plan.keyed_random import KeyedRandom

Format = Literal["jpeg", "png", "webp"]
Subsampling = Literal["444", "422", "420"]
_MAX_SIDE: dict[Format, int] = {"jpeg": 65_500, "png": 1 << 24, "webp": 16_383}
_PNG_LEVEL = 6


@operation(
    "encode",
    Parameter("format", choice("jpeg", "png", "webp")),
    Parameter("quality", whole(1, 100), 90),
    Parameter("subsampling", choice("444", "422", "420"), "420"),
    Parameter("lossless", flag, False),
    takes="uint8 [h, w, 1 or 3]",
    gives="bytes of an image file",
    refuses="more pixels a side than the format supports: 65,500 (JPEG), 16,383 (WebP)",
)
class Encode(msgspec.Struct, frozen=True):
    """uint8 [height, width, 1 or 3] encoded as an image file. `quality` applies to JPEG and WebP,
    `subsampling` to the colors of JPEG, `lossless` to WebP. PNG is always lossless."""

    format: Format
    quality: int
    subsampling: Subsampling
    lossless: bool

    def infer(self, field: FieldType) -> FieldType:
        check_image(field)
        if channels_of(field) not in (1, 3):
            raise ValueError(f"encodes 1 or 3 channels, not {field}")
        if field.dtype != "uint8":
            raise ValueError(f"encodes uint8, not {field}; cast it first, or use to_npy")
        return BYTES

    def apply(self, value: npt.NDArray[np.uint8], random: KeyedRandom) -> bytes:
        longest = max(value.shape[:2])
        if longest > _MAX_SIDE[self.format]:
            raise BadSampleError(f"{self.format} supports at most {_MAX_SIDE[self.format]} pixels a side")
        if self.format == "jpeg":
            return self._jpeg(value)
        return self._by_pillow(value)

    def _jpeg(self, value: npt.NDArray[np.uint8]) -> bytes:
        gray = value.shape[2] == 1
        file: bytes = simplejpeg.encode_jpeg(
            value if value.flags["C_CONTIGUOUS"] else value.copy(),
            quality=self.quality,
            colorspace="GRAY" if gray else "RGB",
            colorsubsampling="Gray" if gray else self.subsampling,
            fastdct=False,
        )
        return file

    def _by_pillow(self, value: npt.NDArray[np.uint8]) -> bytes:
        picture = Image.fromarray(value[:, :, 0] if value.shape[2] == 1 else value)
        out = io.BytesIO()
        if self.format == "png":
            picture.save(out, "PNG", compress_level=_PNG_LEVEL)
        else:
            options: dict[str, Any] = {"lossless": self.lossless, "quality": self.quality, "method": 4}
            picture.save(out, "WEBP", **options)
        return out.getvalue()
