"""`mesh.open_dicom`: series of DICOM files as volumes, or windows of their slices, as samples.

Law: the snapshot is prepared here from the files' headers; nodes decode the slices.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Literal

import numpy as np

from meshsdk.arrays.dicom_series import group_series, load_library, read_slices
from meshsdk.arrays.prepared_samples import PreparedSamples, column, keep, labels_by_folder, open_prepared
from meshsdk.arrays.stored_chunks import INLINE, Objects
from meshsdk.datasets.fields import check_source
from meshsdk.errors import ConfigurationError, NotFoundError
from meshsdk.ops.array_ops import frombuffer
from meshsdk.ops.medical_ops import dicom_volume
from meshwire.dataset.fields import MAX_PIECES, FieldSpec, parse_source

if TYPE_CHECKING:
    from meshsdk.arrays.dicom_series import Series
    from meshsdk.client.s3_client import Client
    from meshsdk.datasets.dataset import Dataset
    from meshwire.dataset.snapshot import BytesColumn, LabelColumn

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
            f"slices={slices}, stride={stride}: both at least 1, stride with slices alone"
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
        samples = PreparedSamples(fields, specs, names, order)
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
