"""`mesh.open_slides`: windows of a level of tiled TIFF files, such as pathology slides, as samples.

Law: the snapshot is prepared here from the files' directories; nodes read and decode the tiles that a window
touches, never a whole file.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

import numpy as np

from meshsdk.arrays.prepared_samples import PreparedSamples, column, keep, labels_by_folder, open_prepared
from meshsdk.arrays.slide_levels import ENDINGS, RangeFile, load_library, read_level
from meshsdk.arrays.stored_chunks import INLINE, Objects
from meshsdk.datasets.fields import check_source
from meshsdk.errors import ConfigurationError, NotFoundError
from meshsdk.ops.medical_ops import slide_window
from meshwire.dataset.fields import FieldSpec, parse_source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshsdk.arrays.slide_levels import SlideLevel
    from meshsdk.client.s3_client import Client
    from meshsdk.datasets.dataset import Dataset
    from meshwire.frame.columns import Integers

_MISSING, _HEAD = -1, 5
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
        raise ConfigurationError(f"window={window}, stride={stride}: all at least 1")
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
        samples = PreparedSamples({**columns, **fields}, specs | more, names, first)
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
