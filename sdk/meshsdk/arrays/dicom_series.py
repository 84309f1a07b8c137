"""Series of DICOM files: which files form a volume, in which order, and where it lies in the patient.

Law: slices are in the order of their places along the normal of their planes. What would be a guess (places
that repeat unevenly) is left out with a warning.
"""

from __future__ import annotations

import io
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshsdk.client.gather import Item
from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from meshsdk.client.s3_client import Client

_log = logging.getLogger("meshsdk")
_HEAD: Final = 1 << 15
_TAGS: Final = [
    "SeriesInstanceUID", "InstanceNumber", "ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing",
    "Rows", "Columns", "NumberOfFrames", "SamplesPerPixel", "SliceThickness", "SpacingBetweenSlices",
    "BitsAllocated", "PixelRepresentation",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Slice:
    """A file of a series. `object`: its number; `spacing`: of rows and of columns, in mm; `orientation`: the
    directions of a row and of a column, `position`: of the first pixel, both None if the file lacks
    them; `dtype`: as stored."""

    object: int
    size: int
    folder: str
    series: str
    number: int
    rows: int
    columns: int
    spacing: tuple[float, float]
    thickness: float
    orientation: tuple[float, ...] | None
    position: tuple[float, ...] | None
    dtype: str

    @property
    def place(self) -> float:
        """Along the normal of its plane, in mm; its number if the file does not say."""
        if self.orientation is None or self.position is None:
            return float(self.number)
        return float(np.dot(np.cross(self.orientation[:3], self.orientation[3:]), self.position))


@dataclass(frozen=True, slots=True)
class Series:
    """The slices of a volume, in order. `affine`: float64[4, 4], from (slice, row, column) to mm in the
    patient (x to the left, y to the back, z up, as DICOM has it)."""

    name: str
    slices: tuple[Slice, ...]

    def affine(self) -> npt.NDArray[np.float64]:
        first, last = self.slices[0], self.slices[-1]
        found = np.eye(4)
        orientation = first.orientation or (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
        found[:3, 2] = np.array(orientation[:3]) * first.spacing[1]
        found[:3, 1] = np.array(orientation[3:]) * first.spacing[0]
        normal = np.cross(orientation[:3], orientation[3:])
        if first.position is not None:
            found[:3, 3] = first.position
        if len(self.slices) > 1 and first.position is not None and last.position is not None:
            steps = len(self.slices) - 1
            found[:3, 0] = (np.array(last.position) - np.array(first.position)) / steps
        else:
            found[:3, 0] = normal * first.thickness
        return found


def read_slices(client: Client, bucket: str, entries: Sequence[tuple[str, int, int]]) -> Iterator[Slice]:
    """Yield what the headers of files say, for those that are images of one frame; `entries`: (key, size,
    number of the object). Raises ConfigurationError."""
    long = list[tuple[str, int, int]]()
    for entry, data in _fetched(client, bucket, entries, _HEAD):
        found = _slice(data, entry, whole=len(data) >= entry[1])
        if found is None and len(data) < entry[1] and data[128:132] == b"DICM":
            long.append(entry)
        elif found is not None:
            yield found
    for entry, data in _fetched(client, bucket, long, None):  # headers of more than _HEAD bytes
        found = _slice(data, entry, whole=True)
        if found is not None:
            yield found


def _fetched(
    client: Client, bucket: str, entries: Sequence[tuple[str, int, int]], most: int | None
) -> Iterator[tuple[tuple[str, int, int], bytes]]:
    items = (
        Item(bucket, key, None, 0, size if most is None else min(most, size)) for key, size, _ in entries
    )
    for entry, got in zip(entries, client.gather(items), strict=True):
        if got.error is not None:
            raise got.error
        yield entry, bytes(got.data)


def load_library() -> Any:
    """Return the module `pydicom`. Raises ConfigurationError."""
    try:
        import pydicom
    except ImportError as error:
        raise ConfigurationError(
            "mesh.open_dicom reads headers with pydicom, here and on the nodes: "
            "pip install 'shardmesh[medical]'"
        ) from error
    return pydicom


def _slice(data: bytes, entry: tuple[str, int, int], *, whole: bool) -> Slice | None:
    """Return what a header says; None if it is not an image of one frame, or not complete."""
    key, size, number = entry
    try:
        file = load_library().dcmread(io.BytesIO(data), stop_before_pixels=True, specific_tags=_TAGS)
        if "Columns" not in file or "PixelRepresentation" not in file:
            return None
        if int(file.get("NumberOfFrames") or 1) != 1 or int(file.SamplesPerPixel) != 1:
            return None
        spacing = [float(each) for each in file.get("PixelSpacing") or (1.0, 1.0)]
        thickness = float(file.get("SpacingBetweenSlices") or file.get("SliceThickness") or 1.0)
        return Slice(
            number, size, key.rpartition("/")[0], str(file.get("SeriesInstanceUID") or ""),
            int(file.get("InstanceNumber") or 0), int(file.Rows), int(file.Columns),
            (spacing[0], spacing[1]), thickness, _numbers(file, "ImageOrientationPatient", 6),
            _numbers(file, "ImagePositionPatient", 3),
            f"{'int' if file.PixelRepresentation else 'uint'}{int(file.BitsAllocated)}",
        )  # fmt: skip
    except ConfigurationError:
        raise
    except Exception:  # the parser of a foreign format; nodes tell about files that are damaged
        if whole:
            _log.warning("%s is not a readable DICOM file: left out", key)
        return None


def _numbers(file: Any, name: str, count: int) -> tuple[float, ...] | None:
    found = file.get(name)
    if found is None or len(found) != count:
        return None
    numbers = tuple(float(each) for each in found)
    return numbers if all(map(math.isfinite, numbers)) else None


def group_series(slices: Iterable[Slice], prefix: str) -> list[Series]:
    """Return the volumes: files of one folder, series, size and orientation, sorted by place.

    If every place occurs k times (phases, echoes), these are k volumes, in the order of their numbers.
    """
    groups: dict[tuple[Any, ...], list[Slice]] = {}
    for each in slices:
        turned = None if each.orientation is None else tuple(round(one, 3) for one in each.orientation)
        key = (each.folder, each.series, each.rows, each.columns, turned, each.dtype, each.position is None)
        groups.setdefault(key, []).append(each)
    by_folder: dict[str, list[list[Slice]]] = {}
    for key, group in sorted(groups.items(), key=lambda item: tuple(map(str, item[0]))):
        by_folder.setdefault(key[0], []).extend(_volumes(group))
    return [
        Series(_name(folder, prefix, number, len(volumes)), tuple(volume))
        for folder, volumes in sorted(by_folder.items())
        for number, volume in enumerate(volumes)
    ]


def _volumes(group: Sequence[Slice]) -> list[list[Slice]]:
    places: dict[float, list[Slice]] = {}
    for each in sorted(group, key=lambda each: (each.place, each.number)):
        places.setdefault(round(each.place, 3), []).append(each)
    counts = {len(found) for found in places.values()}
    if len(counts) > 1:
        _log.warning(
            "%s: series %s has several slices at some places, and not equally many at all: left out",
            group[0].folder, group[0].series,
        )  # fmt: skip
        return []
    gaps = np.diff(sorted(places))
    if gaps.size and gaps.max() > 1.5 * gaps.min():
        _log.warning(
            "%s: slices of series %s are %.3g…%.3g mm apart: some may be missing",
            group[0].folder, group[0].series, gaps.min(), gaps.max(),
        )  # fmt: skip
    return [[found[number] for found in places.values()] for number in range(counts.pop())]


def _name(folder: str, prefix: str, number: int, count: int) -> str:
    below = f"{folder}/".removeprefix(prefix).rstrip("/")
    return (below if count == 1 else f"{below}/{number}".lstrip("/")) or "0"
