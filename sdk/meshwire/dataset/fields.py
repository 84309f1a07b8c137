"""Fields of a dataset, and how names of objects and members form samples (WebDataset's rule).

Law: pure functions of names; content is never examined.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from meshwire.dataset.archive_keys import archive_kind
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
MAX_FIELDS = 64
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """`ext`: extensions, lower case and without the first dot, the preferred first (kind `bytes`);
    `label_of`: where a class label comes from (kind `label`): "prefix", the first folder below the source;
    `array`: the folder of a Zarr array below the source, None for what is no row of one (with `chunks`, no
    chunk of one); `feature`: the name
    of a `tf.Example`'s feature ("": the whole record), None for what is none; `column`: the same of MDS.
    """

    name: str
    kind: FieldKind
    ext: tuple[str, ...] = ()
    label_of: str = ""
    array: str | None = None
    chunks: bool = False
    feature: str | None = None
    column: str | None = None

    @property
    def part(self) -> str:
        """What it is of a record: the feature's or column's name."""
        return self.feature or self.column or ""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a dataset lies: a bucket and a key prefix (empty, a folder ending in `/`, or one `.tar`)."""

    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


def parse_source(text: Any, path: str = "source") -> Source:
    """`s3://BUCKET/PREFIX`; a prefix is a folder, with or without its last `/`, or one archive. Raises
    PlanError."""
    address = checked_text(text, path, at_most=2048)
    bucket, _, prefix = address.removeprefix("s3://").partition("/")
    if not address.startswith("s3://") or not bucket:
        raise PlanError(path, f"expected s3://BUCKET/PREFIX, got {shown_value(address)}")
    if prefix and not prefix.endswith("/") and archive_kind(prefix) is None:
        prefix += "/"
    return Source(bucket, prefix)


def parse_fields(source: bytes | str | Mapping[str, Any]) -> dict[str, FieldSpec]:
    """Fields by name, in order of name: `{"image": {"ext": ["jpg", "jpeg"]}, "label": {"class": "prefix"}}`.

    An extension may stand alone, as `"jpg"` for `{"ext": ["jpg"]}`. At least one field must be of kind
    `bytes`. Raises PlanError with the path of the bad field.
    """
    value = (
        read_json(source, "fields")
        if isinstance(source, (bytes, str))
        else checked_json(dict(source), "fields")
    )
    if not isinstance(value, dict) or not value:
        raise PlanError("fields", 'name at least one, as {"image": {"ext": ["jpg", "jpeg"]}}')
    if len(value) > MAX_FIELDS:
        raise PlanError("fields", f"{len(value)} fields; a dataset holds at most {MAX_FIELDS}")
    fields = {name: _parse_field(name, value[name]) for name in sorted(value)}
    if all(field.kind != "bytes" for field in fields.values()):
        raise PlanError("fields", 'a dataset needs a field with bytes, as {"image": {"ext": ["jpg"]}}')
    return fields


def _parse_field(name: str, value: Any) -> FieldSpec:
    path = join_path("fields", name)
    if not _NAME.fullmatch(name) or name.startswith("__"):
        raise PlanError(
            path, "a field's name has letters, digits and _, at most 64, and does not begin with __"
        )
    if isinstance(value, (str, list)):
        value = {"ext": value}
    document = checked_object(value, path, ("ext", "class", "array", "chunks", "feature", "column"))
    if len(document.keys() - {"chunks"}) != 1 or ("chunks" in document and "array" not in document):
        raise PlanError(
            path,
            'give one of {"ext": [...]}, {"class": "prefix"}, {"array": "name"}, {"feature": "name"} and '
            '{"column": "name"}',
        )
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
        return FieldSpec(name, "bytes", column=column)
    if "class" in document:
        label_of = checked_choice(document["class"], join_path(path, "class"), ("prefix",))
        return FieldSpec(name, "label", label_of=label_of)
    return FieldSpec(name, "bytes", ext=_parse_extensions(document["ext"], join_path(path, "ext")))


def _parse_extensions(value: Any, path: str) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not 1 <= len(items) <= MAX_FIELDS:
        raise PlanError(path, f"expected 1…{MAX_FIELDS} extensions, got {shown_value(value)}")
    found = []
    for index, item in enumerate(items):
        ext = checked_text(item, f"{path}[{index}]", at_most=100).removeprefix(".").lower()
        if not ext or "/" in ext or "\0" in ext:
            raise PlanError(f"{path}[{index}]", f'{shown_value(item)} is no extension; write it as "jpg"')
        found.append(ext)
    return tuple(dict.fromkeys(found))


def fields_document(fields: Mapping[str, FieldSpec]) -> dict[str, Any]:
    """The fields as plain JSON values; `parse_fields` gives them back."""
    return {name: _field_document(spec) for name, spec in sorted(fields.items())}


def _field_document(spec: FieldSpec) -> dict[str, Any]:
    if spec.array is not None:
        return {"array": spec.array} | ({"chunks": True} if spec.chunks else {})
    if spec.feature is not None:
        return {"feature": spec.feature}
    if spec.column is not None:
        return {"column": spec.column}
    return {"ext": list(spec.ext)} if spec.kind == "bytes" else {"class": spec.label_of}


def sample_key(key: str) -> tuple[str, str]:
    """(stem, extension) of a key or member name: cut at the first dot of its last component, as WebDataset
    does.

    `a/b/0001.seg.png` → (`a/b/0001`, `seg.png`). The extension is lower case, and empty when there is none
    (no dot, or a name that begins with one).
    """
    start = key.rfind("/") + 1
    dot = key.find(".", start)
    if dot <= start:
        return key, ""
    return key[:dot], key[dot + 1 :].lower()


def class_name(key: str, prefix: str) -> str | None:
    """The first folder of `key` below `prefix`; None when the key lies directly in it, or outside."""
    if not key.startswith(prefix):
        return None
    below = key[len(prefix) :].lstrip("/")
    name, slash, _ = below.partition("/")
    return name if slash and name else None
