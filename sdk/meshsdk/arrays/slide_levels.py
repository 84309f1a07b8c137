"""Levels of tiled TIFF files, such as pathology slides: where their tiles are, read by ranges with tifffile.

Law: directories are read, never pixels. What nodes cannot decode is refused here, by name.
"""

from __future__ import annotations

import base64
import io
import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from meshsdk.client.s3_client import Client
    from meshwire.frame.columns import Integers

ENDINGS: Final = (".svs", ".tif", ".tiff", ".ndpi", ".scn", ".bif", ".btf", ".tf8")
_BLOCK, _KEPT = 1 << 16, 64
_COMPRESSIONS: Final = (1, 7, 8, 32946, 34712, 33005, 50001)


class RangeFile(io.RawIOBase):
    """An object as a file that is read in blocks, of which some are kept."""

    def __init__(self, client: Client, bucket: str, key: str, size: int, etag: str) -> None:
        super().__init__()
        self._client, self._place, self._size, self._etag = client, (bucket, key), size, etag
        self._at, self._blocks = 0, OrderedDict[int, bytes]()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        number, inside = divmod(self._at, _BLOCK)
        if self._at >= self._size:
            return 0
        part = self._block(number)[inside : inside + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            length = min(_BLOCK, self._size - number * _BLOCK)
            self._blocks[number] = self._client.get(
                *self._place, offset=number * _BLOCK, length=length, etag=self._etag
            )
            if len(self._blocks) > _KEPT:
                self._blocks.popitem(last=False)
        return self._blocks[number]


@dataclass(frozen=True, slots=True)
class SlideLevel:
    """A level of a slide: its size and that of its tiles in pixels; `offsets`, `lengths`: of the tiles,
    int64[down · across], a length of 0 for a tile that is not stored; `description`: for the nodes."""

    height: int
    width: int
    channels: int
    tile: tuple[int, int]
    offsets: Integers
    lengths: Integers
    description: bytes

    @property
    def across(self) -> int:
        return -(-self.width // self.tile[1])


def load_library() -> Any:
    """Return the module `tifffile`. Raises ConfigurationError."""
    try:
        import tifffile
    except ImportError as error:
        raise ConfigurationError(
            "mesh.open_slides reads directories with tifffile: pip install 'shardmesh[medical]'"
        ) from error
    return tifffile


def read_level(file: io.RawIOBase, level: int, url: str) -> SlideLevel:
    """Return a level; negative numbers count from the smallest. Raises ConfigurationError."""
    library = load_library()
    try:
        with library.TiffFile(io.BufferedReader(file, 1 << 14), name=url) as opened:
            levels = opened.series[0].levels
            if not -len(levels) <= level < len(levels):
                raise ConfigurationError(f"{url} has {len(levels)} levels; there is no level {level}")
            return _described(levels[level], url)
    except (ValueError, IndexError, KeyError, library.TiffFileError) as error:
        raise ConfigurationError(f"{url} is not a readable TIFF file: {error}") from error


def _described(level: Any, url: str) -> SlideLevel:
    page = level.keyframe
    problem = _problem(level, page)
    if problem:
        raise ConfigurationError(f"{url}: {problem}")
    height, width = level.shape[:2]
    channels = page.samplesperpixel
    found = {
        "height": page.tilelength, "width": page.tilewidth, "channels": channels,
        "compression": int(page.compression), "photometric": int(page.photometric),
        "predictor": int(page.predictor), "tables": base64.b64encode(page.jpegtables or b"").decode(),
    }  # fmt: skip
    return SlideLevel(
        height, width, channels, (page.tilelength, page.tilewidth),
        np.array(level.pages[0].dataoffsets, np.int64), np.array(level.pages[0].databytecounts, np.int64),
        json.dumps(found, sort_keys=True).encode(),
    )  # fmt: skip


def _problem(level: Any, page: Any) -> str:
    """Return why nodes cannot read the level, "" if they can."""
    if not page.is_tiled:
        return "the level is not tiled"
    if level.axes not in ("YX", "YXS") or level.dtype != np.uint8 or int(page.planarconfig) != 1:
        return f"{level.axes} of {level.dtype}; levels of uint8 [y, x] and [y, x, channels] are read"
    if page.samplesperpixel not in (1, 3):
        return f"{page.samplesperpixel} channels; 1 and 3 are read"
    if int(page.compression) not in _COMPRESSIONS or int(page.predictor) not in (1, 2):
        return f"the compression {page.compression!r} is not read; JPEG, JPEG 2000, WebP and deflate are"
    return ""
