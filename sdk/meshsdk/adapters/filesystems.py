"""The store as an fsspec file system: `mesh://bucket/key`, for pandas, xarray, datasets and others.

Law: a written file appears as a whole when it is closed; a read sees one version or an error. Nothing is
cached here.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import io
import os
import tempfile
import time
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from meshsdk.client.gather import CREDIT, Item
from meshsdk.client.request import object_path
from meshsdk.client.s3_client import connect
from meshsdk.errors import AccessError, ConfigurationError, NotFoundError, PreconditionError, ServerError
from meshsdk.transfers import COPYING_WHOLE, copy, download, stream, upload
from meshwire.sigv4 import presign

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.client.object_info import ObjectInfo
    from meshwire.s3.result_types import ObjectEntry

PROTOCOL = "mesh"
_IN_MEMORY = 16 << 20
_BEYOND = 416  # of a range that begins at or after the end; of a file that gives no bytes
# Options that libraries pass to any file system: those of fsspec's base class (zarr) and arguments of
# `open` (`datasets`, when streaming). `connect` rejects unknown options, so they are removed here.
_OF_OTHERS = {"asynchronous", "batch_size", "listings_expiry_time", "loop", "max_paths", "use_listings_cache"}
_OF_OTHERS |= {"encoding", "errors", "newline"}


@contextmanager
def as_os_errors(path: str) -> Iterator[None]:
    """Convert SDK errors to the exceptions that callers of a file system expect."""
    try:
        yield
    except NotFoundError as error:
        raise FileNotFoundError(f"mesh://{path}: {error}") from error
    except AccessError as error:
        raise PermissionError(f"mesh://{path}: {error}") from error
    except ServerError as error:
        if error.code != "BucketNotEmpty":
            raise
        raise OSError(errno.ENOTEMPTY, str(error), f"mesh://{path}") from error


def split_path(path: str) -> tuple[str, str]:
    """Split a path without protocol into (bucket, key)."""
    bucket, _, key = path.partition("/")
    return bucket, key


class MeshFileSystem(AbstractFileSystem):
    """The fsspec file system. Options are those of `meshsdk.connect` (endpoint, access_key, …), by default
    from the environment, and `block_size`: bytes that a file reads per request, unless `open` overrides it.
    """

    protocol = PROTOCOL
    root_marker = ""

    def __init__(self, *, block_size: int | None = None, **options: Any) -> None:
        super().__init__(use_listings_cache=False)
        self.block_size = block_size
        self.client = connect(**{name: value for name, value in options.items() if name not in _OF_OTHERS})

    # --- looking ----------------------------------------------------------------------------------

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        bucket, key = split_path(path)
        with as_os_errors(path):
            if not key:
                if bucket and not self.client.has_bucket(bucket):
                    raise FileNotFoundError(f"mesh://{path}: no such bucket")
                return _folder(path)
            try:
                found = self.client.head(bucket, key)
            except NotFoundError:
                if next(self.client.list(bucket, f"{key}/"), None) is None:
                    raise
                return _folder(path)
        return _file(path, found.size, found.etag, found.modified_ms)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        bucket, key = split_path(path)
        with as_os_errors(path):
            if not bucket:
                found = [_folder(entry.name) for entry in self.client.buckets()]
            else:
                found = list(self._children(bucket, f"{key}/" if key else ""))
                if not found and key:
                    itself = self.info(path)
                    found = [itself] if itself["type"] == "file" else []  # an empty folder
        return found if detail else [entry["name"] for entry in found]

    def _children(self, bucket: str, prefix: str) -> Iterator[dict[str, Any]]:
        for page in self.client.pages(bucket, prefix, delimiter="/"):
            for common in page.common_prefixes:
                yield _folder(f"{bucket}/{common.rstrip('/')}")
            for entry in page.entries:
                if entry.key != prefix:
                    yield _entry(bucket, entry)

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        **more: Any,
    ) -> Any:
        """Find all files below a path with a single listing instead of one per folder."""
        path = self._strip_protocol(path)
        bucket, key = split_path(path)
        if maxdepth is not None or withdirs or not bucket:
            return super().find(path, maxdepth=maxdepth, withdirs=withdirs, detail=detail, **more)
        with as_os_errors(path):
            listed = self.client.list(bucket, f"{key}/" if key else "")
            found = [_entry(bucket, entry) for entry in listed if not entry.key.endswith("/")]
        if not found and key and self.isfile(path):
            found = [self.info(path)]
        return {entry["name"]: entry for entry in found} if detail else [entry["name"] for entry in found]

    def created(self, path: str) -> datetime.datetime:
        return self.modified(path)

    def modified(self, path: str) -> datetime.datetime:
        moment: datetime.datetime = self.info(path)["LastModified"]
        return moment

    def checksum(self, path: str) -> int:
        """Return a number that differs for different content, and is the same in every process."""
        return int.from_bytes(hashlib.sha256(self.info(path)["ETag"].encode()).digest()[:16])

    # --- bytes ------------------------------------------------------------------------------------

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        path = self._strip_protocol(path)
        bucket, key = split_path(path)
        if (start or 0) < 0 or (end or 0) < 0:
            size = self.info(path)["size"]
            start, end, _step = slice(start, end).indices(size)
        length = None if end is None else max(0, end - (start or 0))
        with as_os_errors(path):
            try:
                return self.client.get(bucket, key, offset=start or 0, length=length)
            except ServerError as error:
                if error.status != _BEYOND:
                    raise
                return b""

    def cat_ranges(
        self,
        paths: list[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **_: Any,
    ) -> list[Any]:
        """Read many ranges in a few requests; `max_gap` is ignored, because the node merges ranges."""
        count = len(paths)
        firsts = starts if isinstance(starts, list) else [starts] * count
        lasts = ends if isinstance(ends, list) else [ends] * count
        if not len(firsts) == len(lasts) == count:
            raise ValueError("paths, starts and ends differ in length")
        items = []
        for path, first, last in zip(paths, firsts, lasts, strict=True):
            if last is None or (first or 0) < 0 or last < 0 or last - (first or 0) > CREDIT:
                return super().cat_ranges(paths, firsts, lasts, on_error=on_error)  # type: ignore[no-any-return]
            length = max(0, last - (first or 0))
            items.append(Item(*split_path(self._strip_protocol(path)), offset=first or 0, length=length))
        found: list[Any] = []
        for answer in self.client.gather(items):
            if answer.error is not None and answer.error.status == _BEYOND:
                found.append(b"")
                continue
            try:
                with as_os_errors(str(answer.item)):
                    found.append(bytes(answer.data))
            except Exception as error:
                if on_error != "return":
                    raise
                found.append(error)
        return found

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        path = self._strip_protocol(path)
        with as_os_errors(path):
            try:
                self.client.put(*split_path(path), value, if_absent=mode == "create")
            except PreconditionError as error:
                raise FileExistsError(f"mesh://{path}: {error}") from error

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        if Path(lpath).is_dir():
            return
        path = self._strip_protocol(rpath)
        with as_os_errors(path):
            upload(self.client, Path(lpath), *split_path(path))

    def get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        path = self._strip_protocol(rpath)
        if self.isdir(path):
            Path(lpath).mkdir(parents=True, exist_ok=True)
            return
        Path(lpath).parent.mkdir(parents=True, exist_ok=True)
        with as_os_errors(path):
            download(self.client, *split_path(path), Path(lpath))

    def open(self, path: str, mode: str = "rb", *args: Any, **more: Any) -> Any:
        """Open a file, as in fsspec. Text is not stored if its `with` block failed."""
        if "b" in mode or "r" in mode:
            return super().open(path, mode, *args, **more)
        text = {name: more.pop(name) for name in ("encoding", "errors", "newline") if name in more}
        return MeshTextWriter(super().open(path, f"{mode.replace('t', '')}b", *args, **more), **text)

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        cache_options: Any = None,
        autocommit: bool = True,
        **more: Any,
    ) -> Any:
        if mode == "rb":
            size = block_size or self.block_size or "default"
            return MeshFile(self, path, mode, size, cache_options=cache_options, **more)
        if mode == "wb":
            return MeshWriter(self, path, autocommit=autocommit)
        if mode in ("xb", "ab"):
            return self._open_append(path, mode, autocommit=autocommit)
        raise ConfigurationError(
            f"mode {mode!r} is not supported: objects are written as a whole; read with 'rb', write with "
            "'wb'; 'xb' and 'ab' are supported as well"
        )

    def _open_append(self, path: str, mode: str, *, autocommit: bool) -> MeshWriter:
        """Open a file that must be new ("xb") or starts with the existing content ("ab")."""
        bucket, key = split_path(path)
        with as_os_errors(path):
            try:
                found = self.client.head(bucket, key)
            except NotFoundError:
                return MeshWriter(self, path, autocommit=autocommit, if_absent=True)
            if mode == "xb":
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), f"mesh://{path}")
            writer = MeshWriter(self, path, autocommit=autocommit, onto=found)
            try:
                writer.writelines(stream(self.client, bucket, key))
            except BaseException:
                writer.discard()
                raise
            return writer

    def sign(self, path: str, expiration: int = 100, **_: Any) -> str:
        """Return a URL that allows anyone to read the object for `expiration` seconds, a week at most, with
        the rights of these keys and as long as they are valid. Raises ValueError for another time."""
        bucket, key = split_path(self._strip_protocol(path))
        if not key:
            raise ConfigurationError(f"mesh://{path}: expected a path with a bucket and a key")
        transport = self.client.transport
        return presign(
            "GET",
            f"{transport.settings.endpoint}{object_path(bucket, key)}",
            transport.keys.current(),
            region=transport.settings.region,
            expires=expiration,
            timestamp=int(time.time()),
        )

    # --- changing ---------------------------------------------------------------------------------

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        one, two = self._strip_protocol(path1), self._strip_protocol(path2)
        if self.isdir(one):
            return
        with as_os_errors(one):
            copy(self.client, split_path(one), split_path(two), tuning=COPYING_WHOLE)

    def _rm(self, path: str) -> None:
        bucket, key = split_path(self._strip_protocol(path))
        with as_os_errors(path):
            if key:
                self.client.delete(bucket, key)
            else:
                self.client.delete_bucket(bucket)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Delete paths. Folders are only names: `recursive` deletes everything below, a thousand keys per
        request."""
        for each in path if isinstance(path, list) else [path]:
            bucket, key = split_path(self._strip_protocol(each))
            if not recursive or maxdepth is not None:
                super().rm(each, recursive=recursive, maxdepth=maxdepth)
                continue
            with as_os_errors(each):
                below = (entry.key for entry in self.client.list(bucket, f"{key}/" if key else ""))
                while batch := list(islice(below, 1000)):
                    failed = self.client.delete_many(bucket, batch)
                    if failed:
                        raise PermissionError(f"mesh://{bucket}/{failed[0].key}: {failed[0].message}")
            self._rm(each)

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Create the bucket; a folder exists once it contains something."""
        bucket, key = split_path(self._strip_protocol(path))
        if not key or create_parents:
            self.client.create_bucket(bucket)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        if not exist_ok and self.exists(path):
            raise FileExistsError(path)
        self.mkdir(path)

    def rmdir(self, path: str) -> None:
        if not split_path(self._strip_protocol(path))[1]:
            self._rm(path)


class MeshFile(AbstractBufferedFile):
    """A file opened for reading, at the version it had when it was opened."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        bucket, key = split_path(self.path)
        with as_os_errors(self.path):
            client: Any = self.fs.client
            read: bytes = client.get(bucket, key, offset=start, length=end - start, etag=self.details["ETag"])
            return read


