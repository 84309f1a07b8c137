"""Rows that a library reads here, stored as Arrow streams for the nodes.

Law: a set of streams has a name that says what it was made of, and its mark is stored after the last one, so
that it is complete and never made twice.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from typing import TYPE_CHECKING, Any, Final

from meshsdk import transfers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from meshsdk.client.s3_client import Client
    from meshwire.dataset.fields import Source

_FILE_BYTES: Final = 256 << 20


class StoredStreams:
    """The streams in a folder."""

    def __init__(self, client: Client, folder: Source) -> None:
        self._client, self._folder = client, folder
        found = client.list(folder.bucket, folder.prefix)
        self._names = [entry.key.removeprefix(folder.prefix) for entry in found]

    def __repr__(self) -> str:
        return f"<StoredStreams {self._folder}>"

    def names(self, prefix: str, made_of: Any, batches: Callable[[], Iterable[Any]]) -> list[str]:
        """Return the names of the streams of rows that are `made_of` a JSON value, which are stored if they
        are not there. `batches`: the rows, as Arrow's batches."""
        described = json.dumps(made_of, sort_keys=True, default=str)
        stem = f"{prefix}-{hashlib.sha256(described.encode()).hexdigest()[:20]}"
        done = f"{stem}.streams-"  # of this name and their number
        count = next((int(name.removeprefix(done)) for name in self._names if name.startswith(done)), -1)
        if count < 0:
            count = 0
            for count, stream in enumerate(streams_of(batches()), 1):
                with stream:
                    key = f"{self._folder.prefix}{_name(stem, count - 1)}"
                    transfers.upload(self._client, stream, self._folder.bucket, key)
            self._client.put(self._folder.bucket, f"{self._folder.prefix}{done}{count}", b"")
        return [_name(stem, number) for number in range(count)]


def _name(stem: str, number: int) -> str:
    return f"{stem}-{number:05d}.arrows"


def streams_of(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the rows as files with Arrow streams, at their beginning; the caller closes them."""
    import pyarrow as pa

    found = iter(batches)
    batch = next(found, None)
    while batch is not None:
        file = tempfile.TemporaryFile()  # noqa: SIM115
        with pa.ipc.new_stream(file, batch.schema) as writer:
            while batch is not None and file.tell() < _FILE_BYTES:
                writer.write_batch(batch)
                batch = next(found, None)
        file.seek(0)
        yield file
