"""NIfTI and DICOM: values are nibabel's and pydicom's, and a bad file is a bad sample."""

from __future__ import annotations

import contextlib
import gzip
import io
from functools import partial
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pydicom
import pydicom.encaps
import pydicom.pixels
import pydicom.uid
import pytest
from imagecodecs import jpeg8_encode
from pydicom.data import get_testdata_file
from pydicom.dataset import Dataset

from meshd.transform.builtin.dicom_files import DicomReader
from meshd.transform.errors import BadSampleError
from meshd.transform.op_chain import compile_chain
from meshwire.plan.keyed_random import KeyedRandom
from meshwire.plan.plan_spec import OpSpec
from meshwire.strict_json import PlanError

SHAPE = (7, 6, 5)


def rendered(data: bytes, *steps: tuple[str, dict[str, Any]], fuse: bool = True, seed: int = 1) -> Any:
    specs = [(number, OpSpec(op, "x", args)) for number, (op, args) in enumerate(steps)]
    return compile_chain(specs, fuse=fuse).render(data, lambda index: KeyedRandom(seed, 0, 0, index))


def nifti(data: bytes, **args: Any) -> Any:
    return rendered(data, ("nifti", {"shape": [None] * 3, **args}))


def image(
    dtype: str = "int16", cls: Any = nibabel.Nifti1Image, scaled: bool = False, big: bool = False
) -> Any:
    random = np.random.default_rng(3)
    voxels = random.integers(0, 120, SHAPE).astype(dtype)
    affine = np.array([[0, -2.5, 0, 4], [1.5, 0.1, 0, 5], [0, 0, 3, 6], [0, 0, 0, 1.0]])
    made = cls(voxels, affine)
    if scaled:
        made.header.set_slope_inter(0.1, -3.7)
    return cls(voxels, affine, made.header.as_byteswapped(">" if big else "<"))


FILES = {
    "int16": image(),
    "scaled": image(scaled=True),
    "big endian": image("float32", big=True),
    "float64": image("float64"),
    "uint8, version 2": image("uint8", nibabel.Nifti2Image, scaled=True),
}


@pytest.mark.parametrize("name", FILES)
def test_volumes_are_those_of_nibabel(name: str) -> None:
    whole = FILES[name]
    data = whole.to_bytes()
    wanted = type(whole).from_bytes(data)
    values = wanted.get_fdata()
    for content in (data, gzip.compress(data), gzip.compress(data[:900]) + gzip.compress(data[900:])):
        np.testing.assert_array_equal(nifti(content), values.astype(np.float32))
    np.testing.assert_array_equal(nifti(data, dtype="float64"), values)
    np.testing.assert_array_equal(rendered(data, ("nifti", {"part": "affine"})), wanted.affine)
    np.testing.assert_allclose(
        rendered(data, ("nifti", {"part": "spacing"})), wanted.header.get_zooms()[:3], rtol=1e-6
    )
    for codes in ("RAS", "LPS", "SAR"):
        found, to = nibabel.io_orientation(wanted.affine), nibabel.orientations.axcodes2ornt(codes)
        turned = wanted.as_reoriented(nibabel.orientations.ornt_transform(found, to))
        np.testing.assert_array_equal(nifti(data, orient=codes, dtype="float64"), turned.get_fdata())
        np.testing.assert_array_equal(
            rendered(data, ("nifti", {"part": "affine", "orient": codes})), turned.affine
        )


def test_a_window_is_cut_before_values_are_converted() -> None:
    data = FILES["scaled"].to_bytes()
    for seed in range(4):
        steps = (
            ("nifti", {"shape": [None] * 3, "orient": "RAS"}),
            ("window", {"extents": [4, None, 3]}),
            ("normalize", {"mean": [1.0], "std": [2.0], "scale": [1.0]}),
        )
        made = rendered(data, *steps, seed=seed)
        assert made.shape == (4, 7, 3)
        np.testing.assert_array_equal(made, rendered(data, *steps, seed=seed, fuse=False))
    first = (("nifti", {"shape": [None] * 3}), ("window", {"extents": [9, 2, 2], "at": "first", "pad": 0}))
    assert rendered(data, *first).shape == (9, 2, 2)


