"""What makes up a sample: shorthand for the `fields=` of a dataset.

Law: names only; which keys form which sample is decided by the node, by `meshwire.fields`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshsdk.errors import ConfigurationError
from meshwire.documents import PlanError
from meshwire.fields import fields_document, parse_fields, parse_source

if TYPE_CHECKING:
    from collections.abc import Mapping

CLASS = "@class"


@dataclass(frozen=True, slots=True)
class ClassOfPrefix:
    """A label from the first folder below the dataset's prefix: `train/cat/1.jpg` is a `cat`."""


def class_of_prefix() -> ClassOfPrefix:
    """The label is the folder; the same as the shorthand "@class"."""
    return ClassOfPrefix()


Field = "str | Sequence[str] | ClassOfPrefix | Mapping[str, Any]"


def select_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The protocol's form of a `fields=` argument; raises ConfigurationError naming the field at fault.

    A value is an extension ("jpg"), several with the preferred first ("jpg;jpeg;png" or a list), "@class" or
    `mesh.class_of_prefix()`, or the protocol's own object.
    """
    try:
        return fields_document(parse_fields({name: _expand(value) for name, value in fields.items()}))
    except PlanError as error:
        raise ConfigurationError(
            f'{error}; write fields={{"image": "jpg;jpeg", "label": "cls"}}, '
            'or "@class" for the folder\'s name'
        ) from error


def array_fields(fields: Mapping[str, Any] | None, *, chunks: bool = False) -> dict[str, Any]:
    """Fields of a Zarr group, names of arrays; with `chunks` their chunks, not their rows. Raises
    ConfigurationError when there are none."""
    if not fields:
        raise ConfigurationError('name the arrays: fields={"image": "images", "label": "labels"}')
    more = {"chunks": True} if chunks else {}
    return {
        name: {"array": value, **more} if isinstance(value, str) else value for name, value in fields.items()
    }


def part_fields(fields: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Fields that are parts of records, by their names: a "feature" of a TFRecord, a "column" of MDS;
    "@class" is the folder still."""
    return {
        name: _expand(value) if not isinstance(value, str) or value == CLASS else {part: value}
        for name, value in fields.items()
    }


def _expand(value: Any) -> Any:
    if isinstance(value, ClassOfPrefix) or value == CLASS:
        return {"class": "prefix"}
    if isinstance(value, str) and value.startswith("@"):
        raise ConfigurationError(
            f'there is no {value!r}: "@class" is the folder\'s name; others are extensions'
        )
    if isinstance(value, (str, list, tuple)) and any("*" in item for item in value if isinstance(item, str)):
        raise ConfigurationError(f'{value!r}: extensions have no wildcards, write them as "jpg"')
    if isinstance(value, str):
        return {"ext": [item.strip() for item in value.split(";") if item.strip()]}
    if isinstance(value, (list, tuple)):
        return {"ext": list(value)}
    return value


def missed(source: str, fields: Mapping[str, Any] | None, kind: str = "auto") -> str:
    """What may have been meant where nothing is found; nothing if that cannot be told."""
    if any(mark in source for mark in "*?{["):
        return "A dataset's URL has no wildcards: name the folder, and choose with ds.filter(…)."
    last = source.rstrip("/").rpartition("/")[2]
    if "." in last and not source.endswith(f"//{last}/"):
        folder = source.rstrip("/").removesuffix(last)
        return f"A dataset is a folder, or one archive: if {last} is a file, name its folder, {folder}."
    if any(value == "class" for value in (fields or {}).values()):
        return 'A label that is the folder has "@class", with the @.'
    if kind == "lines" and fields:
        return 'A field is an extension of files, as "jsonl"; ops.json(FIELD, PATH) takes a value of a line.'
    return ""


def check_source(url: str) -> str:
    """`s3://BUCKET/PREFIX` in its one spelling; raises ConfigurationError."""
    try:
        return str(parse_source(url, "url"))
    except PlanError as error:
        raise ConfigurationError(
            f"{error}; a dataset is a bucket's folder, as s3://photos/train{_instead(url)}"
        ) from error


def _instead(url: object) -> str:
    """What to do about data that are elsewhere."""
    text = str(url)
    if text.startswith(("/", "./", "../", "~")):
        return f". Files of this machine are uploaded first: mesh cp -r {text} s3://photos/train"
    if "://" in text and not text.startswith("s3://"):
        return ". Another store's bucket is read through one with it as its origin: mesh bucket create --help"
    return ""
