"""Fields of a sample: the `fields=` shorthand, and inference from the names under a source.

Law: this module reads names and headers only; the nodes form samples, by `meshwire.dataset.fields`. Inferred
fields are always visible, in `repr(ds)` and in `mesh head`.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshsdk.datasets.names_beside import IMAGES, names_of_samples, without_rare
from meshsdk.errors import ConfigurationError, NotFoundError, ServerError, server_error
from meshwire.dataset.archive_paths import archive_kind, compression_kind, uncompressed_name
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
    """A label from the first folder below the dataset's prefix: `train/cat/1.jpg` has the class `cat`."""


def class_of_prefix() -> ClassOfPrefix:
    """Return the field whose label is the first folder below the dataset's URL, as int64.

    The same as the shorthand "@class" in `fields=`.
    """
    return ClassOfPrefix()


Field = "str | Sequence[str] | ClassOfPrefix | Mapping[str, Any]"


def select_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a `fields=` argument to the form of the protocol.

    A value is an extension ("jpg"), several in order of preference ("jpg;jpeg;png" or a list), "@class" or
    `mesh.class_of_prefix()`, or an object in the form of the protocol. Raises ConfigurationError, which names
    the invalid field.
    """
    try:
        return fields_document(parse_fields({name: _expand(value) for name, value in fields.items()}))
    except PlanError as error:
        raise ConfigurationError(
            f'{error}; write fields={{"image": "jpg;jpeg", "label": "cls"}}, '
            'or "@class" for the folder\'s name'
        ) from error


def array_fields(fields: Mapping[str, Any] | None, *, chunks: bool = False) -> dict[str, Any]:
    """Convert the fields of a Zarr group, whose values are names of arrays.

    A sample is a row of the arrays, or with `chunks` a chunk. Raises ConfigurationError without fields.
    """
    if not fields:
        raise ConfigurationError(
            f"kind={'chunks' if chunks else 'zarr'!r} makes samples of arrays that fields= names, such as "
            '{"image": "images", "label": "labels"}; `mesh ls -r URL` shows them, and mesh.open_zarr opens '
            "windows over arrays"
        )
    more = {"chunks": True} if chunks else {}
    return {
        name: {"array": value, **more} if isinstance(value, str) else value for name, value in fields.items()
    }


def part_fields(fields: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Convert fields whose values name a part of a record: a "feature" of TFRecords, or a "column" of MDS or
    Parquet; "@class" still stands for the folder."""
    return {
        name: _expand(value) if not isinstance(value, str) or value == CLASS else {part: value}
        for name, value in fields.items()
    }


def _expand(value: Any) -> Any:
    if isinstance(value, ClassOfPrefix) or value == CLASS:
        return {"class": "prefix"}
    if isinstance(value, str) and value.startswith("@"):
        raise ConfigurationError(
            f'unknown field {value!r}: use "@class" for the folder\'s name, or a file extension'
        )
    if isinstance(value, (str, list, tuple)) and any("*" in item for item in value if isinstance(item, str)):
        raise ConfigurationError(f'{value!r}: an extension has no wildcards; write it as "jpg"')
    if isinstance(value, str):
        return {"ext": [item.strip() for item in value.split(";") if item.strip()]}
    if isinstance(value, (list, tuple)):
        return {"ext": list(value)}
    return value


def missing_field_hint(
    source: str, fields: Mapping[str, Any] | None, kind: str = "auto", code: str = ""
) -> str:
    """Return a hint for a source without samples: a likely mistake in its URL or fields; "" if none is.

    `code`: of the server's error.
    """
    if any(mark in source for mark in "*?{["):
        return "A dataset's URL has no wildcards: name the folder, and select samples with ds.filter(…)."
    last = source.rstrip("/").rpartition("/")[2]
    if "." in last and not source.endswith(f"//{last}/"):
        folder = source.rstrip("/").removesuffix(last)
        return f"A dataset is a folder or one archive: if {last} is a file, open its folder, {folder}."
    if any(value == "class" for value in (fields or {}).values()):
        return 'For the folder as label, write "@class" with the @.'
    if any("," in value for value in (fields or {}).values() if isinstance(value, str)):
        return 'Semicolons separate several extensions of a field: "jpg;jpeg".'
    if kind == "lines" and fields:
        return (
            'A field is a file extension such as "jsonl"; ops.json(FIELD, PATH) extracts a value from a line.'
        )
    if fields is None and code == "NoSuchKey" and kind in ("auto", "objects", "tar"):
        return (
            'The fields were inferred from the names: name those of your samples, such as fields={"image": '
            '"jpg", "label": "@class"} (commands: --field image=jpg --field label=@class).'
        )
    return ""


