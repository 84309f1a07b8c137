"""Op constructors for `Dataset.map`: what storage nodes do to a field, in order.

Law: an op here is a name and checked arguments; the node's build of that op does the work, and its
version is part of the plan's hash.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from meshsdk.errors import ConfigurationError
from meshsdk.ops import arguments as _values
from meshwire.plan.plan_spec import OpSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_USER_OP = re.compile(r"[a-z][a-z0-9_\-]{0,39}/[A-Za-z_][A-Za-z0-9_]{0,49}")
Size = "int | Sequence[int]"
Filter = Literal["antialias", "nearest"]


def decode(field: str, *, mode: Literal["rgb", "gray"] = "rgb") -> OpSpec:
    """Bytes of a JPEG, PNG, WebP, GIF, BMP or TIFF file → uint8 [height, width, 3 or 1]."""
    if mode not in ("rgb", "gray"):
        raise ConfigurationError(f"decode({field!r}): mode is 'rgb' or 'gray', not {mode!r}")
    return OpSpec("decode", _values.field("decode", field), {"mode": mode})


def resize(field: str, size: int | Sequence[int], *, filter: Filter = "antialias") -> OpSpec:
    """An int is the shorter side's pixels (the shape is kept), [height, width] exactly that; for masks with
    filter="nearest"."""
    args = {"size": _values.size("resize", size), **_values.filter("resize", filter)}
    return OpSpec("resize", _values.field("resize", field), args)


def center_crop(field: str, size: int | Sequence[int]) -> OpSpec:
    """The middle `size`×`size` (or [height, width]) pixels."""
    return OpSpec(
        "center_crop", _values.field("center_crop", field), {"size": _values.size("center_crop", size)}
    )


def random_resized_crop(
    field: str,
    size: int | Sequence[int],
    *,
    scale: Sequence[float] = (0.08, 1.0),
    ratio: Sequence[float] = (0.75, 1.3333),
    filter: Filter = "antialias",
) -> OpSpec:
    """A random part (`scale`: its share of the area; `ratio`: width over height), resized to `size`.

    Random by (seed, epoch, position): the same on every node and after every resume.
    """
    name = "random_resized_crop"
    low, high = _values.pair(name, "scale", scale)
    if high > 1:
        raise ConfigurationError(f"{name}: scale={list(scale)} is a share of the area, at most 1")
    args = {
        "size": _values.size(name, size),
        "scale": [low, high],
        "ratio": list(_values.pair(name, "ratio", ratio)),
    }
    return OpSpec(name, _values.field(name, field), args | _values.filter(name, filter))


def hflip(field: str, p: float = 0.5) -> OpSpec:
    """Mirrors left and right with probability `p`."""
    return OpSpec("hflip", _values.field("hflip", field), {"p": _values.probability("hflip", p)})


def to_chw(field: str) -> OpSpec:
    """[height, width, channels] → [channels, height, width], as torch's convolutions want it."""
    return OpSpec("to_chw", _values.field("to_chw", field))


def to_hwc(field: str) -> OpSpec:
    """[channels, height, width] → [height, width, channels]."""
    return OpSpec("to_hwc", _values.field("to_hwc", field))


def vflip(field: str, p: float = 0.5) -> OpSpec:
    """Mirrors top and bottom with probability `p`."""
    return OpSpec("vflip", _values.field("vflip", field), {"p": _values.probability("vflip", p)})


def random_crop(field: str, size: int | Sequence[int]) -> OpSpec:
    """A random window of `size`, not resampled."""
    return OpSpec(
        "random_crop", _values.field("random_crop", field), {"size": _values.size("random_crop", size)}
    )


def pad(field: str, border: int | Sequence[int], *, fill: int = 0) -> OpSpec:
    """A border of `fill`: one width in pixels, or [top, right, bottom, left]."""
    given = border if isinstance(border, int) else _values.listed("pad", "border", border)
    return OpSpec("pad", _values.field("pad", field), {"border": given, "fill": fill})


def rotate(field: str, degrees: float | Sequence[float], *, fill: int = 0) -> OpSpec:
    """Turns about the middle by an angle of [−degrees, degrees], or of [lowest, highest]."""
    angles = _values.numbers("rotate", "degrees", degrees)
    given = angles[0] if isinstance(degrees, Real) else angles
    return OpSpec("rotate", _values.field("rotate", field), {"degrees": given, "fill": fill})