def damaged(at: int, content: bytes) -> bytes:
    data = bytearray(FILES["int16"].to_bytes())
    data[at : at + len(content)] = content
    return bytes(data)


HOSTILE = {
    "nothing": b"",
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(600),
    "truncated": FILES["int16"].to_bytes()[:-1],
    "truncated gzip": gzip.compress(FILES["int16"].to_bytes())[:-9],
    "damaged gzip": gzip.compress(FILES["int16"].to_bytes())[:-8] + bytes(8),
    "a bomb": gzip.compress(FILES["int16"].to_bytes() + bytes(8 << 20)),
    "a header of a pair": damaged(344, b"ni1\0"),
    "huge": damaged(40, b"\x07\0" + b"\xff\x7f" * 7),
    "negative": damaged(42, b"\xff\xff"),
    "an unknown type": damaged(70, b"\x63\x63"),
    "complex": image("complex64").to_bytes(),
    "a part of a header": FILES["int16"].to_bytes()[:100],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_volumes_are_bad_samples(name: str) -> None:
    with pytest.raises(BadSampleError):
        nifti(HOSTILE[name])


def test_values_that_do_not_fit_and_arguments_are_refused() -> None:
    with pytest.raises(BadSampleError, match="outside 0…255"):
        nifti(image("int16").__class__(np.full(SHAPE, 300, np.int16), np.eye(4)).to_bytes(), dtype="uint8")
    with pytest.raises(BadSampleError, match=r"shape \[\d+, \d+, \d+\], the plan says \[None, None, 4\]"):
        nifti(FILES["int16"].to_bytes(), shape=[None, None, 4])
    for args in ({"orient": "RAR"}, {"orient": "ras"}, {"dtype": "text"}, {"shape": None}):
        with pytest.raises(PlanError):
            nifti(FILES["int16"].to_bytes(), **args)


def dicom(data: bytes, **args: Any) -> Any:
    args = {"frames": False, "dtype": "float32", "channels": 1, **args}
    return rendered(data, ("decode_dicom", args))


def content_of(name: str) -> bytes:
    path = get_testdata_file(name, download=False)
    assert isinstance(path, str)
    return Path(path).read_bytes()


def saved(file: Dataset) -> bytes:
    out = io.BytesIO()
    file.save_as(out)
    return out.getvalue()


@pytest.mark.parametrize(
    "name",
    [
        "CT_small.dcm", "693_J2KI.dcm", "JPEG2000.dcm", "JPEGLSNearLossless_16.dcm", "MR_small_RLE.dcm",
        "MR_small_bigendian.dcm", "MR_small_implicit.dcm", "MR_small_jpeg_ls_lossless.dcm",
    ],
)  # fmt: skip
def test_gray_files_are_those_of_pydicom(name: str) -> None:
    data = content_of(name)
    file = pydicom.dcmread(io.BytesIO(data))
    pixels = file.pixel_array
    wanted = pydicom.pixels.apply_modality_lut(pixels, file)
    np.testing.assert_array_equal(dicom(data)[..., 0], wanted.astype(np.float32))
    stored = dicom(data, values="stored", dtype=pixels.dtype.newbyteorder("=").name)
    np.testing.assert_array_equal(stored[..., 0], pixels)
    if "WindowCenter" in file:
        shown = pydicom.pixels.apply_voi_lut(wanted, file)
        lowest = -(1 << file.BitsStored - 1) if file.PixelRepresentation else 0
        slope, highest = float(file.get("RescaleSlope", 1)), lowest + (1 << file.BitsStored) - 1
        low = lowest * slope + float(file.get("RescaleIntercept", 0))
        scaled = (shown - low) / (slope * (highest - lowest)) * 255
        assert np.abs(dicom(data, values="display", dtype="uint8")[..., 0] - scaled).max() <= 1


@pytest.mark.parametrize("name", ["examples_rgb_color.dcm", "SC_rgb_jpeg_dcmtk.dcm", "SC_rgb_rle_2frame.dcm"])
def test_colour_files_are_those_of_pydicom(name: str) -> None:
    data = content_of(name)
    reader = DicomReader(data)
    made = dicom(data, frames=reader.frames > 1, dtype="uint8", channels=3)
    np.testing.assert_array_equal(made, pydicom.dcmread(io.BytesIO(data)).pixel_array)


def test_palettes_doses_and_inverted_gray() -> None:
    data = content_of("examples_palette.dcm")
    file = pydicom.dcmread(io.BytesIO(data))
    colours = pydicom.pixels.apply_color_lut(file.pixel_array, file)
    shift = 8 if colours.dtype == np.uint16 else 0
    np.testing.assert_array_equal(dicom(data, dtype="uint8", channels=3), colours >> shift)
    dose = pydicom.dcmread(io.BytesIO(content_of("rtdose.dcm")))
    np.testing.assert_allclose(
        dicom(saved(dose), frames=True)[..., 0], dose.pixel_array * float(dose.DoseGridScaling), rtol=1e-6
    )
    gray = pydicom.dcmread(io.BytesIO(content_of("CT_small.dcm")))
    plain = dicom(saved(gray), values="display", dtype="uint8", window=[40.0, 400.0])
    gray.PhotometricInterpretation = "MONOCHROME1"
    inverted = dicom(saved(gray), values="display", dtype="uint8", window=[40.0, 400.0])
    assert np.abs(plain.astype(int) + inverted - 255).max() <= 1
    assert {0, 255} <= set(plain.ravel().tolist())


def test_each_frame_has_its_own_slope() -> None:
    file = pydicom.dcmread(io.BytesIO(content_of("CT_small.dcm")))
    pixels = file.pixel_array
    file.NumberOfFrames, file.PixelData = 2, pixels.tobytes() * 2
    shared, own = Dataset(), Dataset()
    for place, slope in ((shared, 2), (own, 3)):
        change = Dataset()
        change.RescaleSlope, change.RescaleIntercept = slope, -1
        place.PixelValueTransformationSequence = [change]
    file.SharedFunctionalGroupsSequence = [shared]
    file.PerFrameFunctionalGroupsSequence = [Dataset(), own]
    made = dicom(saved(file), frames=True)[..., 0]
    np.testing.assert_array_equal(made, np.stack([pixels * 2.0 - 1, pixels * 3.0 - 1]).astype(np.float32))
    steps: tuple[tuple[str, dict[str, Any]], ...] = (
        ("decode_dicom", {"frames": True, "dtype": "float32", "channels": 1}),
        ("resize", {"size": 64}),
        ("hflip", {}),
    )
    resized = rendered(saved(file), *steps)
    assert resized.shape == (2, 64, 64, 1)
    np.testing.assert_array_equal(resized, rendered(saved(file), *steps, fuse=False))


def compressed(name: str, syntax: str, encoded: bytes) -> bytes:
    """The file of that name with one frame in this transfer syntax."""
    file = pydicom.dcmread(io.BytesIO(content_of(name)))
    file.PixelData = pydicom.encaps.encapsulate([encoded])
    file["PixelData"].VR = "OB"
    file.file_meta.TransferSyntaxUID = pydicom.uid.UID(syntax)
    return saved(file)


@pytest.mark.parametrize("syntax", [pydicom.uid.JPEGLossless, pydicom.uid.JPEGLosslessSV1])
@pytest.mark.parametrize("bits", [12, 16])
def test_lossless_jpeg_is_what_was_encoded(syntax: str, bits: int) -> None:
    wanted = pydicom.dcmread(io.BytesIO(content_of("CT_small.dcm"))).pixel_array
    kept = np.where(wanted < 2048, wanted, 2047).astype(np.int16) - (1000 if bits == 12 else 0)
    words = kept.view(np.uint16) & ((1 << bits) - 1)  # 12 bits: as the encoders that leave the sign out
    encoded = bytes(jpeg8_encode(words, lossless=True, bitspersample=bits, predictor=1))
    file = pydicom.dcmread(io.BytesIO(compressed("CT_small.dcm", syntax, encoded)))
    file.BitsStored, file.HighBit = bits, bits - 1
    stored = dicom(saved(file), values="stored", dtype="int16")[..., 0]
    np.testing.assert_array_equal(stored, kept)
    assert kept.min() < 0 or bits == 16


def test_jpegs_of_other_libraries() -> None:
    lossless = dicom(content_of("SC_rgb_jpeg_gdcm.dcm"), dtype="uint8", channels=3)
    np.testing.assert_array_equal(lossless, dicom(content_of("SC_rgb_rle.dcm"), dtype="uint8", channels=3))
    wavelets = dicom(content_of("JPEG2000.dcm"))
    for name in ("JPGExtended.dcm", "JPEG-lossy.dcm"):  # 12 bits, and the same picture
        found = dicom(content_of(name))
        assert found.max() > 255
        assert np.corrcoef(found.ravel(), wavelets.ravel())[0, 1] > 0.95


def test_jpegs_that_are_not_as_their_file_says(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = pydicom.dcmread(io.BytesIO(content_of("CT_small.dcm"))).pixel_array.view(np.uint16)
    whole, wide = (
        bytes(jpeg8_encode(values, lossless=True, bitspersample=16, predictor=1))
        for values in (pixels, np.zeros((128, 64), np.uint16))
    )
    huge = bytearray(whole)
    at = whole.index(b"\xff\xc3") + 5
    huge[at : at + 4] = b"\xff\xff\xff\xff"  # rows and columns: 8 GB
    for broken in (wide, bytes(huge), whole[:-100], whole[:40], whole[:1], b"\xff\xd8" + b"\xff" * 50):
        with pytest.raises(BadSampleError, match="cannot be decoded"):
            dicom(compressed("CT_small.dcm", pydicom.uid.JPEGLosslessSV1, broken))
    draws = np.random.default_rng(5)
    for _ in range(60):
        changed = bytearray(whole)
        for place in draws.integers(0, len(changed), 5):
            changed[place] = draws.integers(0, 256)
        try:
            dicom(compressed("CT_small.dcm", pydicom.uid.JPEGLosslessSV1, bytes(changed)))
        except BadSampleError:
            continue
    decoder = pydicom.pixels.get_decoder(pydicom.uid.JPEGLosslessSV1)
    monkeypatch.setattr(decoder, "_unavailable", dict.fromkeys(decoder.available_plugins, ("imagecodecs",)))
    monkeypatch.setattr(decoder, "_available", {})
    with pytest.raises(BadSampleError, match=r"no decoder of 'JPEG Lossless.*shardmesh\[medical\]"):
        dicom(content_of("SC_rgb_jpeg_gdcm.dcm"), dtype="uint8", channels=3)


def test_damaged_dicom_files_are_bad_samples() -> None:
    data = content_of("CT_small.dcm")
    for broken in (b"", data[:100], data[:200], data[:-3000], data[:5000], content_of("MR_truncated.dcm"),
                   content_of("image_dfl.dcm"), content_of("test-SR.dcm"),
                   data.replace(b"\x28\0\x10\0US\2\0\x80\0", b"\x28\0\x10\0US\2\0\xff\xff")):  # fmt: skip
        with pytest.raises(BadSampleError):
            dicom(broken)
    with pytest.raises(BadSampleError, match="channels"):
        dicom(content_of("examples_rgb_color.dcm"))
    with pytest.raises(BadSampleError, match="frames=True"):
        dicom(content_of("rtdose.dcm"))
    for tag in (b"\x28\0\x52\x10", b"\x28\0\x53\x10", b"\x28\0\x04\0"):  # parsed as they are asked for
        where = data.index(tag)
        for representation in (b"Db", b"\0\0", b"SQ", b"AT"):
            changed = bytearray(data)
            changed[where + 4 : where + 6] = representation
            for asked in (
                partial(DicomReader.modality, frame=0),
                partial(DicomReader.display, frame=0, window=None),
            ):
                with contextlib.suppress(BadSampleError):
                    assert asked(DicomReader(bytes(changed))).size == 128 * 128
    draws = np.random.default_rng(4)
    for _ in range(60):
        changed = bytearray(content_of("MR_small_jp2klossless.dcm"))
        for at in draws.integers(300, len(changed), 5):
            changed[at] = draws.integers(0, 256)
        try:
            assert dicom(bytes(changed)).dtype == np.float32
        except BadSampleError:
            continue
