"""What an image file stores is what "index" and "unchanged" give: palettes, 16 bits, floats; or it is bad."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from typing import Any

import cv2
import numpy as np
import pytest
import tifffile
from PIL import Image

from meshd.transform.compiler import compile_program, complete_spec
from meshd.transform.errors import BadSampleError
from meshd.transform.op_chain import compile_chain
from meshwire.formats.image_headers import read_image_header
from meshwire.plan.keyed_random import KeyedRandom
from meshwire.plan.plan_spec import OpSpec, parse_spec
from meshwire.strict_json import PlanError

RNG = np.random.default_rng(11)
CLASSES = np.array([0, 7, 20, 255], np.uint8)[RNG.integers(0, 4, (13, 17))]


def file_of(image: Image.Image, form: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def palette_image(numbers: np.ndarray[Any, Any] = CLASSES, form: str = "PNG", **options: Any) -> bytes:
    made = Image.frombytes("P", numbers.shape[::-1], np.ascontiguousarray(numbers).tobytes())
    made.putpalette([value * 5 % 256 for value in range(768)])
    return file_of(made, form, **options)


def by_opencv(array: np.ndarray[Any, Any], ending: str) -> bytes:
    order = [2, 1, 0, 3][: array.shape[2]] if array.shape[2] > 2 else [0]
    return bytes(cv2.imencode(ending, np.ascontiguousarray(array[:, :, order]))[1].tobytes())


def decoded(data: bytes, version: str = "", **args: Any) -> Any:
    chain = compile_chain([(0, OpSpec("decode", "x", args, version))])
    return chain.render(data, lambda index: KeyedRandom(1, 0, 0, index))


def unchanged(data: bytes) -> Any:
    header = read_image_header(data)
    assert header is not None
    return decoded(data, mode="unchanged", dtype=header.dtype, channels=header.channels)


@pytest.mark.parametrize("form", ["PNG", "GIF", "BMP", "TIFF"])
def test_a_mask_keeps_its_indices(form: str) -> None:
    data = palette_image(form=form)
    wanted = np.asarray(Image.open(io.BytesIO(data)))
    if form != "GIF":  # whose writer numbers the colors anew
        np.testing.assert_array_equal(wanted, CLASSES)
    np.testing.assert_array_equal(decoded(data, mode="index")[:, :, 0], wanted)
    np.testing.assert_array_equal(unchanged(data)[:, :, 0], wanted)
    assert not np.array_equal(decoded(data, mode="gray")[:, :, 0], wanted)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_small_numbers_are_not_scaled(bits: int) -> None:
    numbers = RNG.integers(0, 1 << bits, (13, 17)).astype(np.uint8)
    packed = palette_image(numbers, bits=bits)
    assert packed[24] == bits
    lines = b"".join(
        b"\0" + np.packbits(np.unpackbits(row[:, None], axis=1)[:, -bits:]).tobytes() for row in numbers
    )
    gray = png(17, 13, bits, 0, lines)
    for data in (packed, gray):
        np.testing.assert_array_equal(decoded(data, mode="index")[:, :, 0], numbers)
        np.testing.assert_array_equal(unchanged(data)[:, :, 0], numbers)


def png(width: int, height: int, bits: int, color: int, lines: bytes) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def test_a_gray_mask_is_its_values_and_colors_have_no_indices() -> None:
    np.testing.assert_array_equal(
        decoded(file_of(Image.fromarray(CLASSES), "PNG"), mode="index")[:, :, 0], CLASSES
    )
    rgb = Image.fromarray(RNG.integers(0, 256, (8, 9, 3)).astype(np.uint8))
    with pytest.raises(BadSampleError, match="3 channels of uint8 has no indices"):
        decoded(file_of(rgb, "PNG"), mode="index")
    with pytest.raises(BadSampleError, match="1 channel of uint16 has no indices"):
        decoded(file_of(Image.fromarray(np.full((8, 9), 700, np.uint16)), "PNG"), mode="index")
    with pytest.raises(BadSampleError, match="with loss, and no indices: store masks as PNG"):
        decoded(file_of(Image.fromarray(CLASSES), "JPEG"), mode="index")


@pytest.mark.parametrize("dtype", ["uint16", "int16", "int32", "uint32", "float32", "float64"])
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("ending", [".png", ".tiff"])
def test_numbers_stay_what_they_are(dtype: str, channels: int, ending: str) -> None:
    if ending == ".png" and dtype != "uint16":
        with pytest.raises(BadSampleError, match="the plan says"):
            decoded(palette_image(), mode="unchanged", dtype=dtype, channels=channels)
        return
    shape = (13, 17, channels)
    if dtype.startswith("float"):
        array = RNG.normal(size=shape).astype(dtype)
    else:
        info = np.iinfo(dtype)
        array = RNG.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    data = by_opencv(array, ending)
    found = unchanged(data)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, array)


def test_gray_with_alpha_in_16_bits() -> None:
    array = RNG.integers(0, 1 << 16, (13, 17, 2)).astype(">u2")
    data = png(17, 13, 16, 4, b"".join(b"\0" + row.tobytes() for row in array))
    np.testing.assert_array_equal(unchanged(data), array)


@pytest.mark.parametrize(
    ("mode", "form", "options"),
    [
        ("LA", "PNG", {}),
        ("RGBA", "PNG", {}),
        ("RGBA", "WEBP", {"lossless": True}),
        ("RGB", "WEBP", {"lossless": True}),
        ("RGB", "BMP", {}),
        ("RGBA", "TIFF", {}),
        ("CMYK", "TIFF", {"compression": "tiff_lzw"}),
        ("1", "PNG", {}),
        ("1", "TIFF", {}),
        ("I;16", "TIFF", {"compression": "tiff_adobe_deflate"}),
        ("F", "TIFF", {"compression": "tiff_lzw"}),
        ("RGB", "JPEG", {}),
        ("L", "JPEG", {}),
    ],
)
def test_unchanged_is_what_pillow_opens(mode: str, form: str, options: dict[str, Any]) -> None:
    wide = Image.fromarray(RNG.integers(0, 256, (13, 17, 4)).astype(np.uint8)).convert("RGB")
    if mode == "I;16":
        image = Image.fromarray(RNG.integers(0, 1 << 16, (13, 17)).astype(np.uint16))
    else:
        image = wide.convert(mode)
    data = file_of(image, form, **options)
    with Image.open(io.BytesIO(data)) as opened:
        wanted = np.asarray(opened)
    np.testing.assert_array_equal(unchanged(data).squeeze(), wanted)


def test_a_plan_takes_dtype_and_channels_from_the_first_sample() -> None:
    data = {
        "depth": file_of(Image.fromarray(np.full((5, 6), 4096, np.uint16)), "PNG"),
        "height": file_of(Image.fromarray(np.full((5, 6), 0.25, np.float32)), "TIFF"),
        "mask": palette_image(),
    }
    both = {"op": "decode", "fields": ["depth", "height"], "args": {"mode": "unchanged"}}
    spec = parse_spec({"ops": [both, {"op": "decode", "field": "mask", "args": {"mode": "index"}}]})
    done = complete_spec(spec, data.__getitem__)
    program = compile_program(done, list(data))
    assert [(name, found.dtype) for name, found in program.outputs.items()] == [
        ("depth", "uint16"),
        ("height", "float32"),
        ("mask", "uint8"),
    ]
    assert done.ops[1].args == {"mode": "index"}, "nothing is read where nothing is missing"
    with pytest.raises(PlanError, match="the first sample does not tell: not a JPEG, PNG"):
        complete_spec(spec, lambda field: b"rubbish")
    with pytest.raises(PlanError, match="needs dtype and channels here"):
        compile_program(spec, list(data))
    wrong = parse_spec({"ops": [{"op": "decode", "field": "mask", "args": {"dtype": "uint16"}}]})
    with pytest.raises(PlanError, match='of the mode "unchanged"'):
        compile_program(wrong, list(data))


def test_another_kind_of_file_is_bad_and_says_what_it_has() -> None:
    with pytest.raises(BadSampleError, match="1 channel of uint8, the plan says 1 channel of uint16"):
        decoded(palette_image(), mode="unchanged", dtype="uint16", channels=1)


@pytest.mark.parametrize("mode", ["rgb", "gray"])
def test_floats_are_never_all_zeros(mode: str) -> None:
    heights = RNG.uniform(0, 1, (13, 17)).astype(np.float32)
    for array in (heights, (heights * 1e6).astype(np.int32), (heights * 1000).astype(np.int16)):
        data = by_opencv(array[:, :, None], ".tiff")
        with pytest.raises(BadSampleError, match=f'{array.dtype} has no range .* mode "unchanged"'):
            decoded(data, mode=mode)
    with pytest.raises(BadSampleError, match=r'float32 has no range .* mode "unchanged"'):
        decoded(by_opencv(np.dstack([heights] * 3), ".tiff"), mode=mode)
    # as before, in plans that have the earlier version
    assert decoded(by_opencv(heights[:, :, None], ".tiff"), version="2", mode=mode).max() <= 1


def test_16_bits_are_scaled_in_all_versions() -> None:
    deep = RNG.integers(0, 1 << 16, (13, 17)).astype(np.uint16)
    for version in ("1", "2", "3"):
        found = decoded(file_of(Image.fromarray(deep), "PNG"), version=version, mode="gray")
        np.testing.assert_array_equal(found[:, :, 0], deep >> 8)


@pytest.mark.parametrize("ending", [".png", ".tiff"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_file_that_is_cut_is_the_whole_image_or_bad(ending: str, channels: int) -> None:
    array = RNG.integers(0, 1 << 16, (13, 17, channels)).astype(np.uint16)
    data = by_opencv(array, ending)
    for length in range(0, len(data), 7):
        try:
            found = decoded(data[:length], mode="unchanged", dtype="uint16", channels=channels)
        except BadSampleError:
            continue
        np.testing.assert_array_equal(found, array, err_msg=f"{length} of {len(data)} bytes")


def tiff_of(array: np.ndarray[Any, Any], **options: Any) -> bytes:
    out = io.BytesIO()
    tifffile.imwrite(out, array, **options)
    return out.getvalue()


DEEP = RNG.integers(0, 1 << 16, (13, 17, 3)).astype(np.uint16)


@pytest.mark.parametrize("byteorder", ["<", ">"])
@pytest.mark.parametrize("bigtiff", [False, True])
@pytest.mark.parametrize(
    ("array", "options"),
    [
        (DEEP[..., 0], {}),
        (DEEP, {"photometric": "rgb"}),
        (DEEP[..., 0] / np.float32(7), {"compression": "zlib", "predictor": True}),
        (CLASSES, {"tile": (16, 16)}),
        (
            np.moveaxis(DEEP >> 8, -1, 0).astype(np.uint8).copy(),
            {"planarconfig": "separate", "photometric": "rgb"},
        ),
    ],
)
def test_tiff_in_all_its_orders_and_sizes(array: Any, options: Any, byteorder: Any, bigtiff: bool) -> None:
    data = tiff_of(array, byteorder=byteorder, bigtiff=bigtiff, **options)
    wanted = np.moveaxis(array, 0, -1) if "planarconfig" in options else array
    with contextlib.ExitStack() as refused:
        if bigtiff and byteorder == ">":  # which Pillow does not read, but OpenCV
            refused.enter_context(contextlib.suppress(BadSampleError))
        np.testing.assert_array_equal(unchanged(data).squeeze(), wanted)
        if wanted.dtype == np.uint16:
            eight = wanted >> 8 if wanted.ndim == 3 else np.repeat((wanted >> 8)[:, :, None], 3, 2)
            np.testing.assert_array_equal(decoded(data), eight)


def test_planes_of_more_than_eight_bits_are_refused() -> None:
    """Pillow and OpenCV read numbers from them that are not in the file."""
    for array in (DEEP, DEEP.astype(np.float32)):
        data = tiff_of(np.moveaxis(array, -1, 0).copy(), planarconfig="separate", photometric="rgb")
        stored = {"mode": "unchanged", "dtype": array.dtype.name, "channels": 3}
        for args in (stored, {}, {"mode": "gray"}):
            with pytest.raises(
                BadSampleError, match=r"PlanarConfiguration 2\): store them interleaved|no range"
            ):
                decoded(data, **args)


def test_what_no_decoder_reads_is_named() -> None:
    with pytest.raises(
        BadSampleError, match="a TIFF with 1 channel of float16 in a form that is not supported"
    ):
        unchanged(tiff_of(DEEP[..., 0].astype(np.float16)))
    many = tiff_of(np.concatenate([DEEP, DEEP], -1), photometric="minisblack", planarconfig="contig")
    spec = parse_spec({"ops": [{"op": "decode", "field": "x", "args": {"mode": "unchanged"}}]})
    with pytest.raises(PlanError, match="6 channels of uint16: at most 4 are decoded; store more as arrays"):
        complete_spec(spec, lambda field: many)


@pytest.mark.parametrize("dtype", ["uint16", "int16", "int32", "uint32", "float32", "float64"])
@pytest.mark.parametrize("compression", ["none", "zlib", "lzw"])
@pytest.mark.parametrize("byteorder", ["<", ">"])
def test_compressed_numbers_of_either_byte_order(dtype: str, compression: str, byteorder: Any) -> None:
    numbers = (DEEP[..., 0].astype(np.int64) - (0 if dtype[0] in "uf" else 30_000)).astype(dtype)
    data = tiff_of(numbers, byteorder=byteorder, compression=compression, predictor=compression != "none")
    np.testing.assert_array_equal(unchanged(data)[:, :, 0], numbers)


def test_ops_keep_the_numbers() -> None:
    deep = RNG.integers(0, 1 << 16, (40, 50)).astype(np.uint16)
    data = file_of(Image.fromarray(deep), "PNG")
    ops: list[tuple[str, dict[str, Any]]] = [
        ("decode", {"mode": "unchanged", "dtype": "uint16", "channels": 1}),
        ("pad", {"border": 2, "fill": 65535}),
        ("resize", {"size": [80, 100], "filter": "nearest"}),
        ("rotate", {"degrees": 5, "filter": "nearest"}),
        ("hflip", {"p": 1.0}),
        ("vflip", {"p": 1.0}),
        ("random_crop", {"size": 60}),
        ("random_resized_crop", {"size": 48, "filter": "nearest"}),
        ("center_crop", {"size": 32}),
        ("to_chw", {}),
    ]
    chain = compile_chain([(index, OpSpec(name, "x", args)) for index, (name, args) in enumerate(ops)])
    assert (chain.output.dtype, chain.output.fixed) == ("uint16", (1, 32, 32))
    found = chain.render(data, lambda index: KeyedRandom(1, 0, 0, index))
    assert set(np.unique(found)) <= {*np.unique(deep), 0, 65535}


@pytest.mark.parametrize(
    "op",
    [
        OpSpec("color_jitter", "x"),
        OpSpec("encode", "x", {"format": "png"}),
        OpSpec("resize", "x", {"size": 8, "filter": "fast"}),
        OpSpec("random_resized_crop", "x", {"size": 8}),
        OpSpec("pad", "x", {"border": 1, "fill": 256}),
    ],
)
def test_what_takes_uint8_only_says_so_before_a_byte_is_read(op: OpSpec) -> None:
    channels, dtype = (3, "uint16") if op.op != "pad" else (3, "uint8")
    first = OpSpec("decode", "x", {"mode": "unchanged", "dtype": dtype, "channels": channels})
    with pytest.raises(PlanError, match=r"uint8|uint16"):
        compile_chain([(0, first), (1, op)])