def grayscale(field: str, p: float = 1.0) -> OpSpec:
    """Luma in all three channels with probability `p`."""
    return OpSpec("grayscale", _values.field("grayscale", field), {"p": _values.probability("grayscale", p)})


def color_jitter(
    field: str,
    *,
    brightness: float = 0.0,
    contrast: float = 0.0,
    saturation: float = 0.0,
    hue: float = 0.0,
) -> OpSpec:
    """Factors of [1−x, 1+x] for the first three, a turn of [−hue, hue], in a random order."""
    args = {"brightness": brightness, "contrast": contrast, "saturation": saturation, "hue": hue}
    factors = {name: _values.number("color_jitter", name, value) for name, value in args.items()}
    return OpSpec("color_jitter", _values.field("color_jitter", field), factors)


def rand_augment(field: str, *, count: int = 2, strength: int = 9, fill: int = 0) -> OpSpec:
    """`count` of fourteen changes, each of `strength` 0…30 (RandAugment)."""
    args = {"count": count, "strength": strength, "fill": fill}
    return OpSpec("rand_augment", _values.field("rand_augment", field), args)


def mixup(field: str, *, alpha: float = 0.2, p: float = 1.0, labels: Sequence[str] | None = None) -> OpSpec:
    """Blends each row with its neighbour in the batch; the weight of its own pixels is `FIELD.weight`, the
    neighbour's label `LABEL.other`. `labels`: which fields are labels (all of the dataset's if left out)."""
    args = {"alpha": _values.number("mixup", "alpha", alpha), "p": _values.probability("mixup", p)}
    return OpSpec("mixup", _values.field("mixup", field), args | _values.labels(labels))


def cutmix(field: str, *, alpha: float = 1.0, p: float = 1.0, labels: Sequence[str] | None = None) -> OpSpec:
    """Puts a rectangle of its neighbour into each row; `FIELD.weight` and `LABEL.other` as with `mixup`."""
    args = {"alpha": _values.number("cutmix", "alpha", alpha), "p": _values.probability("cutmix", p)}
    return OpSpec("cutmix", _values.field("cutmix", field), args | _values.labels(labels))


def mixup_or_cutmix(
    field: str,
    *,
    mixup: float = 0.8,
    cutmix: float = 1.0,
    switch: float = 0.5,
    p: float = 1.0,
    labels: Sequence[str] | None = None,
) -> OpSpec:
    """Cutmix with probability `switch`, else mixup, by pair; `mixup` and `cutmix` are their alphas."""
    name = "mixup_or_cutmix"
    args = {
        "mixup": _values.number(name, "mixup", mixup),
        "cutmix": _values.number(name, "cutmix", cutmix),
        "switch": _values.probability(name, switch),
    }
    return OpSpec(
        name, _values.field(name, field), args | {"p": _values.probability(name, p)} | _values.labels(labels)
    )


def normalize(
    field: str,
    mean: float | Sequence[float],
    std: float | Sequence[float],
    *,
    scale: float = 255.0,
    dtype: Literal["float32", "float16"] = "float32",
) -> OpSpec:
    """(value / scale − mean) / std by channel. uint8 is a quarter on the wire: prefer the GPU for this."""
    name = "normalize"
    args = {
        "mean": _values.numbers(name, "mean", mean),
        "std": _values.numbers(name, "std", std),
        "scale": [_values.number(name, "scale", scale)],
        "dtype": dtype,
    }
    return OpSpec(name, _values.field(name, field), args)


def cast(field: str, dtype: str) -> OpSpec:
    """The same numbers in another type; what does not fit an integer type is a bad sample."""
    return OpSpec("cast", _values.field("cast", field), {"dtype": dtype})


def encode(
    field: str,
    format: Literal["jpeg", "png", "webp"],
    *,
    quality: int = 90,
    subsampling: Literal["444", "422", "420"] = "420",
    lossless: bool = False,
) -> OpSpec:
    """uint8 [height, width, 1 or 3] → an image file's bytes."""
    args = {"format": format, "quality": quality, "subsampling": subsampling, "lossless": lossless}
    return OpSpec("encode", _values.field("encode", field), args)


def to_npy(field: str) -> OpSpec:
    """An image or array → an `.npy` file's bytes."""
    return OpSpec("to_npy", _values.field("to_npy", field))


