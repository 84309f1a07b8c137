"""Fields of a dataset, and how names of objects and members form samples (WebDataset's rule).

Law: pure functions of names; content is never examined.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from meshwire.dataset.archive_paths import archive_kind
from meshwire.strict_json import (
    PlanError,
    checked_choice,
    checked_json,
    checked_object,
    checked_text,
    join_path,
    read_json,
    shown_value,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

FieldKind = Literal["bytes", "label"]
ColumnView = Literal["value", "valid", "ids"]
"""Of a column: its values, whether they are there (False for a null), or the ids of its distinct texts."""
MAX_FIELDS = 64
MAX_PIECES = 4096
"""Pieces of all fields of a dataset."""
_PARTS = ("ext", "class", "array", "feature", "column", "piece")
_OF_ARRAYS, _OF_COLUMNS = ("chunks",), ("as", "dtype", "shape")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """A field of a dataset. `ext`: extensions, lower case and without the first dot, the preferred first
    (kind `bytes`); `label_of`: source of a class label (kind `label`): "prefix" is the first folder below
    the source; `array`: folder of a Zarr array below the source, None if the field is not a row of one
    (with `chunks`, not a chunk of one); `feature`: name of a `tf.Example` feature ("": the whole record),
    None if the field is not one; `column`: likewise for MDS and tables. Of a table's column: `view`, what is
    delivered of it; `dtype` of its elements ("": bytes) and `shape` of a value (None: of any length).
    `piece_of`: the field whose bytes this one continues, "" for a field of its own.
    """

    name: str
    kind: FieldKind
    ext: tuple[str, ...] = ()
    label_of: str = ""
    array: str | None = None
    chunks: bool = False
    feature: str | None = None
    column: str | None = None
    view: ColumnView = "value"
    dtype: str = ""
    shape: tuple[int | None, ...] = ()
    piece_of: str = ""

    @property
    def part(self) -> str:
        """The part of a record that the field reads: the name of the feature or column."""
        return self.feature or self.column or ""


@dataclass(frozen=True, slots=True)
class Source:
    """The location of a dataset: a bucket and a key prefix (empty, a folder ending in `/`, or one
    archive)."""

    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


def parse_source(text: Any, path: str = "source") -> Source:
    """Parse `s3://BUCKET/PREFIX`; a prefix is a folder, with or without its final `/`, or one archive.
    Raises PlanError."""
    address = checked_text(text, path, at_most=2048)
    bucket, _, prefix = address.removeprefix("s3://").partition("/")
    if not address.startswith("s3://") or not bucket:
        raise PlanError(path, f"expected s3://BUCKET/PREFIX, got {shown_value(address)}")
    if prefix and not prefix.endswith("/") and archive_kind(prefix) is None:
        prefix += "/"
    return Source(bucket, prefix)


def parse_fields(source: bytes | str | Mapping[str, Any]) -> dict[str, FieldSpec]:
    """Parse fields by name, in order of name: `{"image": {"ext": ["jpg", "jpeg"]}, "label": {"class":
    "prefix"}}`.

    A plain extension is allowed: `"jpg"` for `{"ext": ["jpg"]}`. At least one field must be of kind
    `bytes`. Raises PlanError with the path of the bad field.
    """
    value = (
        read_json(source, "fields")
        if isinstance(source, (bytes, str))
        else checked_json(dict(source), "fields")
    )
    if not isinstance(value, dict) or not value:
        raise PlanError("fields", 'name at least one, such as {"image": {"ext": ["jpg", "jpeg"]}}')
    fields = {name: _parse_field(name, value[name]) for name in sorted(value)}
    own = sum(not field.piece_of for field in fields.values())
    if own > MAX_FIELDS or len(fields) - own > MAX_PIECES:
        raise PlanError("fields", f"{own} fields; a dataset can have at most {MAX_FIELDS}")
    for field in fields.values():
        whole = fields.get(field.piece_of)
        if field.piece_of and (whole is None or whole.kind != "bytes" or whole.piece_of):
            raise PlanError(join_path("fields", field.name), "a piece of a field that does not exist")
    if all(field.kind != "bytes" for field in fields.values()):
        raise PlanError("fields", 'a dataset needs a field with bytes, such as {"image": {"ext": ["jpg"]}}')
    return fields


def _parse_field(name: str, value: Any) -> FieldSpec:
    path = join_path("fields", name)
    if not _NAME.fullmatch(name) or name.startswith("__"):
        raise PlanError(path, "a field name has at most 64 letters, digits and _, and does not begin with __")
    if isinstance(value, (str, list)):
        value = {"ext": value}
    document = checked_object(value, path, (*_PARTS, *_OF_ARRAYS, *_OF_COLUMNS))
    alone = document.keys() - set(_OF_ARRAYS if "array" in document else ())
    alone -= set(_OF_COLUMNS if "column" in document else ())
    if len(alone) != 1 or not alone <= set(_PARTS):
        raise PlanError(
            path,
            'give one of {"ext": [...]}, {"class": "prefix"}, {"array": "name"}, {"feature": "name"} and '
            '{"column": "name"}',
        )
    if "piece" in document:
        whole = checked_text(document["piece"], join_path(path, "piece"), at_most=64)
        return FieldSpec(name, "bytes", piece_of=whole)
    if "array" in document:
        folder = checked_text(document["array"], join_path(path, "array"), at_most=500).strip("/")
        chunks = document.get("chunks", False)
        if not isinstance(chunks, bool):
            raise PlanError(join_path(path, "chunks"), f"expected true or false, got {shown_value(chunks)}")
        return FieldSpec(name, "bytes", array=folder, chunks=chunks)
    if "feature" in document:
        feature = checked_text(document["feature"], join_path(path, "feature"), at_most=500)
        return FieldSpec(name, "bytes", feature=feature)
    if "column" in document:
        column = checked_text(document["column"], join_path(path, "column"), at_most=500)
        return _column_field(name, column, document, path)
    if "class" in document:
        label_of = checked_choice(document["class"], join_path(path, "class"), ("prefix",))
        return FieldSpec(name, "label", label_of=label_of)
    return FieldSpec(name, "bytes", ext=_parse_extensions(document["ext"], join_path(path, "ext")))


def _column_field(name: str, column: str, document: Mapping[str, Any], path: str) -> FieldSpec:
    views: tuple[ColumnView, ...] = get_args(ColumnView)
    view = cast("ColumnView", checked_choice(document.get("as", "value"), join_path(path, "as"), views))
    if view == "ids":
        return FieldSpec(name, "label", column=column, view="ids")
    dtype = checked_text(document.get("dtype", "") or "", join_path(path, "dtype"), at_most=20)
    shape = document.get("shape", [])
    extents = shape if isinstance(shape, list) and len(shape) <= 8 else [0]
    if not all(extent is None or (type(extent) is int and extent > 0) for extent in extents):
        raise PlanError(join_path(path, "shape"), f"expected a list of extents, got {shown_value(shape)}")
    return FieldSpec(name, "bytes", column=column, view=view, dtype=dtype, shape=tuple(extents))


def _parse_extensions(value: Any, path: str) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not 1 <= len(items) <= MAX_FIELDS:
        raise PlanError(path, f"expected 1…{MAX_FIELDS} extensions, got {shown_value(value)}")
    found = []
    for index, item in enumerate(items):
        ext = checked_text(item, f"{path}[{index}]", at_most=100).removeprefix(".").lower()
        if not ext or "/" in ext or "\0" in ext:
            raise PlanError(f"{path}[{index}]", f'{shown_value(item)} is not an extension; write it as "jpg"')
        found.append(ext)
    return tuple(dict.fromkeys(found))


def fields_document(fields: Mapping[str, FieldSpec]) -> dict[str, Any]:
    """Return the fields as plain JSON values; `parse_fields` restores them."""
    return {name: _field_document(spec) for name, spec in sorted(fields.items())}


def _field_document(spec: FieldSpec) -> dict[str, Any]:
    if spec.piece_of:
        return {"piece": spec.piece_of}
    if spec.array is not None:
        return {"array": spec.array} | ({"chunks": True} if spec.chunks else {})
    if spec.feature is not None:
        return {"feature": spec.feature}
    if spec.column is not None:
        view = {} if spec.view == "value" else {"as": spec.view}
        return {"column": spec.column, **view} | (
            {"dtype": spec.dtype, "shape": list(spec.shape)} if spec.dtype else {}
        )
    return {"ext": list(spec.ext)} if spec.kind == "bytes" else {"class": spec.label_of}


def sample_key(key: str) -> tuple[str, str]:
    """Split a key or member name into (stem, extension) at the first dot of its last component, as
    WebDataset does.

    `a/b/0001.seg.png` → (`a/b/0001`, `seg.png`). The extension is in lower case, and empty if there is none
    (no dot, or a name that begins with one).
    """
    start = key.rfind("/") + 1
    dot = key.find(".", start)
    if dot <= start:
        return key, ""
    return key[:dot], key[dot + 1 :].lower()


def class_name(key: str, prefix: str) -> str | None:
    """Return the first folder of `key` below `prefix`, or None if the key is directly in it or outside of
    it."""
    if not key.startswith(prefix):
        return None
    below = key[len(prefix) :].lstrip("/")
    name, slash, _ = below.partition("/")
    return name if slash and name else None
