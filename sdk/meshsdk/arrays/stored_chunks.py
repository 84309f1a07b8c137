"""Where the chunks of the variables of a store are: a folder of Zarr arrays, or references to other files.

Law: chunks that are not stored are marked, never guessed. Every object is known with its ETag, so that a
window is read from the version that was listed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from meshsdk.client.gather import Item
from meshsdk.errors import AccessError, ConfigurationError, NotFoundError
from meshwire.formats.zarr_layout import MISSING, key_numbers, read_shard_index
from meshwire.formats.zarr_metadata import parse_variable
from meshwire.frame.columns import ColumnError, ColumnReader, ColumnWriter
from meshwire.strict_json import PlanError, suggestion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from meshsdk.client.s3_client import Client
    from meshwire.dataset.fields import Source
    from meshwire.formats.zarr_metadata import ZarrVariable
    from meshwire.frame.columns import Integers

INLINE: Final = 0
"""The object that has what is not in any stored object: headers, and chunks inside references."""
_HEADS = 8
_FEW_SHARDS = 8
"""Shards whose indexes are not worth a stored copy. The index of each costs a seek of a rotational disk."""
_KIND, _VERSION = "shardmesh.shard-indexes", 1
_ROOT = "/"  # the name of an array that is the store itself


class Objects:
    """The objects that windows are read from, numbered from 1."""

    def __init__(self) -> None:
        self.places: list[tuple[str, str, str, int]] = []  # bucket, key, etag, size

    def __repr__(self) -> str:
        return f"<Objects, {len(self.places)}>"

    def add(self, bucket: str, key: str, etag: str, size: int) -> int:
        self.places.append((bucket, key, etag.strip('"'), size))
        return len(self.places)


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Where the chunks of a variable are, the last axis fastest: int64[chunks] each. `objects` is MISSING for
    a chunk that is not stored."""

    objects: Integers
    offsets: Integers
    lengths: Integers

    @classmethod
    def empty(cls, grid: Sequence[int]) -> ChunkTable:
        count = math.prod(grid)
        if count > 1 << 26:
            raise ConfigurationError(f"an array of {count} chunks; at most {1 << 26} can be windowed")
        return cls(np.full(count, MISSING, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64))


class ArrayStore(Protocol):
    """Variables by name."""

    def names(self) -> list[str]: ...
    def variable(self, name: str) -> ZarrVariable: ...
    def chunks(
        self, name: str, found: ZarrVariable, objects: Objects, keep: Callable[[bytes], int]
    ) -> ChunkTable:
        """Return where the chunks are. `keep` stores bytes in the object INLINE and returns their offset."""
        ...


