"""`mesh.open_dicom`: series of DICOM files as volumes, or windows of their slices, as samples.

Law: the snapshot is prepared here from the files' headers; nodes decode the slices. Slices
are in the order of their places along the normal of their planes. What would be a guess (places that repeat
unevenly) is left out with a warning.
"""

from __future__ import annotations

import io
import logging
import math
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from meshsdk.arrays.prepared_snapshot import PreparedSnapshot, column, keep, labels_by_folder, open_prepared
from meshsdk.arrays.stored_chunks import INLINE, Objects
from meshsdk.client.gather import Item
from meshsdk.datasets.fields import check_source
from meshsdk.errors import ConfigurationError, NotFoundError
from meshsdk.ops.array_ops import frombuffer
from meshsdk.ops.medical_ops import dicom_volume
from meshwire.dataset.fields import MAX_PIECES, FieldSpec, parse_source

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from meshsdk.client.s3_client import Client
    from meshsdk.datasets.dataset import Dataset
    from meshwire.dataset.snapshot import BytesColumn, LabelColumn

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
    for entry, data in _fetch_data(client, bucket, entries, _HEAD):
        found = _slice(data, entry, whole=len(data) >= entry[1])
        if found is None and len(data) < entry[1] and data[128:132] == b"DICM":
            long.append(entry)
        elif found is not None:
            yield found
    for entry, data in _fetch_data(client, bucket, long, None):  # headers of more than _HEAD bytes
        found = _slice(data, entry, whole=True)
        if found is not None:
            yield found


def _fetch_data(
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
            "mesh.open_dicom needs pydicom, here and on the nodes, to read headers: "
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


_MISSING = -1


def open_dicom(
    url: str,
    *,
    slices: int | None = None,
    stride: int | None = None,
    values: Literal["modality", "stored", "display"] = "modality",
    window: tuple[float, float] | None = None,
    label: bool = False,
    index: str | None = None,
    client: Client | None = None,
    deadline: float | None = None,
) -> Dataset:
    """Open series of DICOM files as volumes: fields `volume` [slices, height, width, 1] and `affine` [4, 4].

    A volume is the files of one folder and series that have one size and orientation, sorted by their places
    in the patient. Files with several frames, with colours, or without pixels are left out. The ops on images
    apply to all slices alike. `affine` leads from (slice, row, column) to mm in the patient, x to the left, y
    to the back, z up, as DICOM has it. The name of a sample is its folder.

    Arguments:
        url: a folder, with folders below it, such as "s3://ct/train".
        slices: consecutive slices of a sample, such as 3. Default: a sample is a whole series.
        stride: distance of the first slices of samples. Default: `slices`.
        values, window: as in `ops.decode_dicom`.
        label: whether the first folder below `url` is a class: a field `label`.
        index: folder to store the places of the slices in. Default: beside `url`, which needs the right to
            write there. A later call with the same content and options uses what is there.
        client, deadline: as in `mesh.open`.

    Needs pydicom here and on the nodes (`shardmesh[medical]`). Reads the first 32 KiB of each file. Raises
    ConfigurationError, NotFoundError (no series), and as `mesh.open` does.

    Example:
        ds = mesh.open_dicom("s3://ct/train", label=True).map(ops.resize("volume", [256, 256]))
    """
    from meshsdk.client.s3_client import connect

    load_library()
    client = client or connect()
    source, objects = parse_source(check_source(url)), Objects()
    entries = [
        (entry.key, entry.size, objects.add(source.bucket, entry.key, entry.etag, entry.size))
        for entry in client.list(source.bucket, source.prefix)
        if entry.size > 132
    ]
    series = group_series(read_slices(client, source.bucket, entries), source.prefix)
    if slices is not None:
        series = [each for each in series if len(each.slices) >= slices]
    if not series:
        raise NotFoundError(f"there is no series of DICOM images of one frame in {source}")
    if (slices is not None and slices < 1) or (stride is not None and (slices is None or stride < 1)):
        raise ConfigurationError(
            f"slices={slices}, stride={stride}: both must be at least 1, and stride needs slices"
        )
    windows = [
        (number, first)
        for number, each in enumerate(series)
        for first in ([0] if slices is None else range(0, len(each.slices) - slices + 1, stride or slices))
    ]
    slots = slices or max(len(each.slices) for each in series)
    if slots > MAX_PIECES:
        raise ConfigurationError(f"a series of {slots} slices; at most {MAX_PIECES}: pass slices=")
    lengths = {slices or len(each.slices) for each in series}
    rows, columns = ({getattr(each.slices[0], side) for each in series} for side in ("rows", "columns"))
    dtype = {"modality": "float32", "display": "uint8"}.get(values) or _one_dtype(series)
    with tempfile.TemporaryFile() as headers:
        affines = [keep(headers, _affine(series[number], first)) for number, first in windows]
        table = np.full((len(windows), slots), _MISSING, np.int64)
        places = np.zeros((len(windows), slots), np.int64)
        for at, (number, first) in enumerate(windows):
            for slot, each in enumerate(series[number].slices[first : first + (slices or slots)]):
                places[at, slot], table[at, slot] = each.object, each.size
        start = keep(headers, table.astype("<i8").tobytes())
        own = start + 8 * slots * np.arange(len(windows), dtype=np.int64)
        here = np.full(len(windows), INLINE, np.int64)
        fields: dict[str, BytesColumn | LabelColumn] = {
            "affine": column(here, np.array(affines), np.full(len(windows), 128)),
            "volume": column(here, own, np.full(len(windows), 8 * slots)),
        }
        specs = {name: FieldSpec(name, "bytes", ext=("dcm",)) for name in fields}
        for slot in range(slots):
            there, name = table[:, slot] != _MISSING, f"volume__{slot:04}"
            fields[name] = column(
                np.where(there, places[:, slot], INLINE),
                np.where(there, 0, own),
                np.where(there, table[:, slot], 8),  # no place is empty
            )
            specs[name] = FieldSpec(name, "bytes", piece_of="volume")
        names = [
            series[at].name if slices is None else f"{series[at].name},slice={first}" for at, first in windows
        ]
        if label:
            labels, more = labels_by_folder(names)
            fields.update(labels)
            specs.update(more)
        order = np.array([number for number, _ in windows], np.int64)
        samples = PreparedSnapshot(fields, specs, names, order)
        dataset = open_prepared(client, index, source, headers, objects, samples, deadline)
    size = [sides.pop() if len(sides) == 1 else None for sides in (rows, columns)]
    every = lengths.pop() if len(lengths) == 1 else None
    return dataset.map(
        dicom_volume("volume", slots, slices=every, size=size, values=values, window=window, dtype=dtype),
        frombuffer("affine", "float64", shape=[4, 4]),
    )


def _one_dtype(series: list[Series]) -> str:
    found = {each.slices[0].dtype for each in series}
    if len(found) > 1:
        raise ConfigurationError(
            f"values='stored': series are of {', '.join(sorted(found))}; take 'modality'"
        )
    return found.pop()


def _affine(series: Series, first: int) -> bytes:
    affine = series.affine()
    affine[:3, 3] += affine[:3, 0] * first
    return affine.astype("<f8").tobytes()
