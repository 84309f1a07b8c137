"""`mesh.open_slides`: windows of a level of tiled TIFF files, such as pathology slides, as samples.

Law: the snapshot is prepared here from the files' directories; nodes read and decode the tiles that a window
touches, never a whole file. Directories are read by ranges, with tifffile, and never pixels. What nodes
cannot decode is refused here, by name.
"""

from __future__ import annotations

import base64
import io
import json
import tempfile
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshsdk.arrays.prepared_snapshot import PreparedSnapshot, column, keep, labels_by_folder, open_prepared
from meshsdk.arrays.stored_chunks import INLINE, Objects
from meshsdk.datasets.fields import check_source
from meshsdk.errors import ConfigurationError, NotFoundError
from meshsdk.ops.medical_ops import slide_window
from meshwire.dataset.fields import FieldSpec, parse_source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshsdk.client.s3_client import Client
    from meshsdk.datasets.dataset import Dataset
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
            "mesh.open_slides needs tifffile to read TIFF directories: pip install 'shardmesh[medical]'"
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
            return _describe_level(levels[level], url)
    except (ValueError, IndexError, KeyError, library.TiffFileError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"{url} is not a readable TIFF file: {error}") from error


def _describe_level(level: Any, url: str) -> SlideLevel:
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
        name = getattr(page.compression, "name", page.compression)
        return f"its tiles are compressed with {name}; JPEG, JPEG 2000, WebP, deflate and none are read"
    return ""


_MISSING = -1
MAX_TILES = 1024


def open_slides(
    url: str,
    window: int | tuple[int, int],
    *,
    level: int = 0,
    stride: int | tuple[int, int] | None = None,
    places: Mapping[str, Sequence[tuple[int, int]]] | None = None,
    label: bool = False,
    index: str | None = None,
    client: Client | None = None,
    deadline: float | None = None,
) -> Dataset:
    """Open windows of slides (SVS, OME-TIFF, any tiled TIFF): a field `image`, uint8 [height, width, 3].

    The tiles that a window touches are read by ranges and decoded on the nodes; the files are never read
    whole. The name of a sample is the slide's, with the place of the window: `a/17.svs,y=0,x=512`.

    Arguments:
        url: a folder of slides, with folders below it.
        window: pixels of the level: a side, or (height, width).
        level: of the pyramid: 0 is the largest, -1 the smallest.
        stride: distance of windows, down and across. Default: the window's size. Windows that would go beyond
            the edge are left out.
        places: instead of all windows, (top, left) of those of each slide, by its key below `url`, such as
            those with tissue, or around annotations. Slides that are not named are left out.
        label: whether the first folder below `url` is a class: a field `label`.
        index: folder to store the places of the tiles in. Default: beside `url`, which needs the right to
            write there. A later call with the same content and options uses what is there.
        client, deadline: as in `mesh.open`.

    Needs tifffile (`shardmesh[medical]`). Raises ConfigurationError, also for files that nodes cannot decode;
    NotFoundError (no windows), and as `mesh.open` does.

    Example:
        ds = mesh.open_slides("s3://slides/train", 256, level=1, label=True).map(ops.hflip("image"))
    """
    from meshsdk.client.s3_client import connect

    load_library()
    client = client or connect()
    height, width = (window, window) if isinstance(window, int) else window
    steps = (height, width) if stride is None else (stride, stride) if isinstance(stride, int) else stride
    if min(height, width, *steps) < 1:
        raise ConfigurationError(f"window={window}, stride={stride}: all must be at least 1")
    source, objects = parse_source(check_source(url)), Objects()
    found: list[tuple[str, int, SlideLevel, Integers]] = []
    for entry in client.list(source.bucket, source.prefix):
        name = entry.key.removeprefix(source.prefix)
        if not name.lower().endswith(ENDINGS) or (places is not None and name not in places):
            continue
        file = RangeFile(client, source.bucket, entry.key, entry.size, entry.etag)
        slide = read_level(file, level, f"s3://{source.bucket}/{entry.key}")
        corners = _corners(name, slide, (height, width), steps, None if places is None else places[name])
        if len(corners):
            number = objects.add(source.bucket, entry.key, entry.etag, entry.size)
            found.append((name, number, slide, corners))
    if not found:
        raise NotFoundError(f"there are no windows of {height}×{width} of {', '.join(ENDINGS)} in {source}")
    channels = {slide.channels for _, _, slide, _ in found}
    if len(channels) > 1:
        raise ConfigurationError("slides of 1 and of 3 channels: open them separately")
    slots = max(
        _grid(slide, corners, (height, width))[1].prod(axis=1).max() for _, _, slide, corners in found
    )
    if slots > MAX_TILES:
        raise ConfigurationError(f"a window of {slots} tiles; at most {MAX_TILES}: take a smaller one")
    with tempfile.TemporaryFile() as headers:
        tables = [
            _places(number, slide, corners, (height, width), int(slots), keep(headers, slide.description))
            for _, number, slide, corners in found
        ]
        header, objs, offsets, lengths = (np.concatenate(parts) for parts in zip(*tables, strict=True))
        start = keep(headers, header.astype("<i8").tobytes())
        size = 8 * header.shape[1]
        own = start + size * np.arange(len(header), dtype=np.int64)
        columns = {"image": column(np.full(len(header), INLINE), own, np.full(len(header), size))}
        specs = {"image": FieldSpec("image", "bytes", ext=("tif",))}
        for slot in range(objs.shape[1]):
            there, name = lengths[:, slot] != _MISSING, f"image__{slot:04}"
            columns[name] = column(
                np.where(there, objs[:, slot], INLINE),
                np.where(there, offsets[:, slot], own),
                np.where(there, lengths[:, slot], 8),  # no place is empty
            )
            specs[name] = FieldSpec(name, "bytes", piece_of="image")
        names = [
            f"{name},y={top},x={left}" for name, _, _, corners in found for top, left in corners.tolist()
        ]
        fields, more = labels_by_folder(names) if label else ({}, {})
        first = np.repeat([number for _, number, _, _ in found], [len(corners) for *_, corners in found])
        samples = PreparedSnapshot({**columns, **fields}, specs | more, names, first)
        dataset = open_prepared(client, index, source, headers, objects, samples, deadline)
    return dataset.map(slide_window("image", int(slots), [height, width], channels=channels.pop()))