def check_source(url: str) -> str:
    """Return `s3://BUCKET/PREFIX` in its canonical spelling. Raises ConfigurationError."""
    try:
        return str(parse_source(url, "url"))
    except PlanError as error:
        raise ConfigurationError(
            f"{error}; a dataset is a folder in a bucket, such as s3://photos/train{_url_hint(url)}"
        ) from error


def _url_hint(url: object) -> str:
    """Return a hint for data on local disks or in other stores."""
    text = str(url)
    if text.startswith(("/", "./", "../", "~")) or os.path.exists(text):
        return f". Upload local files first: mesh cp -r {text} s3://photos/train"
    if "://" in text and not text.startswith("s3://"):
        return (
            ". To read from another store, create a bucket that has it as origin: mesh bucket create --help"
        )
    return ""


_LABELS = ("cls", "label")
# By extension, what files contain many of, and the kind that makes samples of these.
_WITHIN = {
    "jsonl": ("line", "lines"),
    "ndjson": ("line", "lines"),
    "tfrec": ("record", "tfrecord"),
    "tfrecord": ("record", "tfrecord"),
    "tfrecords": ("record", "tfrecord"),
    "mds": ("row", "mds"),
    "parquet": ("row", "table"),
    "pq": ("row", "table"),
    "arrow": ("row", "table"),
    "feather": ("row", "table"),
}
_TABLES = ("csv", "tsv")
_ZARR, _ZARR_BEFORE = "zarr.json", (".zarray", ".zgroup")
_INDEX = "json"
_UNREAD = (".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.lz4", ".7z", ".rar")
_BROKEN = "UnprocessableSource"  # the S3 API's code for what the native API calls BadSample
_LOOKED_AT = 1000
_TAR_BYTES = 1 << 20
_MEMBERS = 200


def guess_fields(client: Client, source: str, kind: str = "auto") -> dict[str, Any]:
    """Infer the fields of a source that is read as this kind, in the form of the protocol.

    Raises NotFoundError if nothing is under the source, ConfigurationError if the names have no extensions or
    suggest another kind, and BadSampleError for an archive that cannot be read.
    """
    place = parse_source(source)
    page = next(client.pages(place.bucket, place.prefix, page=_LOOKED_AT))
    keys = [entry.key for entry in page.entries if entry.size]
    if not keys:
        there = "only empty files are" if page.entries else "nothing is"
        raise NotFoundError(f"{there} under {source}: list the existing objects with `mesh ls`.", status=404)
    if kind == "lines":
        return _line_field(keys, source)
    shard = next((key for key in keys if archive_kind(key) is not None), None)
    if shard is not None and kind != "objects":
        tar = archive_kind(shard) == "tar"
        # If a tar does not begin with a member's header, the node's error says what is wrong with it.
        names = (tar and _members(client, place.bucket, shard)) or _list_members(client, place.bucket, shard)
        return fields_of_names(names_of_samples(names), None, source)
    if kind == "auto" and (hint := _other_kind(keys, place.prefix, source)):
        raise ConfigurationError(hint)
    return fields_of_names(names_of_samples(keys), place.prefix, source)


def _line_field(keys: Iterable[str], source: str) -> dict[str, Any]:
    """Infer the field of a source of lines; there is only one, because several would all be the same line.

    It has the known extensions of files of lines, compressed or not; others (a README, say) count only if
    there are none of these.
    """
    found = dict.fromkeys(sample_key(uncompressed_name(key))[1] for key in keys)
    found.pop("", None)
    if not found:
        raise ConfigurationError(
            f"cannot infer fields: the names under {source} have no extension. "
            "Pass fields={'text': 'EXTENSION'}"
        )
    known = [ext for ext in found if _within(ext) == _WITHIN["jsonl"]] or list(found)
    return {_field_name(known[0]): {"ext": known}}


