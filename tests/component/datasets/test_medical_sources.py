"""NIfTI and DICOM through a node: pairs of volumes, and series in the order of their places."""

from __future__ import annotations

import gzip
import io
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nibabel
import numpy as np
import pydicom
import pytest
import tifffile
from PIL import Image
from pydicom.data import get_testdata_file
from pydicom.uid import generate_uid

import meshsdk as mesh
from meshsdk import ops
from meshsdk.errors import ConfigurationError, NotFoundError
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.client.s3_client import Client

ROWS, COLUMNS = 24, 32


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        Daemon.start(args=("--transform-workers", "2")) as daemon,
        mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client,
    ):
        client.create_bucket("scans")
        yield client


def test_pairs_of_volumes_are_cut_alike(client: Client) -> None:
    random = np.random.default_rng(2)
    affine = np.diag([-2.0, 1.5, 3.0, 1.0])
    images = {}
    for number in range(6):
        voxels = random.integers(0, 500, (12, 10, 8 + number % 2)).astype(np.int16)
        images[number] = voxels
        mask = (voxels > 250).astype(np.uint8)
        for name, content in (("image", voxels), ("mask", mask)):
            data = nibabel.Nifti1Image(content, affine).to_bytes()
            client.put("scans", f"brain/case{number}.{name}.nii.gz", gzip.compress(data))
    fields = {"image": "image.nii.gz", "mask": "mask.nii.gz", "affine": "image.nii.gz"}
    ds = mesh.open("s3://scans/brain", fields=fields, client=client).map(
        ops.nifti("image", orient="RAS"),
        ops.nifti("mask", dtype="uint8", orient="RAS"),
        ops.nifti("affine", part="affine", orient="RAS"),
    )
    sample = ds[0]
    np.testing.assert_array_equal(sample["image"], images[0][::-1])
    np.testing.assert_array_equal(
        sample["affine"], affine @ [[-1, 0, 0, 11], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    )
    crops = ds.map(ops.over(("image", "mask"), ops.window, [8, 8, 8]))
    batch = mesh.Loader(crops, global_batch=6, seed=3).at(0)
    assert batch["image"].shape == (6, 8, 8, 8)
    np.testing.assert_array_equal(batch["image"] > 250, batch["mask"] == 1)


def slice_file(series: str, number: int, height: float, value: int, **more: Any) -> bytes:
    path = get_testdata_file("CT_small.dcm", download=False)
    assert isinstance(path, str)
    file = pydicom.dcmread(io.BytesIO(Path(path).read_bytes()))
    file.SeriesInstanceUID, file.SOPInstanceUID, file.InstanceNumber = series, generate_uid(), number
    file.Rows, file.Columns = ROWS, COLUMNS
    file.PixelData = np.full((ROWS, COLUMNS), value, np.int16).tobytes()
    file.ImageOrientationPatient, file.ImagePositionPatient = [1, 0, 0, 0, 1, 0], [-10, -20, height]
    file.PixelSpacing, file.RescaleSlope, file.RescaleIntercept = [0.5, 0.75], 2, -1000
    for name, given in more.items():
        setattr(file, name, given)
    out = io.BytesIO()
    file.save_as(out)
    return out.getvalue()


def store_series(client: Client, folder: str, count: int, step: float = 2.5) -> None:
    series = generate_uid()
    for number in range(count):  # file names and numbers are against the places
        data = slice_file(series, count - number, step * number, 100 + number)
        client.put("scans", f"{folder}/{(number * 7) % 10}-{number:02}.dcm", data)


def test_series_are_volumes_in_the_order_of_places(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    store_series(client, "ct/cat/one", 9)
    store_series(client, "ct/dog/two", 6)
    path = get_testdata_file("test-SR.dcm", download=False)
    assert isinstance(path, str)
    client.put("scans", "ct/dog/two/report.dcm", Path(path).read_bytes())
    client.put("scans", "ct/dog/readme.txt", b"not an image" * 20)
    with caplog.at_level(logging.WARNING):
        ds = mesh.open_dicom("s3://scans/ct", label=True, client=client)
    assert [message.message for message in caplog.records] == [
        "ct/dog/readme.txt is not a readable DICOM file: left out"
    ]
    assert len(ds) == 2
    assert ds.classes == ("cat", "dog")
    for sample, count, label in zip(ds, (9, 6), (0, 1), strict=True):
        assert sample["volume"].shape == (count, ROWS, COLUMNS, 1)
        assert sample["volume"][:, 3, 4, 0].tolist() == [2 * (100 + number) - 1000 for number in range(count)]
        assert sample["label"] == label
        affine = np.array([[0, 0, 0.75, -10], [0, 0.5, 0, -20], [2.5, 0, 0, 0], [0, 0, 0, 1.0]])
        np.testing.assert_allclose(sample["affine"], affine)
    small = ds.map(ops.resize("volume", [12, 16]), ops.hflip("volume"), ops.to_chw("volume"))
    batch = mesh.Loader(small, global_batch=2, seed=1).at(0)
    assert sorted(len(row) for row in batch["volume"]) == [6, 9]
    thick = mesh.open_dicom("s3://scans/ct", slices=3, stride=2, values="stored", client=client)
    assert len(thick) == 4 + 2
    assert thick[1]["volume"].dtype == np.int16
    assert thick[1]["volume"][:, 0, 0, 0].tolist() == [102, 103, 104]
    assert thick[1]["affine"][2, 3] == 5.0
    assert mesh.Loader(thick, global_batch=6, seed=1).at(0)["volume"].shape == (6, 3, ROWS, COLUMNS, 1)


def test_phases_are_volumes_and_guesses_are_left_out(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    series = generate_uid()
    for phase in range(2):
        for number in range(4):
            data = slice_file(series, 10 * phase + number, 2.0 * number, 10 * phase + number)
            client.put("scans", f"phases/{phase}-{number}.dcm", data)
    ds = mesh.open_dicom("s3://scans/phases", values="stored", client=client)
    assert [sample["volume"][:, 0, 0, 0].tolist() for sample in ds] == [[0, 1, 2, 3], [10, 11, 12, 13]]
    client.put("scans", "phases/more.dcm", slice_file(series, 30, 0.0, 1))
    with caplog.at_level(logging.WARNING), pytest.raises(NotFoundError, match="no series"):
        mesh.open_dicom("s3://scans/phases", client=client)
    assert "not equally many" in caplog.text
    with pytest.raises(ConfigurationError, match="stride"):
        mesh.open_dicom("s3://scans/ct", stride=2, client=client)


def slide(compression: str, *, photometric: str = "rgb", sub_ifds: bool = False) -> tuple[bytes, list[Any]]:
    """A pyramid of three levels; returns its bytes, and the levels as tifffile reads them."""
    draws = np.random.default_rng(8)
    whole = np.kron(draws.integers(0, 255, (19, 27, 3)), np.ones((16, 16, 1))).astype(np.uint8)
    out = io.BytesIO()
    with tifffile.TiffWriter(out, bigtiff=True) as writer:
        more: dict[str, Any] = {"predictor": True} if compression == "zlib" else {}
        for number in range(3):
            writer.write(
                whole[:: 1 << number, :: 1 << number], tile=(64, 48), photometric=photometric,
                compression=None if compression == "none" else compression,
                subifds=2 if number == 0 else 0, subfiletype=number > 0, **more,
            )  # fmt: skip
    with tifffile.TiffFile(io.BytesIO(out.getvalue())) as opened:
        return out.getvalue(), [level.asarray() for level in opened.series[0].levels]


def test_tiles_of_jpeg_are_decoded_in_their_colours(client: Client) -> None:
    """Of RGB in JPEG, as scanners of Aperio write it, and of YCbCr."""
    whole = np.kron(np.random.default_rng(8).integers(0, 255, (8, 12, 3)), np.ones((16, 16, 1))).astype(
        np.uint8
    )
    for photometric in ("rgb", "ycbcr"):
        tiles, wanted = [], np.empty_like(whole)
        for top, left in ((0, 0), (0, 64), (0, 128), (64, 0), (64, 64), (64, 128)):
            out, place = io.BytesIO(), (slice(top, top + 64), slice(left, left + 64))
            Image.fromarray(whole[place]).save(
                out, "JPEG", quality=95, subsampling=0, keep_rgb=photometric == "rgb"
            )
            wanted[place] = np.asarray(Image.open(out))
            jpeg = out.getvalue()
            if photometric == "rgb":  # only the directory says that it is RGB
                at = jpeg.index(b"\xff\xee")
                jpeg = jpeg[:at] + jpeg[at + 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big") :]
            tiles.append(jpeg)
        file = io.BytesIO()
        with tifffile.TiffWriter(file) as writer:
            writer.write(
                iter(tiles), shape=whole.shape, dtype=np.uint8, tile=(64, 64), photometric=photometric,
                compression="jpeg", subsampling=(1, 1) if photometric == "ycbcr" else None,
            )  # fmt: skip
        client.put("scans", f"jpeg-{photometric}/one.svs", file.getvalue())
        ds = mesh.open_slides(f"s3://scans/jpeg-{photometric}", (100, 150), client=client)
        np.testing.assert_array_equal(ds[0]["image"], wanted[:100, :150])


def test_windows_of_slides_are_those_of_tifffile(client: Client) -> None:
    levels = {}
    for name, form in {"a/one.tif": "none", "a/two.svs": "zlib", "b/three.tiff": "zlib"}.items():
        data, levels[name] = slide(form)
        client.put("scans", f"slides/{name}", data)
    ds = mesh.open_slides("s3://scans/slides", (80, 100), stride=70, label=True, client=client)
    assert ds.classes == ("a", "b")
    corners = [
        (name, top, left) for name in levels for top in range(0, 225, 70) for left in range(0, 333, 70)
    ]
    assert len(ds) == len(corners) == 3 * 4 * 5
    for sample, (name, top, left) in zip(ds, corners, strict=True):
        np.testing.assert_array_equal(sample["image"], levels[name][0][top : top + 80, left : left + 100])
        assert sample["label"] == (name[0] == "b")
    assert len(ds.filter("name == 'a/two.svs,y=70,x=140'")) == 1
    places = {"b/three.tiff": [(3, 5), (40, 60)]}
    small = mesh.open_slides("s3://scans/slides", 30, level=-1, places=places, client=client)
    np.testing.assert_array_equal(small[1]["image"], levels["b/three.tiff"][2][40:70, 60:90])
    batch = mesh.Loader(small.map(ops.hflip("image"), ops.to_chw("image")), global_batch=2, seed=1).at(0)
    assert batch["image"].shape == (2, 3, 30, 30)
    with pytest.raises(ConfigurationError, match="outside of 76×108"):
        mesh.open_slides("s3://scans/slides", 30, level=2, places={"a/one.tif": [(60, 0)]}, client=client)
    with pytest.raises(ConfigurationError, match="has 3 levels"):
        mesh.open_slides("s3://scans/slides", 30, level=3, client=client)