def int_label(field: str) -> OpSpec:
    """Decimal digits as text → int64."""
    return OpSpec("int_label", _values.field("int_label", field))


def text_label(field: str, classes: Sequence[str]) -> OpSpec:
    """A class name as text → int64, its place in `classes`."""
    names = [classes] if isinstance(classes, str) else list(classes)
    if len(names) < 2 or len(set(names)) != len(names) or not all(isinstance(name, str) for name in names):
        raise ConfigurationError("text_label: classes is a list of two or more different names")
    return OpSpec("text_label", _values.field("text_label", field), {"classes": names})


def label_map(field: str, map: Mapping[str, int], *, other: int | None = None) -> OpSpec:
    """A class name as text, or a label's number → int64 by `map` (numbers as text); what is not in it is
    `other`, or a bad sample."""
    args = {"map": {str(name): int(number) for name, number in map.items()}, "other": other}
    return OpSpec("label_map", _values.field("label_map", field), args)


def one_hot(field: str, classes: int, *, dtype: Literal["uint8", "float16", "float32"] = "float32") -> OpSpec:
    """A label, or integers […] → `dtype` […, classes], 1 at the number."""
    return OpSpec("one_hot", _values.field("one_hot", field), {"classes": classes, "dtype": dtype})


def utf8(field: str, *, form: Literal["none", "NFC", "NFKC"] = "none", strip: bool = False) -> OpSpec:
    """Text that is valid UTF-8, without a byte order mark, in a Unicode normal form."""
    return OpSpec("utf8", _values.field("utf8", field), {"form": form, "strip": strip})


def json(
    field: str, path: str, *, type: Literal["text", "json", "integer", "number", "numbers"] = "text"
) -> OpSpec:
    """The value at `path` ("messages[0].text") of a JSON document, such as a line of a JSONL file."""
    return OpSpec("json", _values.field("json", field), {"path": path, "type": type})


def tokenize(
    field: str,
    file: str,
    *,
    special: bool = True,
    dtype: Literal["auto", "uint16", "uint32", "int32", "int64"] = "auto",
) -> OpSpec:
    """Text → tokens [n], by a Hugging Face tokenizer.json kept as an object: `file` is "s3://BUCKET/KEY"
    (read when the plan is made, and from then on pinned by its sha256) or "sha256:HEX"."""
    args = {"file": _values.asset("tokenize", file), "special": special, "dtype": dtype}
    return OpSpec("tokenize", _values.field("tokenize", field), args)


def truncate(field: str, length: int, *, side: Literal["left", "right"] = "right") -> OpSpec:
    """At most `length` elements of the first axis; what is too many goes at the `side`."""
    return OpSpec("truncate", _values.field("truncate", field), {"length": length, "side": side})


def pad_to(field: str, length: int, *, value: float = 0, side: Literal["left", "right"] = "right") -> OpSpec:
    """Filled up with `value` to `length` elements; what is longer is a bad sample: `truncate` first."""
    return OpSpec("pad_to", _values.field("pad_to", field), {"length": length, "value": value, "side": side})


def gather_columns(field: str, columns: Sequence[int]) -> OpSpec:
    """These columns of the last axis, in this order."""
    return OpSpec("gather_columns", _values.field("gather_columns", field), {"columns": list(columns)})


def npy(field: str, *, dtype: str | None = None, shape: Sequence[int | None] | None = None) -> OpSpec:
    """A `.npy` file's bytes → its array. Left out, dtype and number of axes are those of the first sample;
    with a `shape` without None the field is dense."""
    return OpSpec("npy", _values.field("npy", field), _values.array(dtype, shape))


def npz(
    field: str, name: str, *, dtype: str | None = None, shape: Sequence[int | None] | None = None
) -> OpSpec:
    """The array `name` of an `.npz` file; dtype and shape as in `npy`."""
    return OpSpec("npz", _values.field("npz", field), {"name": name, **_values.array(dtype, shape)})


def safetensors(
    field: str, name: str, *, dtype: str | None = None, shape: Sequence[int | None] | None = None
) -> OpSpec:
    """The tensor `name` of a `.safetensors` file; dtype and shape as in `npy`. BF16 comes as float32."""
    return OpSpec(
        "safetensors", _values.field("safetensors", field), {"name": name, **_values.array(dtype, shape)}
    )


