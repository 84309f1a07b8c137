"""Checks ops against the fields of a dataset, and adapts them when fields are selected or renamed.

Law: pure. An op on a missing field or a class label is rejected here, with the nearest existing name.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import TYPE_CHECKING

from meshsdk.errors import ConfigurationError
from meshsdk.ops.annotation_ops import JOINT_OPS, SIZED_OPS
from meshwire.plan.op_declarations import is_user_op
from meshwire.plan.plan_spec import OpSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshsdk.client.native_api import FieldInfo

_LONGEST = 40  # characters of an argument in `op_text`
# Transforms of torchvision and torchaudio, and the corresponding ops.
_TORCHVISION = {
    "Resize": "resize",
    "CenterCrop": "center_crop",
    "RandomCrop": "random_crop",
    "RandomResizedCrop": "random_resized_crop",
    "RandomHorizontalFlip": "hflip",
    "RandomVerticalFlip": "vflip",
    "RandomRotation": "rotate",
    "Pad": "pad",
    "ColorJitter": "color_jitter",
    "Grayscale": "grayscale",
    "RandomGrayscale": "grayscale",
    "RandAugment": "rand_augment",
    "MixUp": "mixup",
    "CutMix": "cutmix",
    "ToTensor": "to_chw",
    "PILToTensor": "to_chw",
    "ToImage": "to_chw",
    "Normalize": "normalize",
    "ToDtype": "cast",
    "ConvertImageDtype": "cast",
    "SanitizeBoundingBoxes": "keep_boxes",
    "ConvertBoundingBoxFormat": "convert_boxes",
    # Of torchaudio, with other argument names.
    "Resample": "resample",
    "Spectrogram": "spectrogram",
    "MelSpectrogram": "mel_spectrogram",
    "MFCC": "mfcc",
    "Vol": "gain",
    "FrequencyMasking": "spec_augment",
    "TimeMasking": "spec_augment",
}


def checked_ops(ops: Sequence[object], fields: Mapping[str, FieldInfo]) -> tuple[OpSpec, ...]:
    """Return the ops, if each is an op and its fields exist and accept ops. Raises ConfigurationError."""
    return tuple(_check_op(op, fields) for op in ops)


def _check_op(op: object, fields: Mapping[str, FieldInfo]) -> OpSpec:
    if not isinstance(op, OpSpec):
        raise ConfigurationError(
            f"map takes ops, such as ds.map(ops.decode('image')); got {type(op).__name__}. {_advice(op)}"
        )
    for name in op.all_fields:
        _check_field(op.op, name, fields)
    return op


def _advice(given: object) -> str:
    """Return what to write instead of a value that is not an op."""
    if isinstance(given, (list, tuple)):
        return "Unpack the list: ds.map(*those)"
    if getattr(given, "__module__", "").startswith("meshsdk.ops"):
        return f"Call the op with its field: ops.{getattr(given, '__name__', 'decode')}('image')"
    if hint := torchvision_hint(type(given).__name__):
        return hint.capitalize()
    if not callable(given):
        return "Ops are made by the functions of meshsdk.ops"
    name = getattr(given, "__name__", "")
    name = name if name.isidentifier() else "FUNCTION"
    return (
        "A Python function runs on nodes once its file is pushed, `mesh op push FILE.py`, as an op, "
        f"ops.user('FILE/{name}', FIELD); loader.map(function) calls one here, on every batch"
    )


def torchvision_hint(name: str) -> str:
    """Return what to write instead of a torchvision transform; "" for other names."""
    if name == "Compose":
        return "map composes ops in order: ds.map(ops.decode('image'), ops.hflip('image'))"
    found = _TORCHVISION.get(name)
    return f"write ops.{found}(…), with the field first, such as ops.hflip('image', p=0.5)" if found else ""


def _check_field(op: str, name: str, fields: Mapping[str, FieldInfo]) -> None:
    field = fields.get(name)
    if field is None:
        near = difflib.get_close_matches(name, fields, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigurationError(f"{op}: no field {name!r}; this dataset has {', '.join(fields)}{hint}")
    if field.kind == "label":
        raise ConfigurationError(f"{op}: {name!r} is a class label, which is already int64 and takes no op")


def narrow_op(op: OpSpec, fields: Sequence[str]) -> OpSpec | None:
    """Return the op without the fields that are not selected; None if no field is left.

    Raises ConfigurationError for a user op, or one on annotations, that would lose some of its fields.
    """
    left = tuple(name for name in op.all_fields if name in fields)
    if len(left) == len(op.all_fields):
        return op
    if not left:
        return None
    if op.op in SIZED_OPS and op.field not in left:
        return None  # the image that is left is as it was
    if is_user_op(op.op) or op.op in SIZED_OPS or (op.op in JOINT_OPS and op.field not in left):
        raise ConfigurationError(
            f"{op.op} takes the fields {', '.join(op.all_fields)}: select all of them, or map it later"
        )
    if len(left) == 1:
        return op.for_field(left[0])
    each = {name: args for name, args in op.each.items() if name in left}
    return dataclasses.replace(op, field=left[0], fields=left, each=each)


def rename_op_fields(op: OpSpec, names: Mapping[str, str]) -> OpSpec:
    """Return the op with renamed fields."""
    fields = tuple(names.get(name, name) for name in op.fields)
    each = {names.get(name, name): args for name, args in op.each.items()}
    return dataclasses.replace(op, field=names.get(op.field, op.field), fields=fields, each=each)


def op_text(op: OpSpec) -> str:
    """Format the op as a call, with long arguments shortened."""
    args = [f"{name}={_cut(repr(value))}" for name, value in op.args.items()]
    return f"{op.op}({', '.join([*map(repr, op.all_fields), *args, *(['…'] if op.each else [])])})"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
