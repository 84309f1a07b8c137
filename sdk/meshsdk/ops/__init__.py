"""Op constructors for `Dataset.map`: the transforms that nodes apply to a field, in order.

Law: an op here is only a name with checked arguments; the node's build of that op does the work, and its
version is part of the plan's hash. More constructors are in the other modules.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from meshsdk.errors import ConfigurationError
from meshsdk.ops import arguments as _values
from meshsdk.ops.annotation_ops import box_labels as box_labels
from meshsdk.ops.annotation_ops import boxes as boxes
from meshsdk.ops.annotation_ops import convert_boxes as convert_boxes
from meshsdk.ops.annotation_ops import keep_boxes as keep_boxes
from meshsdk.ops.annotation_ops import keypoints as keypoints
from meshsdk.ops.annotation_ops import rotate90 as rotate90
from meshsdk.ops.array_ops import as_image as as_image
from meshsdk.ops.array_ops import feature as feature
from meshsdk.ops.array_ops import frombuffer as frombuffer
from meshsdk.ops.array_ops import gather_columns as gather_columns
from meshsdk.ops.array_ops import npy as npy
from meshsdk.ops.array_ops import npz as npz
from meshsdk.ops.array_ops import safetensors as safetensors
from meshsdk.ops.array_ops import to_npy as to_npy
from meshsdk.ops.array_ops import window as window
from meshsdk.ops.array_ops import zarr as zarr
from meshsdk.ops.array_ops import zarr_chunk as zarr_chunk
from meshsdk.ops.array_ops import zarr_window as zarr_window
from meshsdk.ops.chat_ops import tokenize_chat as tokenize_chat
from meshsdk.ops.medical_ops import decode_dicom as decode_dicom
from meshsdk.ops.medical_ops import dicom_volume as dicom_volume
from meshsdk.ops.medical_ops import nifti as nifti
from meshsdk.ops.medical_ops import slide_window as slide_window
from meshsdk.ops.mixing_ops import cutmix as cutmix
from meshsdk.ops.mixing_ops import mixup as mixup
from meshsdk.ops.mixing_ops import mixup_or_cutmix as mixup_or_cutmix
from meshsdk.ops.sound_ops import decode_audio as decode_audio
from meshsdk.ops.sound_ops import gain as gain
from meshsdk.ops.sound_ops import mel_spectrogram as mel_spectrogram
from meshsdk.ops.sound_ops import mfcc as mfcc
from meshsdk.ops.sound_ops import mono as mono
from meshsdk.ops.sound_ops import normalize_volume as normalize_volume
from meshsdk.ops.sound_ops import resample as resample
from meshsdk.ops.sound_ops import spec_augment as spec_augment
from meshsdk.ops.sound_ops import spectrogram as spectrogram
from meshsdk.ops.sound_ops import trim_silence as trim_silence
from meshsdk.ops.video_ops import decode_video as decode_video
from meshwire.plan.plan_spec import OpSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_USER_OP = re.compile(r"[a-z][a-z0-9_\-]{0,39}/[A-Za-z_][A-Za-z0-9_]{0,49}")
Size = "int | Sequence[int]"
_MODES = ("rgb", "gray", "index", "unchanged")
Filter = Literal["bilinear", "bicubic", "box", "nearest", "fast"]


def decode(
    field: str,
    *,
    mode: Literal["rgb", "gray", "index", "unchanged"] = "rgb",
    dtype: str | None = None,
    channels: int | None = None,
) -> OpSpec:
    """Decode an image file: bytes of JPEG, PNG, WebP, GIF, BMP or TIFF → [height, width, channels].

    Arguments:
        mode: "rgb" → uint8 with 3 channels, "gray" → uint8 with 1. "index" → uint8 with 1: the class numbers
            of a mask, which are the indices of a palette image or the values of a gray one. "unchanged" → the
            values as stored, such as 16-bit integers or floats.
        dtype, channels: for "unchanged". Default: those of the first sample; samples with others are bad.
    """
    if mode not in _MODES:
        raise ConfigurationError(
            f"decode({field!r}): mode must be one of {', '.join(map(repr, _MODES))}, not {mode!r}"
        )
    if mode != "unchanged" and (dtype, channels) != (None, None):
        raise ConfigurationError(f"decode({field!r}): dtype and channels are for mode='unchanged'")
    stored = {name: value for name, value in (("dtype", dtype), ("channels", channels)) if value is not None}
    return OpSpec("decode", _values.field("decode", field), {"mode": mode, **stored})


def resize(field: str, size: int | Sequence[int], *, filter: Filter = "bilinear") -> OpSpec:
    """Resize an image to `size` pixels: [h, w, c] → [height, width, c] of the same dtype.

    An integer is the length of the shorter side and keeps the aspect ratio; [height, width] is the exact
    size.

    Arguments:
        filter: "bilinear", "bicubic" and "box" give the pixels of Pillow and torchvision, antialiased. Use
            "nearest" for masks: it makes no new values. "fast" is close to "bilinear" and decodes a large
            JPEG at a smaller size.
    """
    args = {"size": _values.size("resize", size), **_values.filter("resize", filter, "bilinear")}
    return OpSpec("resize", _values.field("resize", field), args)


def center_crop(field: str, size: int | Sequence[int]) -> OpSpec:
    """Crop the middle of an image to `size`×`size` pixels, or to [height, width], as torchvision does.

    A smaller image is a bad sample.
    """
    return OpSpec(
        "center_crop", _values.field("center_crop", field), {"size": _values.size("center_crop", size)}
    )


def random_resized_crop(
    field: str,
    size: int | Sequence[int],
    *,
    scale: Sequence[float] = (0.08, 1.0),
    ratio: Sequence[float] = (0.75, 1.3333),
    filter: Filter = "fast",
) -> OpSpec:
    """Crop a random part of an image and resize it to `size` pixels, or to [height, width].

    Draws are keyed by (seed, epoch, position): the same on every node and after every resume.

    Arguments:
        scale: lowest and highest share of the area that is cropped.
        ratio: lowest and highest aspect ratio, width / height.
        filter: as in `resize`; "nearest" for masks.
    """
    name = "random_resized_crop"
    low, high = _values.pair(name, "scale", scale)
    if high > 1:
        raise ConfigurationError(f"{name}: scale={list(scale)} is a share of the area and must be at most 1")
    args = {
        "size": _values.size(name, size),
        "scale": [low, high],
        "ratio": list(_values.pair(name, "ratio", ratio)),
    }
    return OpSpec(name, _values.field(name, field), args | _values.filter(name, filter, "fast"))


def hflip(field: str, p: float = 0.5) -> OpSpec:
    """Flip an image horizontally with probability `p`."""
    return OpSpec("hflip", _values.field("hflip", field), {"p": _values.probability("hflip", p)})


def to_chw(field: str) -> OpSpec:
    """Move the channels first, as torch expects: [height, width, channels] → [channels, height, width]."""
    return OpSpec("to_chw", _values.field("to_chw", field))


def to_hwc(field: str) -> OpSpec:
    """Move the channels last: [channels, height, width] → [height, width, channels]."""
    return OpSpec("to_hwc", _values.field("to_hwc", field))


def vflip(field: str, p: float = 0.5) -> OpSpec:
    """Flip an image vertically with probability `p`."""
    return OpSpec("vflip", _values.field("vflip", field), {"p": _values.probability("vflip", p)})


def random_crop(field: str, size: int | Sequence[int]) -> OpSpec:
    """Crop a random window of `size`×`size` pixels, or of [height, width], without resampling.

    A smaller image is a bad sample.
    """
    return OpSpec(
        "random_crop", _values.field("random_crop", field), {"size": _values.size("random_crop", size)}
    )


def pad(field: str, border: int | Sequence[int], *, fill: int = 0) -> OpSpec:
    """Add a border around an image, filled with the value `fill`.

    `border` is one width in pixels, or [top, right, bottom, left].
    """
    given = border if isinstance(border, int) else _values.listed("pad", "border", border)
    return OpSpec("pad", _values.field("pad", field), {"border": given, "fill": fill})


def rotate(
    field: str,
    degrees: float | Sequence[float],
    *,
    fill: int = 0,
    filter: Literal["bilinear", "nearest"] = "bilinear",
) -> OpSpec:
    """Rotate an image about its center by a random angle; the size stays, and corners are set to `fill`.

    `degrees` is x for an angle in [−x, x], or [lowest, highest]; positive angles are counter-clockwise. Use
    filter="nearest" for masks: it makes no new values.
    """
    angles = _values.numbers("rotate", "degrees", degrees)
    given = angles[0] if isinstance(degrees, Real) else angles
    if filter not in ("bilinear", "nearest"):
        raise ConfigurationError(f"rotate: filter must be 'bilinear' or 'nearest', not {filter!r}")
    nearest = {} if filter == "bilinear" else {"filter": filter}
    return OpSpec("rotate", _values.field("rotate", field), {"degrees": given, "fill": fill, **nearest})


def grayscale(field: str, p: float = 1.0) -> OpSpec:
    """Replace all three channels by the luma with probability `p`; the shape stays [height, width, 3]."""
    return OpSpec("grayscale", _values.field("grayscale", field), {"p": _values.probability("grayscale", p)})


def color_jitter(
    field: str,
    *,
    brightness: float = 0.0,
    contrast: float = 0.0,
    saturation: float = 0.0,
    hue: float = 0.0,
) -> OpSpec:
    """Change brightness, contrast, saturation and hue at random, in a random order.

    The first three are multiplied by a factor drawn from [max(0, 1−x), 1+x]. The hue is shifted by a value
    drawn from [−hue, hue], where 1 is the whole color circle.
    """
    args = {"brightness": brightness, "contrast": contrast, "saturation": saturation, "hue": hue}
    factors = {name: _values.number("color_jitter", name, value) for name, value in args.items()}
    return OpSpec("color_jitter", _values.field("color_jitter", field), factors)


def rand_augment(field: str, *, count: int = 2, strength: int = 9, fill: int = 0) -> OpSpec:
    """Apply RandAugment: `count` random operations out of fourteen, each of `strength` 0…30.

    Pixels that move into the image are set to `fill`.
    """
    args = {"count": count, "strength": strength, "fill": fill}
    return OpSpec("rand_augment", _values.field("rand_augment", field), args)


def normalize(
    field: str,
    mean: float | Sequence[float],
    std: float | Sequence[float],
    *,
    scale: float = 255.0,
    dtype: Literal["float32", "float16"] = "float32",
) -> OpSpec:
    """Compute (value / scale − mean) / std for each channel, as `dtype`.

    Images of uint8 are four times smaller on the network than float32, so prefer to normalize on the GPU:
    pass `normalize=mesh.Normalize(field)` to the Loader.
    """
    name = "normalize"
    args = {
        "mean": _values.numbers(name, "mean", mean),
        "std": _values.numbers(name, "std", std),
        "scale": [_values.number(name, "scale", scale)],
        "dtype": dtype,
    }
    return OpSpec(name, _values.field(name, field), args)


def cast(field: str, dtype: str) -> OpSpec:
    """Convert numbers to another dtype; a value that does not fit an integer dtype makes a bad sample."""
    return OpSpec("cast", _values.field("cast", field), {"dtype": dtype})


def encode(
    field: str,
    format: Literal["jpeg", "png", "webp"],
    *,
    quality: int = 90,
    subsampling: Literal["444", "422", "420"] = "420",
    lossless: bool = False,
) -> OpSpec:
    """Encode an image: uint8 [height, width, 1 or 3] → bytes of a JPEG, PNG or WebP file.

    `quality` applies to JPEG and WebP, `subsampling` (of the colors) to JPEG, `lossless` to WebP.
    """
    args = {"format": format, "quality": quality, "subsampling": subsampling, "lossless": lossless}
    return OpSpec("encode", _values.field("encode", field), args)


def int_label(field: str) -> OpSpec:
    """Parse an integer: decimal digits as text → int64."""
    return OpSpec("int_label", _values.field("int_label", field))


def text_label(field: str, classes: Sequence[str]) -> OpSpec:
    """Convert a class name to a label: text → int64, its index in `classes`."""
    names = [classes] if isinstance(classes, str) else list(classes)
    if len(names) < 2 or len(set(names)) != len(names) or not all(isinstance(name, str) for name in names):
        raise ConfigurationError("text_label: classes must be a list of two or more different names")
    return OpSpec("text_label", _values.field("text_label", field), {"classes": names})


def label_map(field: str, map: Mapping[str, int], *, other: int | None = None) -> OpSpec:
    """Map a class name (text) or the number of a label to an int64.

    The keys of `map` are names, or numbers as text. A value without a key becomes `other`; if that is None,
    the sample is bad.
    """
    args = {"map": {str(name): int(number) for name, number in map.items()}, "other": other}
    return OpSpec("label_map", _values.field("label_map", field), args)


def one_hot(field: str, classes: int, *, dtype: Literal["uint8", "float16", "float32"] = "float32") -> OpSpec:
    """One-hot encode a label or integers: […] → `dtype` […, classes], with 1 at the index of the value."""
    return OpSpec("one_hot", _values.field("one_hot", field), {"classes": classes, "dtype": dtype})


def utf8(field: str, *, form: Literal["none", "NFC", "NFKC"] = "none", strip: bool = False) -> OpSpec:
    """Validate text as UTF-8, remove a byte order mark, and apply a Unicode normal form.

    With `strip`, white space at both ends is removed. Invalid UTF-8 is a bad sample.
    """
    return OpSpec("utf8", _values.field("utf8", field), {"form": form, "strip": strip})


def json(
    field: str, path: str, *, type: Literal["text", "json", "integer", "number", "numbers"] = "text"
) -> OpSpec:
    """Extract the value at `path` from a JSON document, such as a line of a JSONL file.

    Arguments:
        path: names and indices, such as "messages[0].text"; "" for the whole document.
        type: "text" or "json" → bytes, "integer" → int64, "number" → float64, "numbers" → float64 [n].
    """
    return OpSpec("json", _values.field("json", field), {"path": path, "type": type})


def tokenize(
    field: str,
    file: str,
    *,
    special: bool = True,
    dtype: Literal["auto", "uint16", "uint32", "int32", "int64"] = "auto",
    end_of_text: str | None = None,
) -> OpSpec:
    """Tokenize text with a Hugging Face tokenizer: bytes → tokens [n].

    Arguments:
        file: the tokenizer.json, as "s3://BUCKET/KEY" (read when the plan is registered, and pinned by its
            sha256 from then on) or as "sha256:HEX".
        special: whether to add the tokenizer's special tokens.
        dtype: of the tokens; "auto" is uint16 for a vocabulary of up to 65,536 tokens, else uint32.
        end_of_text: a token of the file to put after each text, such as "<|endoftext|>".
    """
    args = {"file": _values.asset("tokenize", file), "special": special, "dtype": dtype}
    if end_of_text is not None:
        args["end_of_text"] = end_of_text
    return OpSpec("tokenize", _values.field("tokenize", field), args)


def truncate(field: str, length: int, *, side: Literal["left", "right"] = "right") -> OpSpec:
    """Keep at most `length` elements of the first axis; the excess is cut off at `side`."""
    return OpSpec("truncate", _values.field("truncate", field), {"length": length, "side": side})


def pad_to(field: str, length: int, *, value: float = 0, side: Literal["left", "right"] = "right") -> OpSpec:
    """Pad the first axis with `value` to exactly `length` elements, at `side`.

    A longer array is a bad sample; apply `truncate` first.
    """
    return OpSpec("pad_to", _values.field("pad_to", field), {"length": length, "value": value, "side": side})


def raw(field: str) -> OpSpec:
    """Deliver the bytes unchanged, as ragged uint8; this is the default for a bytes field without ops."""
    return OpSpec("raw", _values.field("raw", field))


def over(
    fields: Sequence[str],
    op: Callable[..., OpSpec],
    *args: Any,
    each: Mapping[str, Mapping[str, Any]] | None = None,
    **named: Any,
) -> OpSpec:
    """Apply one op to several fields with the same random draws, so that a mask stays aligned with its image.

    Boxes and keypoints are moved as the pixels are: by flips, crops, resize, pad and rotations.

    Arguments:
        fields: two or more: images, boxes and keypoints of one scene, or arrays alike.
        op: a constructor of this module.
        args, named: its arguments after the field.
        each: by field, arguments that differ for that field.

    Images that an op crops at random must have the same size within a sample; otherwise the sample is bad.

    Example:
        ops.over(("image", "mask"), ops.random_resized_crop, 224, each={"mask": {"filter": "nearest"}})
    """
    names = _values.fields("over", fields)
    if isinstance(op, OpSpec):
        raise ConfigurationError(
            f"over: pass the op and its arguments, not its result: ops.over({names!r}, ops.{op.op}, …)"
        )
    made = op(names[0], *args, **named)
    own = {name: dict(changed) for name, changed in (each or {}).items()}
    unknown = [name for name in own if name not in names]
    if unknown:
        raise ConfigurationError(f"over: each={unknown[0]!r} is not one of the fields {', '.join(names)}")
    return replace(made, fields=names, each=own)


def pin(op: OpSpec, version: str) -> OpSpec:
    """Return the op in an earlier version, whose pixels never change: for a job that began with it.

    A plan without pinned versions has the latest that the node has when it is registered. `mesh op show NAME`
    lists the versions of an op.

    Example:
        ops.pin(ops.decode("image"), "2")
    """
    if not isinstance(version, str) or not version:
        raise ConfigurationError(f"pin({op.op!r}): version must be a text such as '1', not {version!r}")
    return replace(op, version=version)


def user(name: str, field: str | Sequence[str], *, version: str = "", **args: Any) -> OpSpec:
    """Apply an op of your own, pushed with `mesh op push`.

    Arguments:
        name: "MODULE/FUNCTION".
        field: one field, or several. Several are the inputs of an op with that many, in its order; an op with
            one input is applied to each of them, with the same draws.
        version: the build to use. Default: the plan pins the latest one that the node has at registration.
        args: the op's own arguments.

    Example:
        ops.user("augment/brighten", "image", gain=1.5)
        ops.user("augment/crop", ("image", "mask"))
    """
    if not _USER_OP.fullmatch(name):
        raise ConfigurationError(f"user({name!r}): expected MODULE/FUNCTION, such as augment/brighten")
    if isinstance(field, str):
        return OpSpec(name, _values.field(name, field), args, version)
    names = _values.fields(name, field)
    return OpSpec(name, names[0], args, version, names)


if not TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> NoReturn:
        """Raise AttributeError, with a hint for names of torchvision."""
        from meshsdk.ops.field_checks import torchvision_hint

        told = torchvision_hint(name)
        hint = f": {told}" if told else ""
        raise AttributeError(
            f"module 'meshsdk.ops' has no attribute {name!r}{hint}", name=name, obj=sys.modules[__name__]
        )
