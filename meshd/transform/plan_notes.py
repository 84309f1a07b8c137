"""Notes on a plan that can run but probably does not do what its author means.

Law: pure. A note says what happens to which field and what to write instead; a plan with notes is a valid
plan. Subjects: images that lose values when they are decoded, filters that mix class numbers, random draws
that move one of several images, annotations that do not follow their image, numbers of YOLO that are no
shares, and messages without roles.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec

from meshd.transform import registry
from meshd.transform.builtin.array_files import read_npy_header
from meshd.transform.builtin.text import parse_json_path
from meshd.transform.errors import BadSampleError
from meshwire.formats.image_headers import read_image_header
from meshwire.strict_json import PlanError, shown_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from meshwire.formats.image_headers import ImageHeader
    from meshwire.plan.plan_spec import OpSpec, PlanSpec

_MASK_NAMES = ("mask", "seg", "annot", "label")
_ANNOTATING = ("boxes", "keypoints")
"""Ops whose first field is an annotation of the image in the second."""
_IMAGE_SOURCES = ("decode", "decode_dicom", "as_image")
"""Ops that make an image of something else."""
_FLAT = 0.25
"""Bytes a pixel below which a palette image is rather a drawing or a mask than a photograph."""


class _FieldOp(msgspec.Struct, frozen=True):
    """An op of the plan as one field has it. `shared`: the fields that draw with it."""

    op: OpSpec
    shared: tuple[str, ...]

    @property
    def filter(self) -> str:
        """The name of its filter; "" if it has none."""
        definition = registry.find(self.op.op, self.op.version, "")
        defaults = {parameter.name: parameter.default for parameter in definition.parameters}
        return str(self.op.args.get("filter", defaults.get("filter", "")))


def plan_notes(spec: PlanSpec, first: Callable[[str], bytes]) -> tuple[str, ...]:
    """Return the notes on a spec whose versions are filled in.

    `first` reads the bytes of a field of the first sample (KeyError if it is not a bytes field).
    """
    fields: dict[str, list[_FieldOp]] = {}
    for op in spec.ops:
        for name in (op.field,) if op.op in _ANNOTATING else op.all_fields:  # which leave the image as it is
            fields.setdefault(name, []).append(_FieldOp(op.for_field(name), op.fields))
    return (
        *(note for name, ops in fields.items() for note in _decoding_notes(name, ops, first)),
        *(note for name, ops in fields.items() for note in _filter_notes(name, ops)),
        *_pairing_notes(fields, first),
        *_annotation_notes(spec),
        *_dropping_notes(spec),
        *_share_notes(spec, first),
        *_chat_notes(spec, first),
    )


def decode_mode(spec: PlanSpec, field: str) -> str:
    """Return the mode in which the plan decodes an image field; "" if it does not."""
    return next(
        (
            str(op.for_field(field).args.get("mode", "rgb"))
            for op in spec.ops
            if op.op == "decode" and field in op.all_fields
        ),
        "",
    )


def sound_format(spec: PlanSpec, field: str) -> dict[str, int]:
    """Return rate (hertz) and channels of a sound field after its ops on sounds; empty for other fields."""
    found: dict[str, int] = {}
    for op in spec.ops:
        args = op.for_field(field).args if field in op.all_fields else {}
        if op.op == "decode_audio" and field in op.all_fields:
            found = {"rate": int(args["rate"]), "channels": int(args["channels"])}
        elif op.op in ("resample", "mono") and found and field in op.all_fields:
            found |= {"rate": int(args["rate"])} if op.op == "resample" else {"channels": 1}
    return found


def _decoding_notes(name: str, ops: list[_FieldOp], first: Callable[[str], bytes]) -> Iterator[str]:
    decode = ops[0].op
    mode = decode.args.get("mode", "rgb")
    if decode.op != "decode" or mode not in ("rgb", "gray"):
        return
    try:
        data = first(name)
    except KeyError:
        return
    header = read_image_header(data)
    if header is None:
        return
    lost = _describe_loss(name, header, mode, len(data)) or _clipping_note(header, decode.version)
    if lost:
        yield f"{name!r}, decoded as {mode}: {lost}"


def _describe_loss(name: str, header: ImageHeader, mode: str, size: int) -> str:
    """Return what decoding to 0…255 changes of the values stored, and what keeps them; "" if nothing."""
    index = f"ops.decode({name!r}, mode='index')"
    if header.palette and (mode == "gray" or _looks_like_a_mask(name, header, size)):
        return (
            "the first sample has a palette, and its indices become colors. If they are class numbers, keep "
            f"them with {index}"
        )
    if header.kind == "uint" and 8 < header.bits <= 16:
        return (
            f"the first sample has {header.bits} bits a value, of which the upper 8 are kept. Keep all with "
            f"ops.decode({name!r}, mode='unchanged')"
        )
    if header.kind == "uint" and header.bits < 8 and not header.palette and header.format != "jpeg":
        most = (1 << header.bits) - 1
        return (
            f"the first sample has values 0…{most}, which are scaled to 0…255. If they are class numbers, "
            f"keep "
            f"them with {index}"
        )
    return ""


def _looks_like_a_mask(name: str, header: ImageHeader, size: int) -> bool:
    named = any(part in name.lower() for part in _MASK_NAMES)
    return named or header.class_colors or header.bits < 8 or size < _FLAT * header.height * header.width


def _clipping_note(header: ImageHeader, version: str) -> str:
    if version not in ("1", "2") or (header.kind == "uint" and header.bits <= 16):
        return ""
    return (
        f"the first sample has {header.dtype}, which version {version} of decode clips to 0…255. Register "
        f"the plan "
        "without a version, and decode with mode='unchanged'"
    )


def _filter_notes(name: str, ops: list[_FieldOp]) -> Iterator[str]:
    if ops[0].op.op != "decode" or ops[0].op.args.get("mode") != "index":
        return
    for each in ops[1:]:
        if each.filter not in ("", "nearest") or (each.op.op, each.op.version) == ("rotate", "1"):
            fix = f"each={{{name!r}: {{'filter': 'nearest'}}}}" if each.shared else "filter='nearest'"
            yield (
                f"{each.op.op} of {name!r} computes new numbers between the class numbers of a mask: pass "
                f"{fix}"
            )


def _pairing_notes(fields: dict[str, list[_FieldOp]], first: Callable[[str], bytes]) -> Iterator[str]:
    """Note the ops that move a field at random without the other images of the sample, or without the arrays
    that have the size of one."""
    images = [
        name
        for name, ops in fields.items()
        if any(_places(each) for each in ops) and not any(each.op.op in _ANNOTATING for each in ops)
    ]
    alone = {
        name: [
            each.op.op for each in fields[name] if _moves(each) and len(set(each.shared) & set(images)) < 2
        ]
        for name in images
    }
    alone = {name: ops for name, ops in alone.items() if ops}
    if not alone:
        return
    arrays = [name for name, ops in fields.items() if ops[0].op.op == "npy" and name not in images]
    if arrays:
        sizes = {_image_size(name, fields[name], first) for name in alone} - {None}
        arrays = [name for name in arrays if _array_size(name, first) in sizes]
    images += arrays
    if len(images) < 2:
        return
    pairs = "; ".join(f"{' and '.join(dict.fromkeys(ops))} of {name!r}" for name, ops in alone.items())
    op = next(iter(alone.values()))[0]
    pair = ", ".join(map(repr, images))
    before = f", after {' and '.join(f'ops.as_image({name!r})' for name in arrays)}" if arrays else ""
    yield (
        f"draws of their own: {pairs}. If {' and '.join(map(repr, images))} show the same scene, they no "
        f"longer "
        f"match: ops.over(({pair}), ops.{op}, …) draws once for all of them{before}"
    )


def _image_size(name: str, ops: list[_FieldOp], first: Callable[[str], bytes]) -> tuple[int, ...] | None:
    """Return (height, width) of the first sample's image file; None of anything else."""
    if ops[0].op.op != "decode":
        return None
    try:
        header = read_image_header(first(name))
    except KeyError:
        return None
    return None if header is None else (header.height, header.width)


