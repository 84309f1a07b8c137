"""`mesh.open`: pins the objects under a URL as a dataset.

Law: arguments are checked before the first request; the field inference fills in what the caller leaves
out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import meshsdk
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
    missing_field_hint,
    part_fields,
    select_fields,
)
from meshsdk.errors import ConfigurationError, NotFoundError

if TYPE_CHECKING:
    from meshsdk.client.native_api import SnapshotInfo
    from meshsdk.client.s3_client import Client
    from meshsdk.loader.loader import Loader

_log = logging.getLogger("meshsdk")

Kind = Literal["auto", "objects", "tar", "lines", "zarr", "chunks", "tfrecord", "mds", "parquet"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def open(
    url: str,
    fields: Mapping[str, Any] | None = None,
    *,
    kind: Kind = "auto",
    snapshot: str | None = None,
    client: Client | None = None,
    deadline: float | None = None,
) -> Dataset:
    """Pins what is stored under `url` now and gives a dataset of it.

    Arguments:
        url: a bucket or a folder of one, as "s3://photos/train".
        fields: what a sample is made of, by name: an extension ("jpg"), several with the preferred first
            ("jpg;jpeg;png"), or "@class" (the first folder below `url`, as int64). Of "zarr" names of arrays,
            of "tfrecord" features, of "mds" and "parquet" columns. Left out, guessed from what is there.
        kind: "objects" (files that share a stem are a sample), "tar" (WebDataset shards and other
            archives), "lines" (a sample a line, as in JSONL), "zarr" (a sample a row of the arrays),
            "chunks" (a sample a chunk of them), "tfrecord" (a sample a record's `tf.Example`), "mds"
            (mosaicml-streaming's shards), "parquet" (a sample a row) or "auto": archives if there are any,
            else objects.
        snapshot: the hash of what was pinned before (`ds.snapshot.hash`), instead of what is there now.
        client: see `mesh.connect`; left out, one of the environment's.
        deadline: seconds an unavailable server is waited for; the client's if left out.

    Raises:
        ConfigurationError: the URL, a field or the kind makes no sense; endpoint or keys are missing.
        NotFoundError: no such bucket, or no sample has all fields; it says what is there.
        BadSampleError: an archive or file of records is not what it should be; it names it.
        AccessError: the keys may not read it.
        DeadlineError: nobody answered for so long.
    """
    from meshsdk.client.s3_client import connect

    source = check_source(url)
    if kind not in KINDS:
        raise ConfigurationError(f"kind={kind!r}: use one of {', '.join(KINDS)}")
    if fields is not None and not isinstance(fields, Mapping):
        raise ConfigurationError(
            f"fields={fields!r:.80}: what each field is made of, by name, as "
            '{"image": "jpg;jpeg", "label": "@class"}'
        )
    if deadline is not None:
        checked_seconds("deadline", deadline)
    client = client or connect()
    if snapshot is not None:
        return Dataset(client, describe_snapshot(fetch_snapshot(client.transport, snapshot)))
    try:
        return Dataset(client, _pinned(client, source, fields, kind, deadline))
    except NotFoundError as error:
        if told := missing_field_hint(source, fields, kind):
            raise error.saying(told) from error
        raise


def _pinned(
    client: Client, source: str, fields: Mapping[str, Any] | None, kind: str, deadline: float | None
) -> SnapshotInfo:
    """What is there now; what is not told of it is guessed."""
    if kind in ("zarr", "chunks"):
        fields, kind = array_fields(fields, chunks=kind == "chunks"), "zarr"
    if kind == "tfrecord":
        fields = part_fields(guess_features(client, source) if fields is None else fields, "feature")
    if kind == "mds":
        fields = part_fields(guess_columns(client, source) if fields is None else fields, "column")
    if kind == "parquet":
        chosen = None if fields is None else select_fields(part_fields(fields, "column"))
    else:
        chosen = select_fields(fields) if fields is not None else guess_fields(client, source, kind)
    told = held_whole(chosen or {}) if kind == "auto" else ""
    try:
        pinned = pin_snapshot(client.transport, source, kind, chosen, deadline, meanwhile=_load_loader)
    except NotFoundError as error:
        if told and fields is None:  # what was guessed fits no sample: the names may be of shards
            raise error.saying(f"{told}.") from error
        raise
    if told and pinned.kind == "objects":  # else these are members of archives
        _log.warning(
            "%s: a sample is a whole file; %s, kind='objects' says that files are meant", source, told
        )
    return pinned


def _load_loader() -> type[Loader]:
    """Its modules take about as long as a node that lists a few thousand objects."""
    return meshsdk.Loader
