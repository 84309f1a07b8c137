"""`mesh.open`: pins the objects under a URL as a dataset.

Law: arguments are checked before the first request; fields that the caller leaves out are inferred.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from contextlib import contextmanager
from datetime import date
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from meshsdk import ops
from meshsdk.client.native_api import describe_snapshot, fetch_snapshot, pin_snapshot
from meshsdk.client.settings import checked_seconds
from meshsdk.datasets.dataset import Dataset
from meshsdk.datasets.fields import (
    array_fields,
    check_source,
    guess_columns,
    guess_features,
    guess_fields,
    held_whole,
    kinds_of_parts,
    missing_field_hint,
    part_fields,
    select_fields,
    token_dtype,
)
from meshsdk.errors import ConfigurationError, InvalidPlanError, NotFoundError
from meshsdk.lazy_import import load_module
from meshwire.dataset.column_filter import parse_filter
from meshwire.dataset.fields import parse_source
from meshwire.plan.plan_spec import OpSpec
from meshwire.strict_json import PlanError, suggestion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from meshsdk.client.native_api import SnapshotInfo
    from meshsdk.client.s3_client import Client


Nulls = Literal["skip", "mask"]
_HASH = re.compile("[0-9a-f]{64}")
_MAX_NAMES = 900_000  # a request has at most 1 MiB


def table_options(
    kind: str,
    filter: object,
    nulls: object,
    ids: object,
) -> dict[str, Any]:
    """Return the options of a table in the form of the protocol. Raises ConfigurationError."""
    if kind != "table":
        given = [name for name, value in (("filter", filter), ("ids", ids)) if value is not None]
        if given or nulls != "skip":
            name = given[0] if given else "nulls"
            raise ConfigurationError(f"{name}= is for kind='table'; samples of another kind: ds.filter(…)")
        return {}
    if nulls not in ("skip", "mask"):
        raise ConfigurationError(f"nulls={nulls!r}: use 'skip' (leave such rows out) or 'mask'")
    found: dict[str, Any] = {"masks": True} if nulls == "mask" else {}
    if ids is not None:
        if not isinstance(ids, (list, tuple)) or not all(isinstance(name, str) for name in ids):
            raise ConfigurationError(f"ids={ids!r:.80}: expected text columns, such as ids=['city']")
        found["ids"] = list(ids)
    if filter is not None:
        found["filter"] = _conditions(filter)
    return found


def _conditions(filter: object) -> list[list[Any]]:
    try:
        listed = [
            [
                [*map(_plain_value, part)]
                if isinstance(part, (list, tuple, set, frozenset))
                else _plain_value(part)
                for part in condition
            ]
            if isinstance(condition, (list, tuple))
            else condition
            for condition in filter  # type: ignore[attr-defined]  # TypeError below
        ]
        for condition in listed:
            if isinstance(condition, list) and len(condition) == 3 and isinstance(condition[2], list):
                condition[2].sort(key=lambda value: (str(type(value)), value))
        parse_filter(listed)
    except (PlanError, TypeError) as error:
        raise ConfigurationError(
            f"{error}; write filter=[('price', '>', 3), ('city', 'in', ['Rome', 'Oslo'])]: all must hold"
        ) from error
    return listed


def _plain_value(value: object) -> object:
    """Return a value of NumPy, or a date or time, as JSON has it."""
    if isinstance(value, np.datetime64):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    return value.isoformat() if isinstance(value, date) else value


def column_fields(
    fields: Mapping[str, Any] | None, columns: Sequence[str] | None, kind: str
) -> Mapping[str, Any] | None:
    """Return the fields, or those that `columns` names. Raises ConfigurationError."""
    if columns is None:
        return fields
    if kind not in ("table", "parquet") or fields is not None:
        raise ConfigurationError("columns= names columns of a table (kind='table'), in the place of fields=")
    if isinstance(columns, str) or not all(isinstance(name, str) for name in columns) or not columns:
        raise ConfigurationError(f"columns={columns!r:.80}: expected names, such as ['price', 'city']")
    return {_field_name(name): name for name in columns}


def _field_name(column: str) -> str:
    name = "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in column)
    return name if name[:1].isalpha() else f"field_{name}"


def typed_ops(snapshot: SnapshotInfo) -> tuple[OpSpec, ...]:
    """Return the ops that deliver the columns of a table in their types; none for other fields."""
    return tuple(
        OpSpec("frombuffer", name, {"dtype": field.dtype, "shape": list(field.shape)})
        for name, field in sorted(snapshot.fields.items())
        if field.dtype
    )


_log = logging.getLogger("meshsdk")

Kind = Literal[
    "auto", "objects", "tar", "lines", "zarr", "chunks", "tfrecord", "mds", "parquet", "table", "tokens"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
_OPENERS = ("coco", "dicom", "iceberg", "lance", "slides", "voc", "yolo")
_KIND_WORDS = {
    **dict.fromkeys(("jsonl", "ndjson", "json", "text", "txt"), "lines"),
    **dict.fromkeys(("webdataset", "wds", "archive", "zip"), "tar"),
    **dict.fromkeys(("files", "folder", "images", "imagefolder"), "objects"),
    **dict.fromkeys(("arrow", "feather", "rows"), "table"),
    **dict.fromkeys(("streaming", "mosaic"), "mds"),
}


def kind_hint(kind: object) -> str:
    """Return what to write instead of a kind that does not exist."""
    word = str(kind)
    if word in ("csv", "tsv"):
        return (
            "; kind='lines' makes a sample of every line, and kind='table' of every row once the file is "
            "written as Parquet: pandas.read_csv(…).to_parquet(…)"
        )
    if word in _OPENERS:
        return f"; in Python: mesh.open_{word}(…)"
    return f"; did you mean {_KIND_WORDS[word]!r}?" if word in _KIND_WORDS else suggestion(word, KINDS)


def open(
    url: str,
    fields: Mapping[str, Any] | None = None,
    *,
    kind: Kind = "auto",
    columns: Sequence[str] | None = None,
    filter: Sequence[tuple[str, str, Any]] | None = None,
    nulls: Nulls = "skip",
    ids: Sequence[str] | None = None,
    snapshot: str | None = None,
    client: Client | None = None,
    deadline: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Dataset:
    """Pin the objects that are stored under `url` now, and return them as a dataset.

    Arguments:
        url: a bucket or a folder in one, such as "s3://photos/train".
        fields: the fields of a sample. Each name maps to a file extension ("jpg"), to several in order of
            preference ("jpg;jpeg;png"), or to "@class" (the first folder below `url`, as an int64 label). For
            "zarr" a value is the name of an array, for "tfrecord" a feature, for "mds", "table" and
            "parquet" a column. Default: inferred from the names under `url`.
        kind: how samples are formed. "objects": files that share a stem are one sample. "tar": WebDataset
            shards and other archives. "lines": one sample per line, such as JSONL. "zarr": one per row of the
            arrays. "chunks": one per chunk of them. "tfrecord": one per record (a `tf.Example`). "mds":
            shards of mosaicml-streaming. "table": one per row of Parquet and Arrow files, in the types of
            their columns. "parquet": one per row, as bytes. "tokens": one per sequence of the token files
            that `mesh tokenize` or Megatron's tools wrote, as an array. "auto": archives if there are any,
            else objects.
        columns: the columns of a table, each under its own name, in the place of `fields`.
        filter: conditions on columns of a table, (column, operator, value), all of which must hold for a row
            to be a sample. Operators: == != < <= > >= in, not in. Dates and times may be those of `datetime`.
            Part of the snapshot, and so of every plan.
        nulls: what to do with a row of a table that has a null in one of its fields: "skip" it, or keep it as
            zeros and give each field that may hold nulls another one, FIELD_valid, a bool ("mask").
        ids: text columns of a table to deliver as numbers, like a class label: `ds.classes` has the texts.
        snapshot: hash of an earlier snapshot of this source (`ds.snapshot.hash`) to open instead of the
            current content.
        client: a client from `mesh.connect`. Default: one configured by the environment.
        deadline: seconds for which an unavailable server is retried. Default: the client's.
        progress: called with the number of shards that the node has indexed and the number of all shards,
            each time the node reports them while it indexes a source that takes long.

    Raises:
        ConfigurationError: the URL, a field or the kind is invalid, or the endpoint or keys are missing.
        NotFoundError: the bucket does not exist, or no sample has all fields; the message says what exists.
        BadSampleError: an archive or record file cannot be read; the message names it.
        AccessError: the keys may not read the source.
        DeadlineError: the server was unavailable until the deadline.

    Example:
        ds = mesh.open("s3://photos/train", {"image": "jpg;jpeg", "label": "@class"})
        ds = ds.map(ops.decode("image"), ops.random_resized_crop("image", 224))
    """
    from meshsdk.client.s3_client import connect

    source = check_source(url)
    if kind not in KINDS:
        raise ConfigurationError(f"there is no kind {kind!r:.80}{kind_hint(kind)}")
    if fields is not None and not isinstance(fields, Mapping):
        raise ConfigurationError(
            f"fields={fields!r:.80}: expected a mapping of field names to extensions, such as "
            '{"image": "jpg;jpeg", "label": "@class"}'
        )
    if deadline is not None:
        checked_seconds("deadline", deadline)
    fields, options = column_fields(fields, columns, kind), table_options(kind, filter, nulls, ids)
    client = client or connect()
    if snapshot is not None:
        _check_snapshot_hash(snapshot)
        pinned = describe_snapshot(fetch_snapshot(client.transport, snapshot))
        _check_snapshot_source(snapshot, pinned.source, source)
        return _with_column_types(_as_arrays(Dataset(client, pinned), source))
    try:
        with _reporting(client, progress):
            pinned = _pin_source(client, source, fields, kind, deadline, options)
        _warn_of_left_out(pinned)
        _warn_of_one_class(client, pinned)
        return _with_column_types(_as_arrays(Dataset(client, pinned), source))
    except InvalidPlanError as error:
        if kind in ("table", "parquet") and fields is None:
            raise error.saying(_FIRST_FILE) from error
        raise
    except NotFoundError as error:
        if hint := missing_field_hint(source, fields, kind, error.code):
            raise error.saying(hint) from error
        raise


def open_table_files(
    url: str,
    files: Sequence[str],
    *,
    columns: Sequence[str] | None,
    filter: Sequence[tuple[str, str, Any]] | None,
    nulls: Nulls,
    ids: Sequence[str] | None,
    client: Client,
    deadline: float | None,
    progress: Callable[[int, int], None] | None,
) -> Dataset:
    """Open as a table those files whose names below `url` are given. Raises as `open` does."""
    fields, options = column_fields(None, columns, "table"), table_options("table", filter, nulls, ids)
    if sum(map(len, files)) > _MAX_NAMES:
        raise ConfigurationError(
            f"the names of {len(files)} files take more than {_MAX_NAMES} bytes: open fewer with filter=, or "
            "compact the table"
        )
    with _reporting(client, progress):
        pinned = _pin_source(
            client, check_source(url), fields, "table", deadline, {**options, "files": [*files]}
        )
    _warn_of_left_out(pinned)
    return _with_column_types(Dataset(client, pinned))


@contextmanager
def _reporting(client: Client, progress: Callable[[int, int], None] | None) -> Iterator[None]:
    """Report the shards that the node has indexed."""
    before = client.transport.on_progress
    if progress is not None:
        client.transport.on_progress = lambda _, shards: progress(*shards) if shards else None
    try:
        yield
    finally:
        client.transport.on_progress = before


def _check_snapshot_hash(snapshot: str) -> None:
    if not _HASH.fullmatch(snapshot):
        raise ConfigurationError(
            f"snapshot={snapshot!r:.80}: expected all 64 hexadecimal digits of a snapshot's hash, which "
            "`ds.snapshot.hash` and `mesh snapshots show DIGITS` have"
        )


def _check_snapshot_source(snapshot: str, pinned: str, source: str) -> None:
    """Raises ConfigurationError for a snapshot of something else: neither in this source nor around it."""
    ours, others = (f"{each.rstrip('/')}/" for each in (source, pinned))
    if not ours.startswith(others) and not others.startswith(ours):
        raise ConfigurationError(
            f"the snapshot {snapshot[:12]} is of {pinned}, not of {source}: open it with that URL, or "
            "another snapshot"
        )


def _with_column_types(dataset: Dataset) -> Dataset:
    """Return the dataset with the columns of a table in their types."""
    ops = typed_ops(dataset.snapshot)
    return dataset.map(*ops) if ops else dataset


def _pin_source(
    client: Client,
    source: str,
    fields: Mapping[str, Any] | None,
    kind: str,
    deadline: float | None,
    options: Mapping[str, Any],
) -> SnapshotInfo:
    """Pin the current content of the source; fields that the caller left out are inferred."""
    if kind in ("zarr", "chunks"):
        fields, kind = array_fields(fields, chunks=kind == "chunks"), "zarr"
    if kind == "tfrecord":
        fields = part_fields(guess_features(client, source) if fields is None else fields, "feature")
    if kind == "mds":
        fields = part_fields(guess_columns(client, source) if fields is None else fields, "column")
    if kind == "tokens":
        fields = part_fields({"tokens": "tokens"} if fields is None else fields, "column")
    if kind in ("parquet", "table"):
        chosen = None if fields is None else select_fields(part_fields(fields, "column"))
    else:
        chosen = select_fields(fields) if fields is not None else guess_fields(client, source, kind)
    if kind == "lines":
        _check_lines(chosen or {})
    told = held_whole(chosen or {}) if kind == "auto" else ""
    try:
        pinned = pin_snapshot(client.transport, source, kind, chosen, deadline, _load_loader, options)
    except NotFoundError as error:
        # The inferred fields fit no sample: the files may be shards.
        if fields is None and kind == "auto" and (parts := kinds_of_parts(chosen or {}) or told):
            raise error.saying(f"{parts}.") from error
        raise
    if told and pinned.kind == "objects":  # otherwise these are members of archives
        _log.warning(
            "%s: each sample is a whole file; %s; pass kind='objects' to keep whole files", source, told
        )
    return pinned


_SHOWN_EXAMPLES = 2
_COLUMN = "the column"
"""How examples of columns begin; those of rows begin with the name of a file."""
_EXTENSIONS = '; a field may have several extensions, such as "jpg;jpeg"'
_LEFT_OUT_ADVICE = {
    "objects": _EXTENSIONS,
    "tar": _EXTENSIONS,
    "table": "; nulls='mask' keeps rows with nulls",
}
_FIRST_FILE = (
    "Without columns=, a table has the columns of its first file: name those that all files have in one "
    "type, or write the files again with the same columns."
)


def _warn_of_left_out(pinned: SnapshotInfo) -> None:
    """Warn about what is under the source and in no sample."""
    if not pinned.skipped and not pinned.examples:
        return
    columns = [told for told in pinned.examples if pinned.kind == "table" and told.startswith(_COLUMN)]
    if columns:
        _log.warning("%s: left out %s", pinned.source, "; ".join(columns[:_SHOWN_EXAMPLES]))
        if not pinned.skipped:
            return
    first = ", ".join([told for told in pinned.examples if told not in columns][:_SHOWN_EXAMPLES])
    count = f"{pinned.skipped} of {pinned.samples + pinned.skipped}" if pinned.skipped else ""
    summary = ": ".join(filter(None, (count, first)))
    _log.warning("%s: left out %s%s", pinned.source, summary, _LEFT_OUT_ADVICE.get(pinned.kind, ""))


def _warn_of_one_class(client: Client, pinned: SnapshotInfo) -> None:
    """Warn if all samples are in one folder that has several: the classes are probably those."""
    labels = {name: field.classes for name, field in pinned.fields.items() if field.classes}
    name, classes = next(iter(labels.items()), ("", ()))
    if pinned.kind != "objects" or len(classes) != 1:
        return
    place = parse_source(pinned.source)
    below = f"{place.prefix}{classes[0]}/"
    if len(next(client.pages(place.bucket, below, delimiter="/")).common_prefixes) > 1:
        _log.warning(
            "%s: %r is %r for all samples, which are in that folder; if the folders in it are the classes, "
            "open s3://%s/%s",
            *(pinned.source, name, classes[0], place.bucket, below),
        )


_BINARY = frozenset(
    ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "npy", "npz", "wav", "flac", "mp3", "mp4")
)


def _check_lines(fields: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for files that have no lines."""
    extension = next((ext for made in fields.values() for ext in made.get("ext", ()) if ext in _BINARY), "")
    if extension:
        raise ConfigurationError(
            f"kind='lines' makes a sample of every line of text files, and .{extension} files have none: "
            "kind='objects' makes one of every file"
        )


def _as_arrays(dataset: Dataset, source: str) -> Dataset:
    """Return a dataset of token files with its sequences as arrays; any other dataset as it is."""
    if dataset.snapshot.kind != "tokens":
        return dataset
    dtype = token_dtype(dataset.client, source)
    columns = [name for name, info in dataset.snapshot.fields.items() if info.kind == "bytes"]
    return dataset.map(*(ops.frombuffer(name, dtype, shape=[None]) for name in columns))


def _load_loader() -> None:
    """Import the loader, which takes about as long as a node needs to list a few thousand objects."""
    load_module("loader.loader")