def _array_size(name: str, first: Callable[[str], bytes]) -> tuple[int, ...]:
    """Return the first two extents of the first sample's array."""
    try:
        return read_npy_header(first(name))[0][:2]
    except (KeyError, BadSampleError):
        return ()


def _places(each: _FieldOp) -> bool:
    """Return whether the value of the field has places that a mask could refer to."""
    return each.op.op in _IMAGE_SOURCES or _moves(each)


def _moves(each: _FieldOp) -> bool:
    definition = registry.find(each.op.op, each.op.version, "")
    if not definition.moves or each.op.args.get("p") == 0:
        return False
    if each.op.args.get("turns") is not None:
        return False
    return str(each.op.args.get("at", "random")) == "random"


def _annotation_notes(spec: PlanSpec) -> Iterator[str]:
    """Note the ops that move an image without its boxes or keypoints, or those without their image."""
    image_of: dict[str, str] = {}
    for op in spec.ops:
        if op.op in _ANNOTATING and len(op.fields) == 2:
            image_of[op.fields[0]] = op.fields[1]
            continue
        definition = registry.find(op.op, op.version, "")
        moves = definition.moves or hasattr(definition.build, "motion")
        for annotation, image in image_of.items():
            both = {annotation, image} & set(op.all_fields)
            if definition.is_mixing and image in both:
                yield f"{op.op} of {image!r} does not mix {annotation!r}: it has the objects of one image"
            elif moves and len(both) == 1:
                still = next(iter({annotation, image} - both))
                yield f"{op.op} moves {next(iter(both))!r}, but not {still!r}{_remedy(op, image, annotation)}"