def zarr(field: str, metadata: str) -> OpSpec:
    """A row of a Zarr v3 array (a dataset of kind "zarr") → its array; `metadata` is the array's zarr.json,
    as "s3://BUCKET/…/zarr.json" or "sha256:HEX"."""
    return OpSpec("zarr", _values.field("zarr", field), {"metadata": _values.asset("zarr", metadata)})


def zarr_chunk(field: str, metadata: str) -> OpSpec:
    """A chunk of a Zarr v3 array (a dataset of kind "chunks") → its array; `metadata` as in `zarr`."""
    return OpSpec(
        "zarr_chunk", _values.field("zarr_chunk", field), {"metadata": _values.asset("zarr_chunk", metadata)}
    )


def window(
    field: str, extents: Sequence[int | None], *, at: Literal["random", "center", "first"] = "random"
) -> OpSpec:
    """A window of an array: `extents` along each axis, None for all of it; `at` random places (keyed by seed,
    epoch and position), in the middle, or at the beginning."""
    args = {"extents": _values.extents("window", "extents", extents), "at": at}
    return OpSpec("window", _values.field("window", field), args)


def feature(
    field: str, type: Literal["integer", "integers", "number", "numbers"], *, length: int = 0
) -> OpSpec:
    """The numbers of a `tf.Example`'s feature (a dataset of kind "tfrecord"): one, or a list; with `length`
    of exactly so many, dense. Features of bytes are bytes already."""
    return OpSpec("feature", _values.field("feature", field), {"type": type, "length": length})


def frombuffer(field: str, dtype: str, *, shape: Sequence[int | None] = ()) -> OpSpec:
    """Numbers as they lie in memory, little endian, such as a column of MDS → an array of this shape, one
    number by default; one extent may be None, and is what is there."""
    args = {"dtype": dtype, "shape": _values.extents("frombuffer", "shape", shape)}
    return OpSpec("frombuffer", _values.field("frombuffer", field), args)


def raw(field: str) -> OpSpec:
    """The bytes as they are: ragged uint8 (what a bytes field is without any op)."""
    return OpSpec("raw", _values.field("raw", field))


def over(
    fields: Sequence[str],
    op: Callable[..., OpSpec],
    *args: Any,
    each: Mapping[str, Mapping[str, Any]] | None = None,
    **named: Any,
) -> OpSpec:
    """One op done to several fields alike, so that a mask stays over its image: `over(("image", "mask"),
    ops.random_resized_crop, 224, each={"mask": {"filter": "nearest"}})`.

    It draws once for all of them. `each`: arguments that one field has otherwise. Images that an op draws a
    window from have one size in a sample: one that has not is bad.
    """
    names = _values.fields("over", fields)
    made = op(names[0], *args, **named)
    own = {name: dict(changed) for name, changed in (each or {}).items()}
    unknown = [name for name in own if name not in names]
    if unknown:
        raise ConfigurationError(f"over: each={unknown[0]!r} is none of {', '.join(names)}")
    return replace(made, fields=names, each=own)


def user(name: str, field: str | Sequence[str], *, version: str = "", **args: Any) -> OpSpec:
    """An op of one's own, pushed with `mesh op push`: `user("augment/brighten", "image", gain=1.5)`.

    Several fields, `user("augment/crop", ("image", "mask"))`, are the inputs of one that takes several, in
    its order; what takes one value is done to each, with the same draws. Without `version` the plan pins the
    latest build that the node has when it is made.
    """
    if not _USER_OP.fullmatch(name):
        raise ConfigurationError(f"user({name!r}): expected MODULE/FUNCTION, as augment/brighten")
    if isinstance(field, str):
        return OpSpec(name, _values.field(name, field), args, version)
    names = _values.fields(name, field)
    return OpSpec(name, names[0], args, version, names)


if not TYPE_CHECKING:  # or checkers would let every name pass

    def __getattr__(name: str) -> NoReturn:
        """Only what is not there: what torchvision calls otherwise."""
        from meshsdk.ops.field_checks import torchvision_hint

        told = torchvision_hint(name)
        hint = f": {told}" if told else ""
        raise AttributeError(
            f"module 'meshsdk.ops' has no attribute {name!r}{hint}", name=name, obj=sys.modules[__name__]
        )
