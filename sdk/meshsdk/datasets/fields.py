"""Fields of a sample: the `fields=` shorthand, and inference from the names under a source.

Law: names only; the node forms samples, by `meshwire.fields`. Inferred fields are always visible, in
`repr(ds)` and in `mesh head`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshsdk.errors import ConfigurationError, NotFoundError, ServerError, server_error
from meshwire.dataset.archive_keys import archive_kind, compression_kind, uncompressed_name
from meshwire.dataset.fields import (
    MAX_FIELDS,
    class_name,
    fields_document,
    parse_fields,
    parse_source,
    sample_key,
)
from meshwire.formats import tar
from meshwire.formats.tf_example import ExampleError, parse_features
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from meshsdk.client.s3_client import Client


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


def missing_field_hint(source: str, fields: Mapping[str, Any] | None, kind: str = "auto") -> str:
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
            f"{error}; a dataset is a bucket's folder, as s3://photos/train{_url_hint(url)}"
        ) from error


def _url_hint(url: object) -> str:
    """What to do about data that are elsewhere."""
    text = str(url)
    if text.startswith(("/", "./", "../", "~")):
        return f". Files of this machine are uploaded first: mesh cp -r {text} s3://photos/train"
    if "://" in text and not text.startswith("s3://"):
        return ". Another store's bucket is read through one with it as its origin: mesh bucket create --help"
    return ""


_IMAGES = ("jpg", "jpeg", "png", "webp")
_LABELS = ("cls", "label")
# What files of these extensions are full of, and the kind that makes samples of that.
_WITHIN = {
    "jsonl": ("line", "lines"),
    "ndjson": ("line", "lines"),
    "tfrec": ("record", "tfrecord"),
    "tfrecord": ("record", "tfrecord"),
    "tfrecords": ("record", "tfrecord"),
    "mds": ("row", "mds"),
    "parquet": ("row", "parquet"),
    "pq": ("row", "parquet"),
}
_TABLES = ("csv", "tsv")
_ZARR, _ZARR_BEFORE = "zarr.json", (".zarray", ".zgroup")
_INDEX = "json"
_UNREAD = (".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.lz4", ".7z", ".rar")
_ASIDE = ("README", "LICENSE")  # what lies beside samples
_BROKEN = "UnprocessableSource"  # S3 says so of what the native API calls a BadSample
_LOOKED_AT = 1000
_TAR_BYTES = 1 << 20
_MEMBERS = 200


def guess_fields(client: Client, source: str, kind: str = "auto") -> dict[str, Any]:
    """Fields in the protocol's form, for a source that is read as this kind.

    Raises NotFoundError when nothing is under the source, ConfigurationError when the names tell nothing, or
    that another kind is to be chosen; BadSampleError for an archive that is none.
    """
    place = parse_source(source)
    page = next(client.pages(place.bucket, place.prefix, page=_LOOKED_AT))
    keys = [entry.key for entry in page.entries if entry.size]
    if not keys:
        there = "only empty files are" if page.entries else "nothing is"
        raise NotFoundError(f"{there} under {source}: see what there is with `mesh ls`.", status=404)
    if kind == "lines":
        return _line_field(keys, source)
    shard = next((key for key in keys if archive_kind(key) is not None), None)
    if shard is not None and kind != "objects":
        tar = archive_kind(shard) == "tar"
        # Where a tar begins with no member's header, the node says what is the matter with it.
        names = (tar and _members(client, place.bucket, shard)) or _listed(client, place.bucket, shard)
        return fields_of_names(names, None, source)
    if kind == "auto" and (told := _other_kind(keys, place.prefix, source)):
        raise ConfigurationError(told)
    samples = [key for key in keys if key.rpartition("/")[2].partition(".")[0] not in _ASIDE]
    return fields_of_names(samples or keys, place.prefix, source)


def _line_field(keys: Iterable[str], source: str) -> dict[str, Any]:
    """One field, as several would each be the same line: of the extensions that files of lines have, where
    there are any (a README lies beside many), packed or not."""
    found = dict.fromkeys(sample_key(uncompressed_name(key))[1] for key in keys)
    found.pop("", None)
    if not found:
        raise ConfigurationError(
            f"the names under {source} have no extension to go by: pass fields={{'text': 'EXTENSION'}}"
        )
    known = [ext for ext in found if _within(ext) == _WITHIN["jsonl"]] or list(found)
    return {_field_name(known[0]): {"ext": known}}


def _other_kind(keys: Sequence[str], prefix: str, source: str) -> str:
    """What to choose or do where names are those of Zarr's chunks, of TFRecords, or of archives that are not
    read; else nothing."""
    from meshwire.formats.tfrecord_index import is_tfrecord

    last = {key: key.rpartition("/")[2] for key in keys}
    arrays = [key.removeprefix(prefix)[: -len(_ZARR)].rstrip("/") for key in keys if last[key] == _ZARR]
    if arrays:
        return (
            f"{source} holds Zarr arrays: name them, and the kind. fields={{'x': {max(arrays)!r}}} and "
            "kind='chunks' make a sample of every whole chunk of one, kind='zarr' of every row"
        )
    if any(name in _ZARR_BEFORE for name in last.values()):
        return f"{source} holds Zarr arrays of version 2: write them as version 3 (zarr_format=3)"
    if packed := next((key for key in keys if key.endswith(_UNREAD)), None):
        return f"{source} holds {packed}: such archives are not read; pack it as .tar, .tar.zst, .tgz or .zip"
    if is_tfrecord(keys[0]) and not sample_key(keys[0])[1]:
        return f"{source} holds TFRecords: kind='tfrecord' makes a sample of every record"
    return ""


def held_whole(fields: Mapping[str, Any]) -> str:
    """The kind to choose, in words, where all fields, in the protocol's form, are whole files of many
    samples; nothing where any is not (`0001.jsonl` beside `0001.jpg` is a sample's), an index apart.
    """
    extensions = [ext for made in fields.values() for ext in made.get("ext", ()) if ext != _INDEX]
    if extensions and all(ext.partition(".")[0] in _TABLES for ext in extensions):
        return (
            f"kind='lines' makes a sample of every line of .{extensions[0]} files, the header's too; of what "
            "is written as Parquet, kind='parquet' makes one of every row"
        )
    kinds = [_within(ext) for ext in extensions]
    if not kinds or kinds[0] is None or None in kinds:
        return ""
    part, kind = kinds[0]
    return f"kind={kind!r} makes a sample of every {part} of .{extensions[0]} files"


def _within(extension: str) -> tuple[str, str] | None:
    """Of `00000.mds.zstd` and `tfrecord-00000-of-00008` too: an extension begins at a name's first dot."""
    parts = (part.partition("-")[0] for part in extension.split("."))
    return next((_WITHIN[part] for part in parts if part in _WITHIN), None)


def guess_features(client: Client, source: str) -> dict[str, str]:
    """A field for each feature of the first record of the first file of TFRecords under the source; those
    that hold nothing there, or several values of bytes, are left out.

    Raises NotFoundError when there is no such file, ConfigurationError when it begins with none.
    """
    from meshwire.formats.tfrecord_index import HEAD_BYTES, TfrecordError, head_size, is_tfrecord

    place = parse_source(source)
    page = next(client.pages(place.bucket, place.prefix, page=_LOOKED_AT))
    keys = [entry.key for entry in page.entries if entry.size and is_tfrecord(entry.key)]
    key = min(keys, key=lambda found: compression_kind(found) is not None, default=None)
    if key is None:
        raise NotFoundError(
            f"no file of records is under {source}: names have .tfrecord, or end in -00000-of-00008",
            status=404,
        )
    if compression_kind(key) is not None:
        raise ConfigurationError(
            f"s3://{place.bucket}/{key} is packed, so its features cannot be guessed: name them, as "
            'fields={"image": "image/encoded"}'
        )
    try:
        size = head_size(client.get(place.bucket, key, length=HEAD_BYTES).ljust(HEAD_BYTES))
        found = parse_features(client.get(place.bucket, key, offset=HEAD_BYTES, length=size) if size else b"")
    except (TfrecordError, ExampleError) as error:
        raise ConfigurationError(f"s3://{place.bucket}/{key}: its first record {error}") from error
    fields = _fields_of(
        name.decode(errors="replace") for name, at in found.items() if at.kind and at.values == 1
    )
    if not fields:
        raise ConfigurationError(
            f"the first record of s3://{place.bucket}/{key} has no feature to go by: pass "
            'fields={"data": ""} for whole records'
        )
    return fields


def guess_columns(client: Client, source: str) -> dict[str, str]:
    """A field for each column of an MDS dataset; Python objects are left out. Raises NotFoundError when there
    is no index.json in the source, ConfigurationError for one that is none."""
    from meshwire.formats.mds import MAX_INDEX, MDS_INDEX, UNSAFE_ENCODING, parse_mds

    place = parse_source(source)
    document = client.get(place.bucket, place.prefix + MDS_INDEX, length=MAX_INDEX)
    try:
        shards = parse_mds(document, MDS_INDEX)
    except PlanError as error:
        raise ConfigurationError(f"{source}: {error}") from error
    told = zip(shards[0].names, shards[0].encodings, strict=True) if shards else ()
    return _fields_of(name for name, encoding in told if encoding != UNSAFE_ENCODING)


def _fields_of(parts: Iterable[str]) -> dict[str, str]:
    """A field for each part of a record that has a name, named alike as far as a field may be."""
    fields: dict[str, str] = {}
    for part in sorted(filter(None, parts))[:MAX_FIELDS]:
        name = _field_name(part)[:60]
        while name in fields:
            name += "_"
        fields[name] = part
    return fields


def _listed(client: Client, bucket: str, key: str) -> list[str]:
    """Names of members, as the node tells them. Raises BadSampleError, as pinning does, for an archive that
    cannot be read."""
    try:
        return [entry.name for entry in client.member_page(bucket, key, page=_MEMBERS).entries]
    except ServerError as error:
        if error.code != _BROKEN:
            raise
        told = str(error).replace(f" [{error.status} {_BROKEN}]", "")
        detail = {"url": f"s3://{bucket}/{key}"}
        raise server_error(
            error.status, "BadSample", told, request_id=error.request_id, detail=detail
        ) from error


def _members(client: Client, bucket: str, key: str) -> list[str]:
    """The first members' names, of the shard's first MiB."""
    head = client.get(bucket, key, length=_TAR_BYTES)
    names = []
    try:
        for member in tar.scan_tar(lambda offset, length: head[offset : offset + length], 0, len(head)):
            if member.type == "0":
                names.append(member.name)
            if len(names) == _MEMBERS:
                break
    except tar.TarError:
        pass  # the first MiB ends within a member
    return names


def fields_of_names(names: Iterable[str], prefix: str | None, source: str) -> dict[str, Any]:
    """`image` of the image extensions, `label` of a sidecar or else of the folder (below `prefix`, if
    given), and every other extension under its own name.
    """
    names = list(names)
    found = Counter(sample_key(name)[1] for name in names)
    found.pop("", None)
    fields: dict[str, Any] = {}
    if images := [ext for ext in _IMAGES if ext in found]:
        fields["image"] = {"ext": images}
    for ext in found:
        if ext not in _IMAGES:
            name = "label" if ext in _LABELS and "label" not in fields else _field_name(ext)
            fields.setdefault(name, {"ext": [ext]})
    if (
        fields
        and "label" not in fields
        and prefix is not None
        and all(class_name(name, prefix) for name in names)
    ):
        fields["label"] = {"class": "prefix"}
    if not fields:
        raise ConfigurationError(
            f"the names under {source} have no extension to go by: "
            f'pass fields={{"image": "jpg", "label": "cls"}}'
        )
    return fields


def _field_name(ext: str) -> str:
    name = "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in ext)
    return name if name[0].isalpha() else f"field_{name}"
