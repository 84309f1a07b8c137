"""The op `slide_window`: a window of a tiled TIFF, such as a pathology slide, from the tiles that it touches.

Law: pixels are those that tifffile reads from the same place. A tile is decoded only if its own header has
the size that the file's directory says.
"""

from __future__ import annotations

import base64
import io
import json
import zlib
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from PIL import Image

from meshd.transform.builtin.image_codecs import decode_jpeg, read_jpeg_head
from meshd.transform.builtin.text import check_bytes
from meshd.transform.errors import BadSampleError
from meshd.transform.op_types import image
from meshd.transform.parameters import Parameter, size, whole
from meshd.transform.registry import operation

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshd.transform.op_types import FieldType
    from meshwire.plan.keyed_random import KeyedRandom

    Pixels = npt.NDArray[np.uint8]

MAX_TILES: Final = 1024
MAX_TILE: Final = 1 << 13
_MISSING: Final = -1
_HEAD: Final = 4
_JPEG, _NONE, _DEFLATE = 7, 1, (8, 32946)
_BY_PILLOW: Final = {34712: "JPEG2000", 33005: "JPEG2000", 50001: "WEBP"}
_RGB: Final = 2
_ADOBE_RGB: Final = b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0\0"


class _Tiles(msgspec.Struct, frozen=True):
    """How the tiles of a level are stored; numbers are those of TIFF's tags."""

    height: int
    width: int
    channels: int
    compression: int
    photometric: int
    predictor: int
    tables: bytes

    @classmethod
    def parse(cls, document: bytes) -> _Tiles:
        """Raises BadSampleError."""
        try:
            found = json.loads(document)
            names = ("height", "width", "channels", "compression", "photometric", "predictor")
            numbers = {name: int(found[name]) for name in names}
            made = cls(**numbers, tables=base64.b64decode(found["tables"]))
        except (ValueError, KeyError, TypeError) as error:
            raise BadSampleError(f"the description of a slide is damaged: {error}") from error
        if not (0 < made.height <= MAX_TILE and 0 < made.width <= MAX_TILE and made.channels in (1, 3)):
            raise BadSampleError(f"tiles of {made.height}×{made.width}×{made.channels}")
        return made

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.height, self.width, self.channels

    def decode(self, data: bytes) -> Pixels:
        """Return a tile, uint8 [height, width, channels]. Raises BadSampleError."""
        if self.compression == _JPEG:
            return self._jpeg(data)
        if self.compression in _BY_PILLOW:
            return self._image(data, _BY_PILLOW[self.compression])
        count = self.height * self.width * self.channels
        if self.compression in _DEFLATE:
            try:
                data = zlib.decompressobj().decompress(data, count + 1)
            except zlib.error as error:
                raise BadSampleError(f"a tile is damaged: {error}") from error
        elif self.compression != _NONE:
            raise BadSampleError(f"tiles of TIFF's compression {self.compression} are not read")
        if len(data) != count:
            raise BadSampleError(f"a tile of {len(data)} bytes, not {count}")
        found = np.frombuffer(data, np.uint8).reshape(self.shape)
        return np.cumsum(found, axis=1, dtype=np.uint8) if self.predictor == 2 else found

    def _jpeg(self, data: bytes) -> Pixels:
        if data[:2] != b"\xff\xd8":
            raise BadSampleError("a tile is not a JPEG")
        colours = _ADOBE_RGB if self.photometric == _RGB and self.channels == 3 else b""
        data = b"".join((data[:2], colours, self.tables[2:-2], data[2:]))
        head = read_jpeg_head(data)
        if (head.height, head.width) != self.shape[:2]:
            raise BadSampleError(f"a tile of {head.height}×{head.width}, not {self.height}×{self.width}")
        return decode_jpeg(data, head, "rgb" if self.channels == 3 else "gray")

    def _image(self, data: bytes, form: str) -> Pixels:
        try:
            with Image.open(io.BytesIO(data), formats=(form,)) as opened:
                found = opened.size
                if found == (self.width, self.height):  # nothing larger is decoded
                    made = np.asarray(opened.convert("RGB" if self.channels == 3 else "L"))
                    return made.reshape(self.shape)
        except Exception as error:  # the parser of a foreign format: whatever it raises, the file is at fault
            raise BadSampleError(f"a tile is not a readable {form}: {error}") from error
        raise BadSampleError(f"a tile of {found[1]}×{found[0]}, not {self.height}×{self.width}")


@operation(
    "slide_window",
    Parameter("slots", whole(1, MAX_TILES)),
    Parameter("size", size),
    Parameter("channels", whole(1, 3), 3),
    takes="bytes of a window, from a dataset of mesh.open_slides",
    gives="an image: uint8 [h, w, `channels`] of `size`",
    refuses="damaged tiles, tiles of another size than the file says, or of other compressions than JPEG, "
    "JPEG 2000, WebP, deflate and none",
)
class SlideWindow(msgspec.Struct, frozen=True):
    """A window of a level of a slide, put together from the tiles that it touches. `mesh.open_slides` adds
    it."""

    slots: int
    size: tuple[int, int]
    channels: int

    def infer(self, field: FieldType) -> FieldType:
        check_bytes(field)
        return image(*self.size, self.channels)

    def apply(self, value: bytes, random: KeyedRandom) -> Pixels:
        numbers = 8 * (_HEAD + 1 + self.slots)
        if len(value) < numbers:
            raise BadSampleError("the header of a window is damaged")
        top, left, down, across, *lengths = np.frombuffer(value[:numbers], "<i8").tolist()
        described, *sizes = lengths
        tiles = _Tiles.parse(value[numbers : numbers + max(0, described)])
        height, width = self.size
        fits = 0 <= top < tiles.height and 0 <= left < tiles.width and 0 < down * across <= self.slots
        if not fits or top + height > down * tiles.height or left + width > across * tiles.width:
            raise BadSampleError("the header of a window is damaged")
        if tiles.channels != self.channels:
            raise BadSampleError(f"a slide of {tiles.channels} channels, the plan says {self.channels}")
        made = np.zeros((height, width, self.channels), np.uint8)
        at = numbers + described
        for slot, length in enumerate(sizes[: down * across]):
            part = value[at : at + (8 if length == _MISSING else length)]
            at += len(part)
            if length != _MISSING:
                y = slot // across * tiles.height - top
                x = slot % across * tiles.width - left
                self._copy(made, tiles.decode(part), y, x)
        return made

    def _copy(self, made: Pixels, tile: Pixels, y: int, x: int) -> None:
        """Copy what the window shares with a tile whose upper left corner is at (y, x) of it."""
        height, width = made.shape[:2]
        rows = slice(max(0, y), min(height, y + tile.shape[0]))
        columns = slice(max(0, x), min(width, x + tile.shape[1]))
        made[rows, columns] = tile[rows.start - y : rows.stop - y, columns.start - x : columns.stop - x]