def _remedy(op: OpSpec, image: str, annotation: str) -> str:
    if not hasattr(registry.find(op.op, op.version, "").build, "motion"):
        return ", which cannot follow: leave it out, or use an op that ops.over can apply to both"
    return f", which belongs to it: ops.over(({image!r}, {annotation!r}), ops.{op.op}, …) moves both"


def _dropping_notes(spec: PlanSpec) -> Iterator[str]:
    """Note the fields with a row for each box that keep theirs when boxes are dropped."""
    rowed = {op.field for op in spec.ops if op.op in (*_ANNOTATING, "box_labels")}
    for op in spec.ops:
        left = sorted(rowed - set(op.all_fields))
        if op.op == "keep_boxes" and left:
            names, kept = ", ".join(map(repr, (*op.all_fields, *left))), " and ".join(map(repr, left))
            yield (
                f"keep_boxes drops rows of {op.field!r}, but not of {kept}. If those have one for each box: "
                f"ops.keep_boxes({names}, …)"
            )


_MOST_SHARE = 1.01
"""What a share of a width or height may be, for rounded numbers."""


def _share_notes(spec: PlanSpec, first: Callable[[str], bytes]) -> Iterator[str]:
    """Note files of YOLO with other numbers than shares, whose boxes are clipped to nothing."""
    for op in spec.ops:
        if op.op != "boxes" or op.args.get("source") != "yolo":
            continue
        try:
            lines = first(op.field).decode("utf-8", "replace").splitlines()
            found = [float(value) for line in lines for value in line.split()[1:5]]
        except (KeyError, ValueError):
            continue
        wrong = next((value for value in found if not 0 <= value <= _MOST_SHARE), None)
        if wrong is not None:
            yield (
                f"{op.field!r}: the first sample has {wrong:g}, but the numbers of YOLO are shares of the "
                "image's width and height, 0 to 1, and boxes are clipped to the image: write shares"
            )


def _chat_notes(spec: PlanSpec, first: Callable[[str], bytes]) -> Iterator[str]:
    """Note conversations without roles: a template that reads them renders empty messages, not an error."""
    for number, op in enumerate(spec.ops):
        if op.op != "tokenize_chat":
            continue
        before = [each for each in spec.ops[:number] if op.field in each.all_fields]
        if any(each.op != "json" for each in before):
            continue
        try:
            found = json.loads(first(op.field))
            for step in (step for each in before for step in parse_json_path(each.args["path"], "path")):
                found = found[step]
            message = (found if isinstance(found, list) else found["messages"])[0]
        except (KeyError, IndexError, TypeError, ValueError, RecursionError, PlanError):
            continue  # a bad sample, which is told as such
        if isinstance(message, dict) and "role" not in message:
            names = ", ".join(map(shown_value, list(message)[:4]))
            yield (
                f"{op.field!r}: the messages of the first sample have {names}, but no 'role'. A template "
                "that reads 'role' and 'content' renders them as empty: rename these, by an op of your own "
                "before it or in the files"
            )
            return
