"""CacheStore: cached objects of backed buckets, stored whole or as chunks, and their freshness table.

The store looks up and writes; the cache manager decides what stays, and the origin what is current. The
freshness table is a fixed-size sketch in shared memory, emptied at every start: a slot taken by another
name costs only one more request to the origin. An object is composed of chunks of one ETag only.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.origins.client.origin_api import ObjectFacts
from meshd.store.errors import NotCachedError, StoreError
from meshd.store.records import Meta

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from meshd.cluster.cluster_view import ClusterView
    from meshd.control.buckets import Bucket, BucketTable
    from meshd.store.engine.writer import DiskObjectWriter
    from meshd.store.records import Extent, Record
    from meshd.store.store import Store
    from meshd.util.clock import Clock


_SLOTS: Final = 1 << 20
_GENERATIONS: Final = 1 << 12
_START_WORD: Final = _SLOTS + _GENERATIONS
_TABLE_BYTES: Final = (_START_WORD + 1) * 8
_SECONDS: Final = (1 << 24) - 1


class FreshnessTable:
    """A table with one word per slot: 40 bits of the name's hash, and 24 bits of the second it was noted."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._clock = clock
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # the first process creates it
            made = not os.fstat(fd).st_size
            if made:
                os.ftruncate(fd, _TABLE_BYTES)
            self._map = mmap.mmap(fd, _TABLE_BYTES)
            self._words = memoryview(self._map).cast("Q")
            if made:
                self._words[_START_WORD] = secrets.randbits(64)
            fcntl.flock(fd, fcntl.LOCK_UN)  # the mapping keeps the file open
        finally:
            os.close(fd)

    def mark_fresh(self, *name: str) -> None:
        """Note that the name is up to date now."""
        slot, tag = _place(name)
        self._words[slot] = tag << 24 | self._now()

    def mark_stale(self, *name: str) -> None:
        """Note that the name may not be up to date any more."""
        slot, tag = _place(name)
        if self._words[slot] >> 24 == tag:
            self._words[slot] = 0

    def is_fresh(self, ttl: float, *name: str) -> bool:
        """Whether the name was noted less than `ttl` seconds ago."""
        slot, tag = _place(name)
        word = self._words[slot]
        noted = word >> 24 == tag and word != 0
        return bool(noted and ((self._now() - word) & _SECONDS) < ttl)

    def write_mark(self, bucket: str) -> str:
        """Return a mark that changes when the bucket is written through this node, or the node restarts.
        Writes to other buckets may change it too."""
        return f"{self._words[_START_WORD]:x}-{self._words[_generation(bucket)]:x}"

    def bump_write_mark(self, bucket: str) -> None:
        """Change the mark after a write to the bucket. The value is random, so two concurrent writes never
        choose the same one."""
        self._words[_generation(bucket)] = secrets.randbits(64)

    def _now(self) -> int:
        return self._clock.now_ms() // 1000 & _SECONDS

    def close(self) -> None:
        self._words.release()
        self._map.close()


def _place(name: tuple[str, ...]) -> tuple[int, int]:
    digest = hashlib.blake2b("\0".join(name).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "big")
    return number % _SLOTS, number >> 24


def _generation(bucket: str) -> int:
    digest = hashlib.blake2b(bucket.encode(), digest_size=4).digest()
    return _SLOTS + int.from_bytes(digest, "big") % _GENERATIONS


CHUNK_BYTES: Final = 8 << 20
NEAR_CACHE_NAME: Final = "-near-@mesh"
"""The cache name under which copies of other nodes' data are stored (`near_cache`)."""
_COMPOSED: Final = 512  # maximum chunks composed into one record; larger objects are streamed
_SIZE, _MODIFIED, _KEY, _NUMBER = "size", "modified", "key", "number"


@dataclass(frozen=True, slots=True)
class Piece:
    """A unit of caching: an object, or chunk `number` of it (-1: all of it). `cache_bucket` is the name of
    its bucket in the cache; `size` is in bytes."""

    cache_bucket: str
    key: str
    number: int = -1
    size: int = 0