class MeshWriter(tempfile.SpooledTemporaryFile):  # type: ignore[type-arg]
    """A file opened for writing: buffered locally, up to 16 MiB in memory, and stored when it is closed,
    but not if its own `with` block failed (a wrapper, such as a compressor, always closes it normally).
    In a transaction (`autocommit` is off) it is stored when that ends. `if_absent`: raise FileExistsError
    on storing if the object exists; `onto`: the object it replaces, whose type and metadata it takes over;
    raise PreconditionError if that was replaced in the meantime."""

    def __init__(
        self,
        fs: MeshFileSystem,
        path: str,
        *,
        autocommit: bool = True,
        if_absent: bool = False,
        onto: ObjectInfo | None = None,
    ) -> None:
        super().__init__(max_size=_IN_MEMORY)
        self.fs, self.path, self._failed, self._stores = fs, path, False, autocommit
        self._if_absent, self._onto = if_absent, onto

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        """There is no descriptor: written data becomes durable only when the file is closed."""
        raise io.UnsupportedOperation("fileno")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.note_failure(kind)
        self.close()

    def note_failure(self, kind: Any) -> None:
        """Closing does not store the file after an exception; `kind`: None if there was none."""
        self._failed = kind is not None

    def commit(self) -> None:
        """Store the file at the end of a transaction."""
        self._stores = True
        self.close()

    def discard(self) -> None:
        """Close the file without storing it."""
        self._failed = True
        self.close()

    def close(self) -> None:
        if self.closed or not (self._stores or self._failed):
            return
        try:
            if not self._failed:
                self.seek(0)
                self._store()
        finally:
            super().close()

    def _store(self) -> None:
        onto = self._onto
        with as_os_errors(self.path):
            try:
                upload(
                    self.fs.client,
                    self,
                    *split_path(self.path),
                    metadata=None if onto is None else onto.metadata,
                    content_type=None if onto is None else onto.content_type or None,
                    if_absent=self._if_absent,
                    etag=None if onto is None else onto.etag,
                )
            except PreconditionError as error:
                if not self._if_absent:
                    raise
                raise FileExistsError(
                    errno.EEXIST, os.strerror(errno.EEXIST), f"mesh://{self.path}"
                ) from error


class MeshTextWriter(io.TextIOWrapper):
    """A file opened for writing text."""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(self.buffer, MeshWriter):
            self.buffer.note_failure(kind)
        self.close()


def _folder(path: str) -> dict[str, Any]:
    return {"name": path, "size": 0, "type": "directory"}


def _file(path: str, size: int, etag: str, modified_ms: int) -> dict[str, Any]:
    moment = datetime.datetime.fromtimestamp(modified_ms / 1000, datetime.UTC)
    return {"name": path, "size": size, "type": "file", "ETag": etag, "LastModified": moment}


def _entry(bucket: str, entry: ObjectEntry) -> dict[str, Any]:
    return _file(f"{bucket}/{entry.key}", entry.size, entry.etag, entry.modified_ms)


fsspec.register_implementation(PROTOCOL, MeshFileSystem, clobber=True)
