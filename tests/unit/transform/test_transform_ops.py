"""Each op: shapes, types, arguments, and what hostile bytes get (a BadSampleError, never part of an
image).
"""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from meshd.transform.compiler import compile_program, complete_spec, load_program
from meshd.transform.errors import BadSampleError, OpFailedError, UnknownBuildError, UnknownOpError
from meshd.transform.op_chain import compile_chain
from meshd.transform.registry import OPS, operation
from meshwire.plan.keyed_random import KeyedRandom
from meshwire.plan.plan_spec import OpSpec, parse_spec, spec_document
from meshwire.strict_json import PlanError, canonical_json

if TYPE_CHECKING:
    from meshd.transform.op_chain import OpChain


def picture(height: int = 60, width: int = 80) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A smooth picture with a different ramp in each channel."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([x * 255 // width, y * 255 // height, (x + y) * 255 // (width + height)], -1).astype(
        np.uint8
    )


def encoded(form: str, image: Image.Image | None = None, **options: Any) -> bytes:
    buffer = io.BytesIO()
    (image or Image.fromarray(picture())).save(buffer, form, **options)
    return buffer.getvalue()


def chain(*ops: tuple[str, dict[str, Any]], fuse: bool = True) -> OpChain:
    specs = [(i, OpSpec(name, "image", args)) for i, (name, args) in enumerate(ops)]
    return compile_chain(specs, fuse=fuse)


def draw(stream: int) -> KeyedRandom:
    return KeyedRandom(7, 0, 3, stream)


def rendered(data: bytes, *ops: tuple[str, dict[str, Any]]) -> Any:
    return chain(*ops).render(data, draw)


# --- arrays as images -----------------------------------------------------------------------------------


def npy_of(array: np.ndarray[Any, Any]) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


ON_IMAGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("hflip", {"p": 1.0}),
    ("vflip", {"p": 1.0}),
    ("rotate90", {"turns": 1}),
    ("center_crop", {"size": [20, 31]}),
    ("random_crop", {"size": [20, 31]}),
    ("pad", {"border": [1, 2, 3, 4], "fill": 7}),
    ("resize", {"size": [20, 90], "filter": "nearest"}),
    ("random_resized_crop", {"size": [20, 31], "filter": "nearest"}),
    ("to_chw", {}),
)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "int32", "uint32", "float32", "float64"])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_an_array_as_an_image_moves_as_one(dtype: str, channels: int) -> None:
    """Each channel goes where the only channel of a decoded gray image goes."""
    numbers = np.arange(40 * 60, dtype=np.uint16).reshape(40, 60)
    gray = encoded("PNG", Image.fromarray(numbers))
    stack = np.stack([(numbers + 3 * channel).astype(dtype) for channel in range(channels)], -1)
    shape: list[int | None] = [None, None, channels]
    for op in ON_IMAGES:
        stored = {"mode": "unchanged", "dtype": "uint16", "channels": 1}
        expected = rendered(gray, ("decode", stored), ("hflip", {"p": 0.0}), op)  # the op has the same draws
        got = rendered(npy_of(stack), ("npy", {"dtype": dtype, "shape": shape}), ("as_image", {}), op)
        assert got.dtype == dtype
        filled = dict(op[1]).get("fill", 0)
        for channel in range(channels):
            one = got[channel : channel + 1] if op[0] == "to_chw" else got[..., channel : channel + 1]
            moved = (expected.astype(np.int64) + 3 * channel).astype(dtype)
            edge = (expected == filled) & (one == filled)
            assert ((one == moved) | edge).all(), (op, channel)


def test_layouts_of_arrays_as_images() -> None:
    flat, planes = (
        np.arange(12.0, dtype="float32").reshape(3, 4),
        np.arange(24, dtype="int32").reshape(2, 3, 4),
    )
    read = ("npy", {"dtype": "float32", "shape": [None, None]})
    np.testing.assert_array_equal(rendered(npy_of(flat), read, ("as_image", {})), flat[:, :, None])
    np.testing.assert_array_equal(
        rendered(npy_of(flat), read, ("as_image", {"layout": "chw"})), flat[:, :, None]
    )
    read = ("npy", {"dtype": "int32", "shape": [None, None, None]})
    last = rendered(npy_of(planes), read, ("as_image", {"layout": "chw", "channels": 2}))
    np.testing.assert_array_equal(last, planes.transpose(1, 2, 0))
    for wrong, words in (({"channels": 3}, "has 4 channels, the plan says 3"),):
        with pytest.raises(BadSampleError, match=words):
            rendered(npy_of(planes), read, ("as_image", wrong))
    with pytest.raises(BadSampleError, match="empty"):
        rendered(npy_of(planes[:, :0]), read, ("as_image", {"channels": 4}))