class CacheStore:
    """The cache of a node. One instance per process. A change of the cluster map ends the freshness of all
    entries, because another node may have written meanwhile."""

    def __init__(self, cache: Store, buckets: BucketTable, fresh: FreshnessTable, mesh: ClusterView) -> None:
        self.cache, self._buckets, self._fresh, self._mesh = cache, buckets, fresh, mesh

    def __repr__(self) -> str:
        return f"<CacheStore {self.cache!r}>"

    def backed_bucket(self, bucket: str) -> Bucket | None:
        """Return the bucket if it has an origin."""
        found = self._buckets.get(bucket)
        return None if found is None or found.origin is None else found

    # --- lookup

    def get(self, bucket: str, key: str) -> Record | None:
        """Return a fully cached object. Raises NotCachedError if its bucket has an origin and it is not
        cached."""
        found = self.backed_bucket(bucket)
        if found is None:
            return None
        record = self.cached_record(found, key)
        if record is None:
            raise NotCachedError(
                f"{bucket} has an origin, and {key[:200]!r} is not cached: "
                "read it once, or `mesh prefetch` it"
            )
        return record

    def require_listable(self, bucket: str) -> None:
        """Raise NotCachedError if the bucket has an origin."""
        if self.backed_bucket(bucket) is not None:
            raise NotCachedError(f"{bucket} has an origin, and this operation does not support its listing")

    def cached_facts(self, bucket: Bucket, key: str) -> ObjectFacts | None:
        """Return what the cache knows of an object, whether or not it has its bytes."""
        record = self.cache.get(cache_name(bucket), key)
        return None if record is None else _facts(record)

    def cached_record(self, bucket: Bucket, key: str) -> Record | None:
        """Return the object if all of it is cached."""
        cache_bucket = cache_name(bucket)
        head = self.cache.get(cache_bucket, key)
        if head is None:
            return None
        tags = head.tags
        if _SIZE not in tags:
            return _visible_record(head, bucket, head.size, head.extents)
        size = int(tags[_SIZE])
        count = -(-size // CHUNK_BYTES)
        if count > _COMPOSED:
            return None
        extents: list[Extent] = []
        for number in range(count):
            chunk = self.cached_chunk(cache_bucket, key, head.etag, number)
            if chunk is None:
                return None
            extents.extend(chunk.extents)
        return _visible_record(head, bucket, size, tuple(extents))

    def cached_chunk(self, cache_bucket: str, key: str, etag: str, number: int) -> Record | None:
        """Return a cached chunk of a large object."""
        return self.cache.get(_chunks(cache_bucket), _chunk_key(key, etag, number))

    def bytes_of(self, bucket: Bucket, key: str, facts: ObjectFacts, number: int) -> bytes | None:
        """Return the bytes of a cached piece (-1: all of a small object) of this ETag, if present
        (blocking)."""
        cache_bucket = cache_name(bucket)
        record = (
            self.cache.get(cache_bucket, key)
            if number < 0
            else self.cached_chunk(cache_bucket, key, facts.etag, number)
        )
        if record is None or record.etag != facts.etag:
            return None
        try:
            return self.cache.read_range(record, 0, record.size)
        except StoreError:  # just evicted, or damaged: the origin has it
            return None

    def all_pieces(self) -> Iterator[tuple[Piece, int]]:
        """Yield every cached piece with the number of its data file (0: none)."""
        with self.cache._index.read_transaction() as txn:
            for name, record in self.cache._index.all_records(txn):
                bucket, _, key = bytes(name).decode().partition("\0")
                file = record.extents[0].file if record.extents else 0
                if bucket.endswith("@chunks"):
                    number, told = int(record.tags[_NUMBER]), record.tags[_KEY]
                    yield Piece(bucket.removesuffix("@chunks"), told, number, record.size), file
                elif _SIZE not in record.tags:
                    yield Piece(bucket, key, -1, record.size), file

    # --- freshness

    def is_fresh(self, bucket: Bucket, key: str, etag: str) -> bool:
        """Whether a cached object needs no revalidation."""
        origin = bucket.origin
        assert origin is not None
        return origin.immutable or self._fresh.is_fresh(origin.ttl, self._known(bucket), key, etag)

    def is_absent(self, bucket: Bucket, key: str) -> bool:
        """Whether the origin reported within its TTL that the object does not exist."""
        origin = bucket.origin
        assert origin is not None
        return self._fresh.is_fresh(origin.ttl, self._known(bucket), key, "")

    def _known(self, bucket: Bucket) -> str:
        cache_bucket = cache_name(bucket)
        return (
            cache_bucket if self._mesh.single_node else f"{cache_bucket}@{self._mesh.current_map().version}"
        )

    def mark_fresh(self, bucket: Bucket, key: str, etag: str) -> None:
        """Record the origin's answer. An empty ETag means that the object does not exist."""
        known = self._known(bucket)
        self._fresh.mark_fresh(known, key, etag)
        if etag:
            self._fresh.mark_stale(known, key, "")

    def write_mark(self, bucket: Bucket) -> str:
        """Return the write mark of a bucket; see `FreshnessTable.write_mark`."""
        return self._fresh.write_mark(cache_name(bucket))

    def record_write(self, bucket: Bucket, key: str) -> None:
        """Record a write through this node: cached knowledge about the object is void."""
        self._fresh.mark_stale(self._known(bucket), key, "")
        self._fresh.bump_write_mark(cache_name(bucket))

    # --- writing and eviction

    def open_writer(
        self, bucket: Bucket, key: str, number: int, facts: ObjectFacts, length: int
    ) -> DiskObjectWriter:
        """Return a writer for an object, or for chunk `number` of a larger one."""
        cache_bucket = cache_name(bucket)
        if facts.size <= CHUNK_BYTES:
            return self.cache.writer(cache_bucket, key, size=length)
        return self.cache.writer(_chunks(cache_bucket), _chunk_key(key, facts.etag, number), size=length)

    async def commit_piece(
        self, bucket: Bucket, key: str, number: int, facts: ObjectFacts, writer: DiskObjectWriter
    ) -> None:
        """Add written bytes to the cache. Raises StoreError."""
        cache_bucket = cache_name(bucket)
        if facts.size <= CHUNK_BYTES:
            await writer.commit(_meta(facts, {}))
            return
        held = self.cache.get(cache_bucket, key)
        if held is None or held.etag != facts.etag:
            await self.cache.writer(cache_bucket, key, size=0).commit(_meta(facts, {_SIZE: str(facts.size)}))
        await writer.commit(Meta(facts.etag, tags={_KEY: key, _NUMBER: str(number)}))

    async def drop_object(self, bucket: Bucket, key: str) -> None:
        """Remove an object with its chunks."""
        cache_bucket = cache_name(bucket)
        head = self.cache.get(cache_bucket, key)
        if head is None:
            return
        await self.cache.delete(cache_bucket, key)
        if _SIZE in head.tags:
            count = -(-int(head.tags[_SIZE]) // CHUNK_BYTES)
            names = [_chunk_key(key, head.etag, number) for number in range(count)]
            there = [name for name in names if self.cache.get(_chunks(cache_bucket), name) is not None]
            await self.cache.delete_many(_chunks(cache_bucket), there)

    async def evict_piece(self, piece: Piece) -> None:
        """Remove one object or chunk."""
        if piece.number < 0:
            await self.cache.delete(piece.cache_bucket, piece.key)
            return
        head = self.cache.get(piece.cache_bucket, piece.key)
        if head is not None:
            await self.cache.delete(
                _chunks(piece.cache_bucket), _chunk_key(piece.key, head.etag, piece.number)
            )


def cache_name(bucket: Bucket) -> str:
    """Return the name of a bucket in the cache; a bucket that is created again gets another one."""
    return f"{bucket.name}@{bucket.created_ms}"


def _chunks(cache_bucket: str) -> str:
    return f"{cache_bucket}@chunks"


def _chunk_key(key: str, etag: str, number: int) -> str:
    name = hashlib.blake2b(f"{key}\0{etag}".encode(), digest_size=16).hexdigest()
    return f"{name}/{number:08x}"


def _meta(facts: ObjectFacts, told: dict[str, str]) -> Meta:
    return Meta(
        facts.etag,
        dict(facts.headers),
        dict(facts.metadata),
        tags={**told, _MODIFIED: str(facts.modified)},
    )


def _facts(record: Record) -> ObjectFacts:
    size = int(record.tags.get(_SIZE, record.size))
    return ObjectFacts(size, record.etag, int(record.tags[_MODIFIED]), record.headers, record.metadata)


def record_from_facts(bucket: Bucket, facts: ObjectFacts) -> Record:
    """Return the record of an object of which nothing need be cached."""
    from meshd.store.records import Record

    return Record(
        facts.size,
        facts.etag,
        0,
        facts.modified,
        (),
        dict(facts.headers),
        dict(facts.metadata),
        owner=bucket.owner,
    )


def _visible_record(record: Record, bucket: Bucket, size: int, extents: tuple[Extent, ...]) -> Record:
    return msgspec.structs.replace(
        record,
        size=size,
        extents=extents,
        modified=int(record.tags[_MODIFIED]),
        owner=bucket.owner,
        tags={},
    )
