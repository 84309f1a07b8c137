"""Annotation files of one image: COCO (JSON), Pascal VOC (XML) and YOLO (text), as boxes, classes, keypoints.

Law: files come from users and are hostile: size, depth and number of elements are bounded, and XML with a
DOCTYPE, an entity or a processing instruction is refused. Anything malformed raises BadSampleError.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

import msgspec
import numpy as np

from meshd.transform.errors import BadSampleError
from meshwire.errors import S3Error
from meshwire.s3.xml_io import parse_xml
from meshwire.strict_json import shown_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.transform.image_annotations import Floats
    from meshwire.s3.xml_io import Element

FileFormat = Literal["coco", "voc", "yolo"]
FILE_FORMATS: Final[tuple[FileFormat, ...]] = ("coco", "voc", "yolo")
MAX_BYTES: Final = 4 << 20
MAX_OBJECTS: Final = 1 << 14
_MOST = 1e9


class Objects(msgspec.Struct, frozen=True):
    """The objects of one image. `corners`: [n, 4] left, top, right, bottom, in pixels; of YOLO, in shares of
    width and height.

    `classes`: names (VOC), numbers (YOLO), or numbers and names (COCO), each as text. `points`: [n, count,
    3], None without keypoints.
    """

    corners: Floats
    classes: Sequence[tuple[str, ...]]
    points: Floats | None = None


def read_numbers(data: bytes) -> Floats:
    """Parse a JSON list of numbers, or of lists of one length, three deep at most. Raises BadSampleError."""
    _check_size(data)
    document = _json(data)
    flat, shape = document, list[int]()
    while isinstance(flat, list):
        shape.append(len(flat) if not shape or not flat else len(flat) // int(np.prod(shape)))
        nested = [isinstance(each, list) for each in flat]
        if not any(nested):
            break
        if not all(nested) or len({len(each) for each in flat}) != 1:
            raise BadSampleError("the JSON lists have unequal lengths")
        flat = [number for each in flat for number in each]
    if not shape or len(shape) > 3:
        raise BadSampleError("not a JSON list of numbers, or of lists of them")
    return _numbers(flat, len(flat), "a number").reshape(shape)


@lru_cache(maxsize=4)  # boxes, classes and keypoints of a sample are read from one file
def read_objects(data: bytes, form: FileFormat, *, difficult: bool) -> Objects:
    """Parse a file. `difficult`: with objects that are marked iscrowd (COCO) or difficult (VOC).

    Raises BadSampleError. The result is shared: do not change its arrays.
    """
    _check_size(data)
    return {"coco": _coco, "voc": _voc, "yolo": _yolo}[form](data, difficult)


# --- COCO: the part of an instances.json that belongs to one image ----------------------------------------


def _coco(data: bytes, difficult: bool) -> Objects:
    document = _json(data)
    listed = document.get("annotations") if isinstance(document, dict) else document
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise BadSampleError("no list of COCO annotations")
    kept = [each for each in listed if difficult or not each.get("iscrowd")]
    _check_count(len(kept))
    boxes = _table([_numbers(each.get("bbox"), 4, "bbox") for each in kept], 4)
    points = [_points(each["keypoints"]) for each in kept if each.get("keypoints") is not None]
    if points and (len(points) != len(kept) or len({len(each) for each in points}) != 1):
        raise BadSampleError("the annotations have unequal numbers of keypoints")
    corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    return Objects(corners, [_category(each) for each in kept], np.stack(points) if points else None)


def _json(data: bytes) -> Any:
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadSampleError(f"not a JSON document: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _category(annotation: dict[str, Any]) -> tuple[str, ...]:
    number = annotation.get("category_id")
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= _MOST:
        raise BadSampleError(f"category_id is {shown_value(number)}, not an integer in 0…{_MOST:g}")
    name = annotation.get("category")
    return (str(number), name) if isinstance(name, str) else (str(number),)


def _points(given: Any) -> Floats:
    count = len(given) if isinstance(given, list) else 0
    if not count or count % 3:
        raise BadSampleError("keypoints are not a list of x, y, visibility")
    return _numbers(given, count, "keypoints").reshape(-1, 3)


def _numbers(given: Any, count: int, name: str) -> Floats:
    if not isinstance(given, list) or len(given) != count:
        raise BadSampleError(f"{name} is {shown_value(given)}, not {count} numbers")
    if any(isinstance(each, bool) or not isinstance(each, (int, float)) for each in given):
        raise BadSampleError(f"{name} is {shown_value(given)}, not {count} numbers")
    if not all(abs(each) <= _MOST for each in given):
        raise BadSampleError(f"{name} has a number outside ±{_MOST:g}")
    return np.array(given, np.float64)


# --- Pascal VOC -------------------------------------------------------------------------------------------


def _voc(data: bytes, difficult: bool) -> Objects:
    try:
        document = parse_xml(data, root="annotation", max_bytes=MAX_BYTES)
    except S3Error as error:
        raise BadSampleError(
            "not an XML file with the root `annotation`, or one with a DOCTYPE, an entity or a processing "
            "instruction, which are refused"
        ) from error
    listed = document.find_all("object")
    kept = [each for each in listed if difficult or each.child_text("difficult", "0").strip() in ("", "0")]
    _check_count(len(kept))
    corners = [_voc_corners(each) for each in kept]
    return Objects(_table(corners, 4), [(each.child_text("name").strip(),) for each in kept])


def _voc_corners(found: Element) -> Floats:
    """Return the edges of a box whose file numbers pixels from 1 and includes the last."""
    box = found.find_first("bndbox")
    if box is None:
        raise BadSampleError("an object has no bndbox")
    sides = [_number(box.child_text(name), name) for name in ("xmin", "ymin", "xmax", "ymax")]
    return np.array([sides[0] - 1, sides[1] - 1, sides[2], sides[3]], np.float64)


# --- YOLO -------------------------------------------------------------------------------------------------


def _yolo(data: bytes, difficult: bool) -> Objects:
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError as error:
        raise BadSampleError(f"not UTF-8 text: byte {error.start}") from error
    rows = [line.split() for line in lines if line.strip()]
    _check_count(len(rows))
    wrong = next((row for row in rows if len(row) != 5), None)
    if wrong is not None:
        raise BadSampleError(f"a line has {len(wrong)} values, not 5: class, center x, y, width, height")
    boxes = _table([np.array([_number(each, "a value") for each in row[1:]]) for row in rows], 4)
    half = boxes[:, 2:] / 2
    corners = np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)
    return Objects(corners, [(_class_number(row[0]),) for row in rows])


def _class_number(text: str) -> str:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise BadSampleError(f"the class {text[:40]!r} is not a number")
    return str(int(text))


# --- what they have in common -----------------------------------------------------------------------------


def _number(text: str, name: str) -> float:
    try:
        found = float(text) if len(text) <= 40 else math.nan
    except ValueError:
        found = math.nan
    if not abs(found) <= _MOST:
        raise BadSampleError(f"{name} is {text[:40]!r}, not a number")
    return found


def _table(rows: Sequence[Floats], width: int) -> Floats:
    return np.stack(rows) if rows else np.zeros((0, width))


def _check_size(data: bytes) -> None:
    if len(data) > MAX_BYTES:
        raise BadSampleError(f"annotations of {len(data)} bytes; at most {MAX_BYTES} are allowed")


def check_coordinates(numbers: Floats) -> None:
    """Raises BadSampleError for numbers that are not finite, or senseless."""
    if not (np.abs(numbers) <= _MOST).all():
        raise BadSampleError(f"a coordinate is not a number within ±{_MOST:g}")


def _check_count(count: int) -> None:
    if count > MAX_OBJECTS:
        raise BadSampleError(f"{count} objects; at most {MAX_OBJECTS} are allowed")