@pytest.mark.parametrize(
    ("shape", "dtype", "args", "words"),
    [
        ([None, None, None], "uint8", {}, "does not say how many channels there are: pass channels"),
        ([None, None, 5], "uint8", {}, "needs an array of 1 to 4 channels"),
        ([None, None, 2], "uint8", {"channels": 3}, "needs an array of 3 channels"),
        ([None], "uint8", {}, "an array of 2 or 3 axes"),
        ([None, None], "int64", {}, "not int64: put cast before it"),
    ],
)
def test_arrays_that_are_no_images(shape: Any, dtype: str, args: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        chain(("npy", {"dtype": dtype, "shape": shape}), ("as_image", args))
    with pytest.raises(PlanError, match="needs an array"):
        chain(("decode", {}), ("as_image", {}))


# --- decoding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["PNG", "WEBP", "BMP", "TIFF"])
def test_lossless_formats_give_the_pixels(form: str) -> None:
    data = encoded(form, None, **({"lossless": True} if form == "WEBP" else {}))
    np.testing.assert_array_equal(rendered(data, ("decode", {})), picture())


def test_jpeg_is_close_to_the_pixels() -> None:
    got = rendered(encoded("JPEG", quality=95), ("decode", {}))
    assert got.dtype == np.uint8
    assert np.abs(got.astype(int) - picture()).mean() < 2


def test_grey_has_one_channel() -> None:
    for form in ("JPEG", "PNG"):
        assert rendered(encoded(form), ("decode", {"mode": "gray"})).shape == (60, 80, 1)
    grey = encoded("JPEG", Image.fromarray(picture()).convert("L"))
    assert rendered(grey, ("decode", {})).shape == (60, 80, 3)


def test_other_colour_models_become_rgb() -> None:
    base = Image.fromarray(picture())
    for image, form in [
        (base.convert("RGBA"), "PNG"),
        (base.convert("P"), "PNG"),
        (base.convert("1"), "PNG"),
        (base.convert("CMYK"), "JPEG"),
        (base.convert("P"), "GIF"),
    ]:
        got = rendered(encoded(form, image), ("decode", {}))
        assert got.shape == (60, 80, 3)
    assert (
        np.abs(rendered(encoded("JPEG", base.convert("CMYK")), ("decode", {})).astype(int) - picture()).mean()
        < 4
    )


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    wide = Image.fromarray(np.full((4, 4), 0x8000, dtype=np.uint16))
    assert int(rendered(encoded("PNG", wide), ("decode", {"mode": "gray"}))[0, 0, 0]) == 0x80


def png_of_size(width: int, height: int) -> bytes:
    """A PNG whose header claims a size, with next to no data."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + body


HOSTILE = {
    "empty": b"",
    "text": b"not an image at all",
    "jpeg magic": b"\xff\xd8\xff",
    "half a jpeg": encoded("JPEG")[: len(encoded("JPEG")) // 2],
    "jpeg without its end": encoded("JPEG")[:-2],
    "progressive, cut": encoded("JPEG", progressive=True)[:-40],
    "half a png": encoded("PNG")[: len(encoded("PNG")) // 2],
    "half a webp": encoded("WEBP")[: len(encoded("WEBP")) // 2],
    "half a gif": encoded("GIF")[:200],
    "a bomb": png_of_size(60000, 60000),
    "a claim without data": png_of_size(500, 500),
    "damaged png": encoded("PNG")[:100] + b"\xff" * 40 + encoded("PNG")[140:],
    "a jpeg of 65000 by 65000": encoded("JPEG").replace(
        struct.pack(">HH", 60, 80), struct.pack(">HH", 65000, 65000), 1
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("fuse", [True, False])
def test_hostile_bytes_are_bad_samples(name: str, fuse: bool) -> None:
    ops: list[tuple[str, dict[str, Any]]] = [
        ("decode", {}),
        ("random_resized_crop", {"size": 16}),
        ("to_chw", {}),
    ]
    row = np.zeros((3, 16, 16), dtype=np.uint8)
    with pytest.raises(BadSampleError) as caught:
        chain(*ops, fuse=fuse).render_into(HOSTILE[name], draw, row)
    assert "decode" in caught.value.op
    assert "Traceback" not in caught.value.reason


@pytest.mark.parametrize("op", ["decode", "npy", "int_label"])
def test_an_empty_file_is_said_to_be_empty(op: str) -> None:
    args = {"dtype": "uint8", "shape": [2]} if op == "npy" else {}
    with pytest.raises(BadSampleError, match=r"the file is empty \(0 bytes\): ") as caught:
        rendered(b"", (op, args))
    assert caught.value.op == op


@pytest.mark.parametrize(
    ("data", "op", "args", "words"),
    [
        (b"<html><h1>404</h1>", "decode", {}, "it is an HTML page: fetch it again"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "decode", {}, "git lfs pull"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "decode", {}, "it is a HEIC image: convert it"),
        (
            b'\xef\xbb\xbf{"n": 1}',
            "json",
            {"path": "n"},
            "text with a byte order mark: store it without",
        ),
        ('{"n": 1}'.encode("utf-16"), "json", {"path": "n"}, "it is text in UTF-16: store it as UTF-8"),
    ],
)
def test_what_no_op_reads_is_said_to_be_that(data: bytes, op: str, args: dict[str, Any], words: str) -> None:
    with pytest.raises(BadSampleError, match=words) as caught:
        rendered(data, (op, args))
    assert caught.value.op == op


def test_a_damaged_image_is_not_called_foreign() -> None:
    with pytest.raises(BadSampleError) as caught:
        rendered(encoded("JPEG")[:300], ("decode", {}))
    assert "it is" not in caught.value.reason


def test_random_damage_never_breaks_an_op() -> None:
    rng = np.random.default_rng(3)
    compiled = chain(("decode", {}), ("resize", {"size": [8, 8]}))
    for form in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):
        whole = encoded(form)
        for _ in range(25):
            data = bytearray(whole)
            for at in rng.integers(0, len(data), 8):
                data[at] = rng.integers(0, 256)
            with contextlib.suppress(BadSampleError):
                assert compiled.render(bytes(data), draw).shape == (8, 8, 3)


# --- windows, flips, layouts ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ops", "shape"),
    [
        ([("resize", {"size": [20, 30]})], (20, 30, 3)),
        ([("resize", {"size": 20})], (20, 26, 3)),
        ([("resize", {"size": 200})], (200, 266, 3)),
        ([("center_crop", {"size": 32})], (32, 32, 3)),
        ([("center_crop", {"size": [10, 50]})], (10, 50, 3)),
        ([("random_resized_crop", {"size": 24})], (24, 24, 3)),
        ([("random_resized_crop", {"size": [24, 12], "scale": [0.5, 0.5], "ratio": [1, 1]})], (24, 12, 3)),
        ([("hflip", {})], (60, 80, 3)),
        ([("resize", {"size": 40}), ("center_crop", {"size": 32}), ("to_chw", {})], (3, 32, 32)),
        ([("to_chw", {}), ("to_hwc", {})], (60, 80, 3)),
    ],
)
def test_shapes_are_as_inferred(ops: list[tuple[str, dict[str, Any]]], shape: tuple[int, ...]) -> None:
    for mode, channels in (("rgb", 3), ("gray", 1)):
        compiled = chain(("decode", {"mode": mode}), *ops)
        got = compiled.render(encoded("PNG"), draw)
        wanted = tuple(channels if extent == 3 else extent for extent in shape)
        assert got.shape == wanted
        assert got.dtype == np.uint8
        for known, real in zip(compiled.output.shape, wanted, strict=True):
            assert known in (None, real)


def test_center_crop_is_the_middle_and_flip_mirrors() -> None:
    got = rendered(encoded("PNG"), ("decode", {}), ("center_crop", {"size": [20, 40]}))
    np.testing.assert_array_equal(got, picture()[20:40, 20:60])
    flipped = rendered(encoded("PNG"), ("decode", {}), ("hflip", {"p": 1.0}))
    np.testing.assert_array_equal(flipped, picture()[:, ::-1])
    same = rendered(encoded("PNG"), ("decode", {}), ("hflip", {"p": 0}))
    np.testing.assert_array_equal(same, picture())


def test_a_crop_larger_than_the_image_is_a_bad_sample() -> None:
    with pytest.raises(BadSampleError, match="smaller than the crop"):
        rendered(encoded("PNG"), ("decode", {}), ("center_crop", {"size": 100}))


def test_randomness_is_keyed_by_position_and_op() -> None:
    compiled = chain(("decode", {}), ("random_resized_crop", {"size": 16}))
    data = encoded("PNG")

    def at(position: int) -> bytes:
        return bytes(compiled.render(data, lambda stream: KeyedRandom(1, 0, position, stream)).tobytes())

    assert at(5) == at(5)
    assert len({at(position) for position in range(20)}) > 15


@pytest.mark.parametrize("size", [(60, 80), (30, 40), (47, 53), (120, 90), (7, 80), (16, 20), (300, 9)])
def test_resampling_is_antialiased_like_pillow(size: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    noisy = np.clip(picture(256, 320).astype(int) + rng.integers(-20, 20, (256, 320, 1)), 0, 255).astype(
        np.uint8
    )
    got = rendered(encoded("PNG", Image.fromarray(noisy)), ("decode", {}), ("resize", {"size": list(size)}))
    oracle = np.asarray(Image.fromarray(noisy).resize(size[::-1], Image.Resampling.BILINEAR))
    assert np.abs(got.astype(int) - oracle).mean() < 4


# --- labels and arrays -----------------------------------------------------------------------------------


def test_labels() -> None:
    assert rendered(b" 7\n", ("int_label", {})) == 7
    assert rendered(b"-12", ("int_label", {})) == -12
    assert rendered(b"cat\n", ("text_label", {"classes": ["dog", "cat"]})) == 1
    row = np.zeros((), dtype=np.int64)
    chain(("int_label", {})).render_into(b"41", draw, row)
    assert int(row) == 41


@pytest.mark.parametrize("data", [b"", b"seven", b"1.5", b"9" * 30, b"\xff\xfe", b"1" * 5000, "٣".encode()])
def test_what_is_no_integer(data: bytes) -> None:
    with pytest.raises(BadSampleError):
        rendered(data, ("int_label", {}))


def npy(array: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("order", ["C", "F"])
def test_npy(order: Any) -> None:
    array = np.array(np.arange(12, dtype=np.float32).reshape(3, 4), order=order)
    got = rendered(npy(array), ("npy", {"dtype": "float32", "shape": [3, 4]}))
    np.testing.assert_array_equal(got, array)
    assert chain(("npy", {"dtype": "float32", "shape": [3, 4]})).output.fixed == (3, 4)
    assert chain(("npy", {"dtype": "float32"})).output.fixed is None


def test_a_number_alone_is_an_npy_without_an_axis() -> None:
    data = npy(np.float32(2.5))
    spec = parse_spec({"ops": [{"op": "npy", "field": "a"}]})
    assert complete_spec(spec, lambda _: data).ops[0].args == {"dtype": "float32", "shape": []}
    got = rendered(data, ("npy", {"dtype": "float32", "shape": []}))
    assert (got.shape, got.tolist()) == ((), 2.5)
    with pytest.raises(BadSampleError, match=r"shape \[1\], the plan says \[\]"):
        rendered(npy(np.ones(1, np.float32)), ("npy", {"dtype": "float32", "shape": []}))


def test_big_endian_npy_is_turned() -> None:
    got = rendered(npy(np.arange(4, dtype=">i4")), ("npy", {"dtype": "int32", "shape": [4]}))
    assert got.dtype == np.dtype("<i4")
    assert got.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY",
        npy(np.arange(4, dtype=np.float64)),
        npy(np.arange(5, dtype=np.float32)),
        npy(np.arange(4, dtype=np.float32))[:-4],
        npy(np.array([{"a": 1}], dtype=object), allow_pickle=True),
        npy(np.arange(4, dtype=np.float32)).replace(b"(4,), ", b"(9,), "),
        npy(np.arange(4, dtype=np.float32)).replace(b"(4,)", b"(-4,)"),
    ],
)
def test_npy_that_is_not_what_the_plan_says(data: bytes) -> None:
    with pytest.raises(BadSampleError):
        rendered(data, ("npy", {"dtype": "float32", "shape": [4]}))


def test_the_first_sample_tells_the_dtype() -> None:
    spec = parse_spec({"ops": [{"op": "npy", "field": "a"}]})
    found = complete_spec(spec, lambda field: npy(np.arange(3, dtype=">i2"))).ops[0].args
    assert found == {"dtype": "int16", "shape": [None]}
    with pytest.raises(PlanError, match="does not tell"):
        complete_spec(spec, lambda field: b"rubbish")
    with pytest.raises(PlanError, match="no field 'a'"):
        compile_program(complete_spec(spec, {"b": b""}.__getitem__), ["b"])
    given = parse_spec({"ops": [{"op": "npy", "field": "a", "args": {"dtype": "uint8"}}]})
    assert complete_spec(given, lambda field: b"rubbish").ops[0].args == {"dtype": "uint8"}


def test_bytes_stay_bytes() -> None:
    assert rendered(b"abc") == b"abc"
    assert rendered(b"abc", ("raw", {})) == b"abc"


# --- plans -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ops", "path", "hint"),
    [
        ([("decode", {"mode": "rgba"})], "ops[0].args.mode", "rgb"),
        ([("decode", {"mod": "rgb"})], "ops[0].args.mod", "did you mean 'mode'"),
        ([("decode", {}), ("resize", {})], "ops[1].args.size", "missing"),
        ([("decode", {}), ("resize", {"size": 0})], "ops[1].args.size", "outside"),
        ([("decode", {}), ("resize", {"size": [1, 2, 3]})], "ops[1].args.size", "height"),
        ([("decode", {}), ("resize", {"size": 1 << 20})], "ops[1].args.size", "outside"),
        ([("decode", {}), ("random_resized_crop", {"size": 9, "scale": [0, 1]})], "ops[1].args.scale",
         "lowest"),
        ([("decode", {}), ("hflip", {"p": 2})], "ops[1].args.p", "outside"),
        ([("decode", {}), ("decode", {})], "ops[1]", "first op"),
        ([("resize", {"size": 9})], "ops[0]", "decode it first"),
        ([("hflip", {})], "ops[0]", "Put decode before it (mesh op test: --before decode)"),
        ([("to_chw", {})], "ops[0]", "Put decode before it (mesh op test: --before decode)"),
        ([("decode", {}), ("to_chw", {}), ("hflip", {})], "ops[2]", "before to_chw"),
        ([("text_label", {"classes": ["a", "a"]})], "ops[0].args.classes", "distinct"),
        ([("npy", {"dtype": "object"})], "ops[0].args.dtype", "object"),
        ([("decode", {}), ("resize", {"size": [5, 5]}), ("center_crop", {"size": 6})],
         "ops[2]", "resize first"),
    ],
)  # fmt: skip
def test_wrong_plans_name_the_field(ops: list[tuple[str, dict[str, Any]]], path: str, hint: str) -> None:
    with pytest.raises(PlanError) as caught:
        chain(*ops)
    assert caught.value.path == path
    assert hint in str(caught.value)


def test_unknown_ops_and_builds() -> None:
    with pytest.raises(UnknownOpError, match="did you mean 'hflip'"):
        chain(("hflipp", {}))
    spec = parse_spec({"ops": [{"op": "hflip", "field": "image", "version": "99"}]})
    with pytest.raises(UnknownBuildError, match="version 1"):
        complete_spec(spec, dict[str, bytes]().__getitem__)


def test_programs_know_their_fields() -> None:
    spec = parse_spec({"ops": [{"op": "decode", "field": "imag"}]})
    with pytest.raises(PlanError, match="did you mean 'image'"):
        compile_program(spec, ["image"])
    spec = parse_spec({"ops": [{"op": "decode", "field": "label"}]})
    with pytest.raises(PlanError, match="takes no ops"):
        compile_program(spec, ["image"], ["label"])


def test_a_program_travels_as_text() -> None:
    spec = complete_spec(parse_spec({"seed": 3, "ops": [{"op": "decode", "field": "b"}]}), lambda field: b"")
    text = canonical_json({"spec": spec_document(spec), "fields": ["a", "b"]}).decode()
    program = load_program(text)
    assert list(program.chains) == ["a", "b"]
    assert program.seed == 3
    assert program.outputs["b"].kind == "image"


def test_a_defect_of_an_op_is_not_a_bad_sample() -> None:
    @operation("test_broken")
    class Broken:
        """Raises."""

        def infer(self, field: Any) -> Any:
            return field

        def apply(self, value: Any, random: Any) -> Any:
            return 1 // 0

    try:
        with pytest.raises(OpFailedError, match="test_broken: ZeroDivisionError"):
            rendered(b"x", ("test_broken", {}))
    finally:
        del OPS["test_broken"]
