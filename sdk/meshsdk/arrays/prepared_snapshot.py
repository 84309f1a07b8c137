"""Snapshots that are prepared here: samples put together from ranges of objects, stored beside their source.

Law: the same content and options are prepared once; nodes validate the result like any other snapshot.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

import numpy as np

from meshsdk import transfers
from meshsdk.client.native_api import pin_snapshot
from meshsdk.datasets.dataset import Dataset
from meshsdk.datasets.fields import check_source
from meshsdk.errors import ConfigurationError, NotFoundError
from meshwire.dataset.fields import FieldSpec, Source, parse_fields, parse_source
from meshwire.dataset.snapshot import PREPARED_NAME, BytesColumn, LabelColumn, ObjectTable, Snapshot
from meshwire.frame.columns import StringColumn
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshsdk.arrays.stored_chunks import Objects
    from meshsdk.client.s3_client import Client
    from meshwire.frame.columns import Integers

_HEADERS = "places"


@dataclass(frozen=True, slots=True)
class PreparedSnapshot:
    """Samples: columns and specs of their fields, pieces included; their names; `first`: an object of each,
    int[samples], a change of which begins a new shard."""

    columns: Mapping[str, BytesColumn | LabelColumn]
    specs: Mapping[str, FieldSpec]
    names: Sequence[str]
    first: Integers


def keep(headers: IO[bytes], data: bytes) -> int:
    """Write data to the object INLINE. Returns its offset."""
    at = headers.tell()
    headers.write(data)
    return at


def column(objects: Integers, offsets: Integers, lengths: Integers) -> BytesColumn:
    """Return a column of places: int64[samples] each."""
    return BytesColumn(objects.astype(np.int32), offsets.astype(np.int64), lengths.astype(np.int64))


def labels_by_folder(names: Sequence[str]) -> tuple[dict[str, LabelColumn], dict[str, FieldSpec]]:
    """Return a field `label`: the first folder of each name. Raises ConfigurationError if one has none."""
    folders = [name.partition("/")[0] if "/" in name else "" for name in names]
    if "" in folders:
        raise ConfigurationError(f"label=True: {names[folders.index('')]!r} lies in no folder of a class")
    classes = tuple(sorted(set(folders), key=str.encode))
    number = {name: at for at, name in enumerate(classes)}
    values = np.array([number[folder] for folder in folders], np.int64)
    return {"label": LabelColumn(values, classes)}, {"label": FieldSpec("label", "label", label_of="prefix")}


def index_folder(source: Source, index: str | None) -> Source:
    """Return the folder for what is prepared of a source: `index`, or the one beside it. Raises
    ConfigurationError."""
    beside = f"s3://{source.bucket}/{source.prefix.rstrip('/')}.windows" if index is None else index
    return parse_source(check_source(beside))


def open_prepared(
    client: Client,
    index: str | None,
    source: Source,
    headers: IO[bytes],
    objects: Objects,
    samples: PreparedSnapshot,
    deadline: float | None,
) -> Dataset:
    """Store the headers and the snapshot, unless they are there, and open it.

    `index`: the folder for them, beside the source by default. Raises ConfigurationError, and as `mesh.open`.
    """
    try:
        parse_fields({name: {"ext": "x"} for name in samples.specs if not samples.specs[name].piece_of})
    except PlanError as error:
        raise ConfigurationError(str(error)) from error
    size = headers.tell()
    headers.seek(0)
    named = hashlib.sha256()
    while block := headers.read(1 << 20):
        named.update(block)
    draft = _snapshot(source, source, "", size, objects, samples)
    named.update(draft.hash.encode())
    beside = index_folder(source, index)
    folder = Source(beside.bucket, f"{beside.prefix}{named.hexdigest()[:16]}/")
    try:
        client.head(folder.bucket, f"{folder.prefix}{PREPARED_NAME}")
    except NotFoundError:
        headers.seek(0)
        etag = transfers.upload(client, headers, folder.bucket, f"{folder.prefix}{_HEADERS}")
        made = _snapshot(source, folder, etag, size, objects, samples)
        client.put(folder.bucket, f"{folder.prefix}{PREPARED_NAME}", made.to_bytes())
    return Dataset(client, pin_snapshot(client.transport, str(folder), "prepared", None, deadline))


def _snapshot(
    source: Source, folder: Source, etag: str, size: int, objects: Objects, samples: PreparedSnapshot
) -> Snapshot:
    entries = [(folder.bucket, f"{folder.prefix}{_HEADERS}", etag.strip('"'), size), *objects.places]
    order = sorted(range(len(entries)), key=lambda number: entries[number][:2])
    moved = np.empty(len(entries), np.int64)
    moved[order] = np.arange(len(entries))
    table = ObjectTable.concatenate(
        [
            ObjectTable(
                bucket,
                StringColumn.from_strings([entries[at][1] for at in order if entries[at][0] == bucket]),
                StringColumn.from_strings([entries[at][2] for at in order if entries[at][0] == bucket]),
                np.array([entries[at][3] for at in order if entries[at][0] == bucket], np.int64),
            )
            for bucket in sorted({entry[0] for entry in entries})
        ]
    )
    begins = np.flatnonzero(np.diff(samples.first, prepend=samples.first[0] - 1))
    columns = samples.columns
    return Snapshot.from_parts(
        str(source) if source.bucket == table.bucket else f"s3://{table.bucket}/",
        "joined",
        table,
        np.append(begins, len(samples.names)).astype(np.int64),
        {
            name: column if isinstance(column, LabelColumn) else column.renumber(moved)
            for name, column in sorted(columns.items())
        },
        {name: samples.specs[name] for name in sorted(samples.specs)},
        StringColumn.from_strings(list(samples.names)),
    )