def _corners(
    name: str,
    slide: SlideLevel,
    size: tuple[int, int],
    steps: tuple[int, int],
    places: Sequence[tuple[int, int]] | None,
) -> Integers:
    """Return (top, left) of the windows, int64[n, 2]. Raises ConfigurationError."""
    extents = (slide.height, slide.width)
    if places is None:
        axes = [
            np.arange(0, extent - length + 1, step)
            for extent, length, step in zip(extents, size, steps, strict=True)
        ]
        return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2).astype(np.int64)
    given = np.array(places, np.int64).reshape(-1, 2)
    if given.size and ((given < 0).any() or (given + size > extents).any()):
        raise ConfigurationError(f"places of {name!r}: a window lies outside of {extents[0]}×{extents[1]}")
    return given


def _grid(slide: SlideLevel, corners: Integers, size: tuple[int, int]) -> tuple[Integers, Integers]:
    """Return the first tile of each window and the number of tiles, down and across: int64[n, 2] each."""
    first = corners // slide.tile
    return first, (corners + size - 1) // slide.tile - first + 1


def _places(
    number: int, slide: SlideLevel, corners: Integers, size: tuple[int, int], slots: int, described: int
) -> tuple[Integers, Integers, Integers, Integers]:
    """Return the headers of the windows, and (objects, offsets, lengths) of their parts: the description of
    the level, then the tiles."""
    first, counts = _grid(slide, corners, size)
    slot = np.arange(slots)
    across = counts[:, 1:]
    rows, columns = first[:, :1] + slot // across, first[:, 1:] + slot % across
    wanted = slot < counts.prod(axis=1, keepdims=True)
    tiles = np.where(wanted, rows * slide.across + columns, 0)
    lengths = np.where(wanted & (slide.lengths[tiles] > 0), slide.lengths[tiles], _MISSING)
    one = np.ones((len(corners), 1), np.int64)
    lengths = np.hstack([one * len(slide.description), lengths])
    header = np.hstack([corners - first * slide.tile, counts, lengths])
    objects = np.hstack([one * INLINE, np.full((len(corners), slots), number)])
    return header, objects, np.hstack([one * described, slide.offsets[tiles]]), lengths