def chunk_grid(found: ZarrVariable) -> tuple[int, ...]:
    return tuple(-(-extent // chunk) for extent, chunk in zip(found.shape, found.chunk, strict=True))


def _parse(document: bytes | str, attributes: bytes | str | None, name: str) -> ZarrVariable:
    try:
        return parse_variable(document, attributes, name)
    except PlanError as error:
        raise ConfigurationError(str(error)) from error


_ShardIndex = tuple["Integers", "Integers"]
"""The offsets of the chunks in a shard, MISSING for those that are not stored, and their lengths."""


@dataclass(frozen=True, slots=True)
class _Shard:
    """A shard: its place in the grid of shards, its number among the objects, and what it is."""

    place: tuple[int, ...]
    number: int
    key: str
    etag: str
    size: int


class BucketStore:
    """A folder of Zarr arrays, or of one alone, whose name is `/`. `kept`: the folder in which the indexes of
    its shards are stored, so that they are read once."""

    def __init__(self, client: Client, source: Source, kept: Source) -> None:
        self._client, self._source, self._kept = client, source, kept

    def __repr__(self) -> str:
        return f"<BucketStore of {self._source}>"

    def names(self) -> list[str]:
        keys = (entry.key for entry in self._client.list(self._source.bucket, self._source.prefix))
        below = (key.removeprefix(self._source.prefix) for key in keys)
        found = {key.rpartition("/")[0] for key in below if key.endswith((".zarray", "zarr.json"))}
        if "" in found:
            with suppress(ConfigurationError, NotFoundError):  # it is a group
                self.variable(_ROOT)
                found.add(_ROOT)
        return sorted(found - {""})

    def variable(self, name: str) -> ZarrVariable:
        document = self._text(name, "zarr.json")
        if document is not None:
            return _parse(document, None, name)
        document = self._text(name, ".zarray")
        if document is None:
            raise unknown_variable(name, self.names(), str(self._source))
        return _parse(document, self._text(name, ".zattrs"), name)

    def _text(self, name: str, file: str) -> bytes | None:
        try:
            return self._client.get(self._source.bucket, f"{self._folder(name)}{file}")
        except NotFoundError:
            return None

    def _folder(self, name: str) -> str:
        return self._source.prefix if name == _ROOT else f"{self._source.prefix}{name}/"

    def chunks(
        self, name: str, found: ZarrVariable, objects: Objects, keep: Callable[[bytes], int]
    ) -> ChunkTable:
        grid, folder = chunk_grid(found), self._folder(name)
        table = ChunkTable.empty(grid)
        stored = tuple(-(-extent // shard) for extent, shard in zip(found.shape, found.shard, strict=True))
        shards: list[_Shard] = []
        for entry in self._client.list(self._source.bucket, folder):
            place = key_numbers(entry.key[len(folder) :], found.lead, found.separator, len(grid))
            if place is None or any(at >= count for at, count in zip(place, stored, strict=True)):
                continue
            number = objects.add(self._source.bucket, entry.key, entry.etag, entry.size)
            if found.shard != found.chunk:
                shards.append(_Shard(place, number, entry.key, entry.etag, entry.size))
                continue
            at = int(np.ravel_multi_index(place, grid))
            table.objects[at], table.lengths[at] = number, entry.size
        if shards:
            self._read_shards(found, grid, shards, table)
        return table

    def _read_shards(
        self,
        found: ZarrVariable,
        grid: tuple[int, ...],
        shards: Sequence[_Shard],
        table: ChunkTable,
    ) -> None:
        """Fill in the chunks inside shards, from the indexes of these."""
        each = tuple(outer // inner for outer, inner in zip(found.shard, found.chunk, strict=True))
        inside = np.array(np.unravel_index(np.arange(math.prod(each)), each), np.int64)
        for shard, (offsets, lengths) in zip(shards, self._indexes(found, shards), strict=True):
            coordinates = inside + (np.array(shard.place, np.int64) * each)[:, None]
            there = (offsets >= 0) & (coordinates < np.array(grid)[:, None]).all(axis=0)
            at = np.ravel_multi_index(tuple(coordinates[:, there]), grid)
            table.objects[at] = shard.number
            table.offsets[at], table.lengths[at] = offsets[there], lengths[there]

    def _indexes(self, found: ZarrVariable, shards: Sequence[_Shard]) -> Sequence[_ShardIndex]:
        """Return the index of each shard: the stored ones, or those of the shards, which are then stored."""
        pieces = math.prod(found.shard) // math.prod(found.chunk)
        if len(shards) < _FEW_SHARDS:
            return self._read_indexes(found, shards, pieces)
        described = (found.shard, found.chunk, found.index_crc, found.index_end)
        named = [described, *((shard.key, shard.etag, shard.size) for shard in shards)]
        digest = hashlib.sha256(json.dumps(named).encode()).hexdigest()[:32]
        bucket, key = self._kept.bucket, f"{self._kept.prefix}shards-{digest}"
        with suppress(NotFoundError, ColumnError):
            return _parse_indexes(self._client.get(bucket, key), [shard.size for shard in shards], pieces)
        indexes = self._read_indexes(found, shards, pieces)
        with suppress(AccessError):  # the windows may be there already
            self._client.put(bucket, key, _encode_indexes(indexes))
        return indexes

    def _read_indexes(
        self, found: ZarrVariable, shards: Sequence[_Shard], pieces: int
    ) -> Sequence[_ShardIndex]:
        """Return the indexes that are in the shards. Raises ConfigurationError."""
        size = 16 * pieces + 4 * found.index_crc
        items = [
            Item(
                self._source.bucket,
                shard.key,
                None,
                max(0, shard.size - size) if found.index_end else 0,
                min(size, shard.size),
            )
            for shard in shards
        ]
        indexes = []
        for shard, got in zip(shards, self._client.gather(items), strict=True):
            if got.error is not None:
                raise got.error
            try:
                indexes.append(read_shard_index(shard.size, got.data, pieces, checked=found.index_crc))
            except ValueError as error:
                url = f"s3://{self._source.bucket}/{shard.key}"
                raise ConfigurationError(f"{url} is not a shard of its array: {error}") from error
        return indexes


def _encode_indexes(indexes: Sequence[_ShardIndex]) -> bytes:
    writer = ColumnWriter(_KIND, _VERSION, {})
    writer.add_integers("offsets", np.concatenate([offsets for offsets, _ in indexes]) - MISSING)
    writer.add_integers("lengths", np.concatenate([lengths for _, lengths in indexes]))
    return writer.to_bytes()


def _parse_indexes(document: bytes, sizes: Sequence[int], pieces: int) -> Sequence[_ShardIndex]:
    """Return the index of each shard, of these sizes and of `pieces` chunks. Raises ColumnError."""
    reader, count = ColumnReader(document, _KIND, _VERSION), len(sizes) * pieces
    most = max(sizes)
    offsets = reader.read_integers("offsets", low=0, high=most - MISSING, count=count) + MISSING
    lengths = reader.read_integers("lengths", low=0, high=most, count=count)
    if (offsets + lengths > np.repeat(np.array(sizes, np.int64), pieces)).any():
        raise ColumnError("a chunk lies beyond the end of its shard")
    shape = len(sizes), pieces
    return list(zip(offsets.reshape(shape), lengths.reshape(shape), strict=True))


class ReferenceStore:
    """References (kerchunk's JSON) to chunks inside other files, such as NetCDF-4 and HDF5."""

    def __init__(self, client: Client, bucket: str, key: str) -> None:
        self._client, self._url = client, f"s3://{bucket}/{key}"
        self._folder = f"s3://{bucket}/{key.rpartition('/')[0]}"
        try:
            document = json.loads(client.get(bucket, key))
            refs = document.get("refs", document)
            templates: Mapping[str, str] = document.get("templates", {}) if "refs" in document else {}
            known = isinstance(refs, dict) and "gen" not in document
        except (ValueError, AttributeError):
            known = False
        if not known:
            raise ConfigurationError(
                f"{self._url} has no references of kerchunk as JSON; write them with kerchunk's "
                "SingleHdf5ToZarr(…).translate(), or VirtualiZarr's to_kerchunk(format='json')"
            )
        self._refs: Mapping[str, Any] = refs
        self._templates = templates
        self._seen: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<ReferenceStore of {self._url}>"

    def names(self) -> list[str]:
        return sorted(key.removesuffix("/.zarray") for key in self._refs if key.endswith("/.zarray"))

    def variable(self, name: str) -> ZarrVariable:
        document = self._refs.get(f"{name}/.zarray")
        if document is None:
            raise unknown_variable(name, self.names(), self._url)
        return _parse(_text(document), _text(self._refs.get(f"{name}/.zattrs", "{}")), name)

    def chunks(
        self, name: str, found: ZarrVariable, objects: Objects, keep: Callable[[bytes], int]
    ) -> ChunkTable:
        grid = chunk_grid(found)
        table, wanted = ChunkTable.empty(grid), dict[int, list[Any]]()
        for key, value in self._refs.items():
            place = key_numbers(key, f"{name}/", found.separator, len(grid))
            if place is None or any(at >= count for at, count in zip(place, grid, strict=True)):
                continue
            at = int(np.ravel_multi_index(place, grid))
            if isinstance(value, str):
                data = base64.b64decode(value[7:]) if value.startswith("base64:") else value.encode("latin-1")
                table.objects[at], table.offsets[at], table.lengths[at] = INLINE, keep(data), len(data)
            else:
                wanted[at] = value
        self._look_up({self._resolve_url(value[0]) for value in wanted.values()}, objects)
        for at, value in wanted.items():
            number = self._seen[self._resolve_url(value[0])]
            whole = objects.places[number - 1][3]
            offset, length = (int(value[1]), int(value[2])) if len(value) > 1 else (0, whole)
            if offset + length > whole:
                raise ConfigurationError(
                    f"{self._url}: {name!r} lies beyond the end of {value[0]}: make the references again"
                )
            table.objects[at], table.offsets[at], table.lengths[at] = number, offset, length
        return table

    def _resolve_url(self, url: str) -> str:
        for name, value in self._templates.items():
            url = url.replace(f"{{{{{name}}}}}", value).replace(f"{{{{ {name} }}}}", value)
        if url.startswith("mesh://"):
            url = "s3://" + url.removeprefix("mesh://")
        return url if "://" in url or url.startswith("/") else f"{self._folder}/{url.removeprefix('./')}"

    def _look_up(self, urls: Iterable[str], objects: Objects) -> None:
        """Add the files to the objects."""
        new = sorted(set(urls) - self._seen.keys())
        places = []
        for url in new:
            bucket, _, key = url.removeprefix("s3://").partition("/")
            if not url.startswith("s3://") or not key:
                raise ConfigurationError(
                    f"{self._url} refers to {url}: upload the files, and make references with url='s3://…'"
                )
            places.append((bucket, key))
        with ThreadPoolExecutor(_HEADS) as pool:
            infos = list(pool.map(lambda place: self._client.head(*place), places))
        for url, (bucket, key), info in zip(new, places, infos, strict=True):
            self._seen[url] = objects.add(bucket, key, info.etag, info.size)


def _text(value: Any) -> str:
    """Return inline JSON, which kerchunk writes as text and VirtualiZarr as an object."""
    return value if isinstance(value, str) else json.dumps(value)


def unknown_variable(name: str, known: Sequence[str], where: str) -> NotFoundError:
    there = f"; there are {', '.join(known[:20])}" if known else "; there are no arrays"
    hint = suggestion(name, known) if known else ""
    return NotFoundError(f"there is no array {name!r} in {where}{hint or there}")