def _other_kind(keys: Sequence[str], prefix: str, source: str) -> str:
    """Return what to do if the names are those of Zarr chunks, TFRecords or unsupported archives; else ""."""
    from meshwire.formats.tfrecord_index import is_tfrecord

    last = {key: key.rpartition("/")[2] for key in keys}
    arrays = [key.removeprefix(prefix)[: -len(_ZARR)].rstrip("/") for key in keys if last[key] == _ZARR]
    if arrays:
        return (
            f"{source} contains Zarr arrays: pass their names and a kind. fields={{'x': {max(arrays)!r}}} "
            "with kind='chunks' makes a sample of every whole chunk, kind='zarr' of every row; windows over "
            "several arrays: mesh.open_zarr"
        )
    if any(name in _ZARR_BEFORE for name in last.values()):
        return (
            f"{source} contains Zarr arrays of version 2: mesh.open_zarr(URL, ['t2m'], window={{'time': 8}}) "
            "makes windows over them"
        )
    if packed := next((key for key in keys if key.endswith(_UNREAD)), None):
        return (
            f"{source} contains {packed}: this kind of archive is not supported; repack it as .tar, "
            ".tar.zst, .tgz or .zip"
        )
    if is_tfrecord(keys[0]) and not sample_key(keys[0])[1]:
        return f"{source} contains TFRecords: kind='tfrecord' makes a sample of every record"
    return ""


def held_whole(fields: Mapping[str, Any]) -> str:
    """Return which kind to use, as text, if all fields are whole files that contain many samples; else "".

    `fields` are in the form of the protocol. One other field is enough for "": `0001.jsonl` next to
    `0001.jpg` is part of a sample. A JSON index does not count.
    """
    extensions = [ext for made in fields.values() for ext in made.get("ext", ()) if ext != _INDEX]
    if extensions and all(ext.partition(".")[0] in _TABLES for ext in extensions):
        return (
            f"kind='lines' makes a sample of every line of .{extensions[0]} files, including the header; for "
            "tables written as Parquet or Arrow, kind='table' makes one of every row"
        )
    kinds = [_within(ext) for ext in extensions]
    if not kinds or kinds[0] is None or None in kinds:
        return ""
    part, kind = kinds[0]
    return f"kind={kind!r} makes a sample of every {part} of .{extensions[0]} files"


def kinds_of_parts(fields: Mapping[str, Any]) -> str:
    """Return the kinds that make samples of parts of the files of inferred fields, as text; else ""."""
    extensions = sorted({ext for made in fields.values() for ext in made.get("ext", ())})
    if {"bin", "idx"} <= {*extensions}:
        return "kind='tokens' makes a sample of every text of .bin files with an .idx"
    parts: dict[tuple[str, str], dict[str, str]] = {}
    for ext in extensions:
        found = ("line", "lines") if ext.partition(".")[0] in _TABLES else _within(ext)
        if found is not None:
            parts.setdefault(found, {}).setdefault(ext.rpartition(".")[2], f".{ext}")
    return "; ".join(
        f"kind={kind!r} makes a sample of every {part} of {' and '.join(found.values())} files"
        for (part, kind), found in parts.items()
    )


def _within(extension: str) -> tuple[str, str] | None:
    """Return what files of an extension contain and the kind to use, or None.

    An extension begins at the first dot of a name, so this also handles `mds.zstd` (of `00000.mds.zstd`) and
    `tfrecord-00000-of-00008`.
    """
    parts = (part.partition("-")[0] for part in extension.split("."))
    return next((_WITHIN[part] for part in parts if part in _WITHIN), None)


def guess_features(client: Client, source: str) -> dict[str, str]:
    """Infer a field for each feature in the first record of the first TFRecord file under the source.

    Features that are empty there, or have several values of bytes, are left out. Raises NotFoundError if
    there is no such file, and ConfigurationError if it is compressed or its first record cannot be used.
    """
    from meshwire.formats.tfrecord_index import HEAD_BYTES, TfrecordError, head_size, is_tfrecord

    place = parse_source(source)
    page = next(client.pages(place.bucket, place.prefix, page=_LOOKED_AT))
    keys = [entry.key for entry in page.entries if entry.size and is_tfrecord(entry.key)]
    key = min(keys, key=lambda found: compression_kind(found) is not None, default=None)
    if key is None:
        raise NotFoundError(
            f"no TFRecord file is under {source}: their names contain .tfrecord or end in -00000-of-00008",
            status=404,
        )
    if compression_kind(key) is not None:
        raise ConfigurationError(
            f"s3://{place.bucket}/{key} is compressed, so its features cannot be inferred: name them, such "
            'as fields={"image": "image/encoded"}'
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
            f"cannot infer fields: the first record of s3://{place.bucket}/{key} has no usable feature. Pass "
            'fields={"data": ""} for whole records'
        )
    return fields


