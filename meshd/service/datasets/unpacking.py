"""Files of lines and records that are stored packed (gzip, zstd): read through their inflated copy.

Law: a snapshot tells a file and its copy by their sizes, so the two must differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.assembly.errors import BatchError
from meshwire.archives.kinds import packed_kind

if TYPE_CHECKING:
    from meshd.assembly.sources import PlainArchives
    from meshd.store.records import Record


def content_name(key: str, record: Record) -> str:
    """A name of what a file says when it is unpacked as its key wants."""
    packed = packed_kind(key)
    return f"{record.etag}-{record.size}" + (f".{packed}" if packed else "")


async def unpacked(archives: PlainArchives, bucket: str, key: str, record: Record) -> Record:
    """The object that holds the file's bytes as they are. Raises BatchError BadSample, TooLarge, Busy."""
    if packed_kind(key) is None:
        return record
    plain = await archives.plain(bucket, key, record)
    if plain.size == record.size:
        raise BatchError(
            "BadSample",
            f"s3://{bucket}/{key} has {record.size} bytes packed and unpacked",
            help="packing it saved nothing: store it unpacked",
            detail={"url": f"s3://{bucket}/{key}"},
        )
    return plain