def guess_columns(client: Client, source: str) -> dict[str, str]:
    """Infer a field for each column of an MDS dataset; columns of Python objects are left out.

    Raises NotFoundError if the source has no index.json, and ConfigurationError if that is invalid.
    """
    from meshwire.formats.mds import MAX_INDEX, MDS_INDEX, UNSAFE_ENCODING, parse_mds

    place = parse_source(source)
    document = client.get(place.bucket, place.prefix + MDS_INDEX, length=MAX_INDEX)
    try:
        shards = parse_mds(document, MDS_INDEX)
    except PlanError as error:
        raise ConfigurationError(f"{source}: {error}") from error
    told = zip(shards[0].names, shards[0].encodings, strict=True) if shards else ()
    return _fields_of(name for name, encoding in told if encoding != UNSAFE_ENCODING)


def token_dtype(client: Client, source: str) -> str:
    """Return the dtype of the tokens under a source, from the first index.

    Raises NotFoundError if there is none, and ConfigurationError if it is not an index, or if the files are
    not all there yet.
    """
    from meshwire.formats.token_index import HEADER_BYTES, INDEX_SUFFIX, TokenIndexError, index_dtype
    from meshwire.formats.token_manifest import MANIFEST, parse_token_manifest

    place = parse_source(source)
    try:
        manifest = parse_token_manifest(client.get(place.bucket, place.prefix + MANIFEST))
    except NotFoundError:  # not written by `mesh tokenize`
        pass
    except PlanError as error:
        raise ConfigurationError(f"{source}: {error}") from error
    else:
        if not manifest.complete:
            raise ConfigurationError(
                f"{source} is incomplete, with {manifest.tokens:,} tokens so far: finish `mesh tokenize`"
            )
    keys = (entry.key for entry in client.list(place.bucket, place.prefix))
    key = next((key for key in keys if key.endswith(INDEX_SUFFIX)), None)
    if key is None:
        raise NotFoundError(f"there is no {INDEX_SUFFIX} file in {source}")
    try:
        return index_dtype(client.get(place.bucket, key, length=HEADER_BYTES))
    except TokenIndexError as error:
        raise ConfigurationError(f"s3://{place.bucket}/{key}: {error}") from error


def _fields_of(parts: Iterable[str]) -> dict[str, str]:
    """Return a field for each named part of a record, with a name as similar as field names allow."""
    fields: dict[str, str] = {}
    for part in sorted(filter(None, parts))[:MAX_FIELDS]:
        name = _field_name(part)[:60]
        while name in fields:
            name += "_"
        fields[name] = part
    return fields


def _list_members(client: Client, bucket: str, key: str) -> list[str]:
    """List the names of an archive's members through the node.

    Raises BadSampleError, as pinning does, for an archive that cannot be read.
    """
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
    """Return the names of the first members, from the first MiB of a tar."""
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
    """Infer fields from names: `image`, `label`, and every other extension under its own name.

    `image` has the image extensions. `label` is a .cls or .label file, else the folder below `prefix` if that
    is given. A few files that belong to no image, such as a list of classes, are left out. Raises
    ConfigurationError if no name has an extension.
    """
    names = without_rare(list(names))
    found = Counter(sample_key(name)[1] for name in names)
    found.pop("", None)
    fields: dict[str, Any] = {}
    if images := [ext for ext in IMAGES if ext in found]:
        fields["image"] = {"ext": images}
    for ext in found:
        if ext not in IMAGES:
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
            f"cannot infer fields: the names under {source} have no extension. "
            f'Pass fields={{"image": "jpg", "label": "cls"}}'
        )
    return fields


def _field_name(ext: str) -> str:
    name = "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in ext)
    return name if name[0].isalpha() else f"field_{name}"
