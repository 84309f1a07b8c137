"""torch distributed checkpoints as objects of the store, written and read in parallel parts.

Law: a file appears as a whole once its last byte is durable, and not at all if saving failed; a read sees
one version of each file. Saving continues while parts are in flight; loading prefetches only the ranges
this rank needs, and only those that were announced.
Invariant: memory is bounded by the parts, not by the checkpoint: a read buffers at most the current span and
`parallel` parts ahead of it.
"""

from __future__ import annotations

import io
import threading
from bisect import bisect_right
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystemBase

from meshsdk.client.request import get_request
from meshsdk.client.s3_client import connect
from meshsdk.errors import ConfigurationError, CorruptFrameError, MeshError, NotFoundError
from meshsdk.transfers import Tuning, upload

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from meshsdk.client.s3_client import Client

    Path = str | os.PathLike[str]
    from collections.abc import Iterable
    from concurrent.futures import Future

    from meshsdk.client.http_connection import Response

    Span = tuple[int, int]

_SCHEMES = ("s3://", "mesh://")


class CheckpointWriter(FileSystemWriter):
    """Writes a checkpoint: `checkpoint.save(state, storage_writer=CheckpointWriter("s3://runs/step-700"))`,
    or `async_save`.

    For each file, `tuning.parallel` parts of `tuning.part` bytes are in flight at once, and as many bytes
    wait in memory. `more` are arguments of FileSystemWriter: a rank writes `thread_count` files at once,
    `overwrite=False` refuses to replace a checkpoint. The bucket must exist.
    """

    def __init__(
        self, url: str, client: Client | None = None, *, tuning: Tuning | None = None, **more: Any
    ) -> None:
        super().__init__(url, sync_files=False, **more)  # an object is durable when it is closed
        self.fs = Objects(client or connect(), tuning or Tuning())
        self.path = self.fs.init_path(url)

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write the files as torch does. Raises what any of them failed with: torch loses what its threads
        raise, and would save a checkpoint without their tensors."""
        self.fs.failed.clear()
        written = super().write_data(plan, planner)
        if self.fs.failed:
            raise self.fs.failed[0]
        return written

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        return Objects.validate_checkpoint_id(checkpoint_id)


class CheckpointReader(FileSystemReader):
    """Reads a checkpoint: `checkpoint.load(state, storage_reader=CheckpointReader("s3://runs/step-700"))`,
    with any number of ranks: each requests the ranges of its own tensors, several at once, in stored order.

    Raises NotFoundError if there is no (complete) checkpoint, PreconditionError if one of its files is
    replaced in the meantime.
    """

    def __init__(self, url: str, client: Client | None = None, *, tuning: Tuning | None = None) -> None:
        super().__init__(url)
        self.fs = Objects(client or connect(), tuning or Tuning())
        self.path = self.fs.init_path(url)

    def read_data(self, plan: Any, planner: Any) -> Any:
        places = {id(item): self.storage_data[item.storage_index] for item in plan.items}
        wanted: dict[str, list[tuple[int, int]]] = {}
        for place in places.values():
            path = self.fs.concat_path(self.path, place.relative_path)
            wanted.setdefault(path, []).append((place.offset, place.offset + place.length))
        self.fs.wanted = wanted
        try:
            ordered = sorted(
                plan.items, key=lambda item: (places[id(item)].relative_path, places[id(item)].offset)
            )
            return super().read_data(replace(plan, items=ordered), planner)
        finally:
            self.fs.wanted = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        return Objects.validate_checkpoint_id(checkpoint_id)


class Objects(FileSystemBase):
    """The file system that torch's readers and writers use. `wanted`: by path, the ranges that are about to
    be read; `failed`: what writing failed with, in any thread."""

    def __init__(self, client: Client, tuning: Tuning) -> None:
        self.client, self.tuning = client, tuning
        self.failed: list[BaseException] = []
        self.wanted: Mapping[str, Sequence[tuple[int, int]]] = {}

    @contextmanager
    def create_stream(self, path: Path, mode: str) -> Iterator[Any]:
        bucket, key = _split(path)
        if mode == "wb":
            try:
                with Sending(self.client, bucket, key, self.tuning) as sending:
                    yield sending
            except BaseException as error:
                self.failed.append(error)
                raise
            return
        if str(path) not in self.wanted:
            yield io.BytesIO(self.client.get(bucket, key))
            return
        spans = merged(self.wanted[str(path)], self.tuning.part)
        with Ranges(self.client, bucket, key, spans, self.tuning) as ranges:
            yield ranges

    def concat_path(self, path: Path, suffix: str) -> str:
        return f"{path}/{suffix}"

    def init_path(self, path: Path) -> str:
        _split(path)
        return str(path).rstrip("/")

    def rename(self, path: Path, new_path: Path) -> None:
        self.client.copy(*_split(path), *_split(new_path))
        self.client.delete(*_split(path))

    def mkdir(self, path: Path) -> None:
        bucket, _ = _split(path)
        if not self.client.has_bucket(bucket):
            raise ConfigurationError(
                f"{path}: there is no bucket {bucket!r}; create it with `mesh mb s3://{bucket}`"
            )

    def exists(self, path: Path) -> bool:
        try:
            self.client.head(*_split(path))
        except NotFoundError:
            return False
        return True

    def rm_file(self, path: Path) -> None:
        self.client.delete(*_split(path))

    def ls(self, path: Path) -> list[str]:
        bucket, key = _split(path)
        return [f"s3://{bucket}/{entry.key}" for entry in self.client.list(bucket, f"{key.rstrip('/')}/")]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        return str(checkpoint_id).startswith(_SCHEMES)


class Sending(io.RawIOBase):
    """A file that is uploaded while it is written: full parts are sent in the background. Closing waits
    until the object is durable; an exception in its `with` block or in sending leaves no object."""

    def __init__(self, client: Client, bucket: str, key: str, tuning: Tuning) -> None:
        super().__init__()
        self._part, self._full, self._size, self._most = bytearray(), tuning.part, 0, tuning.parallel
        self._ready: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._whole = self._failed = self._ended = False
        self._error: BaseException | None = None

        def send() -> None:
            try:
                upload(client, _Source(self.take), bucket, key, tuning=tuning)
            except BaseException as error:
                self._error = error
            with self._changed:
                self._ended = True
                self._changed.notify_all()

        self._sender = threading.Thread(target=send, name="mesh-checkpoint", daemon=True)
        self._sender.start()

    def take(self) -> bytes:
        """Return the next part for the sender, empty after the last."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._whole or self._failed)
            if self._failed:
                raise MeshError("upload cancelled: saving failed")
            part = self._ready.popleft() if self._ready else b""
            self._changed.notify_all()
            return part

    def _put(self, part: bytes) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) < self._most or self._ended)
            if self._ended:
                raise self._error or MeshError("the upload ended before all parts were sent")
            self._ready.append(part)
            self._changed.notify_all()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        self._size += len(view)
        left = view
        while left:
            room = self._full - len(self._part)
            if room == self._full <= len(left):
                self._put(bytes(left[:room]))
            else:
                self._part += left[:room]
                if len(self._part) == self._full:
                    self._put(bytes(self._part))
                    self._part.clear()
            left = left[room:]
        return len(view)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            self._failed = True
        self.close()

    def close(self) -> None:
        if self.closed:
            return
        try:
            if not self._failed and self._part:
                self._put(bytes(self._part))
        finally:
            with self._changed:
                self._whole = True
                self._changed.notify_all()
            self._sender.join()
            super().close()
        if self._error is not None and not self._failed:
            raise self._error


class _Source(io.BytesIO):
    """The source of an upload, which returns parts as they become available."""

    def __init__(self, take: Callable[[], bytes]) -> None:
        super().__init__()
        self._take = take

    def read(self, _: int | None = -1, /) -> bytes:
        return self._take()


def _split(path: Path) -> tuple[str, str]:
    text = str(path)
    scheme = next((scheme for scheme in _SCHEMES if text.startswith(scheme)), None)
    bucket, _, key = text.removeprefix(scheme or "").partition("/")
    if scheme is None or not bucket or not key.rstrip("/"):
        raise ConfigurationError(
            f"{text!r}: a checkpoint must be a folder in a bucket, such as s3://runs/step-700"
        )
    return bucket, key


_GAP = 64 << 10  # unwanted bytes that are cheaper to read than a second request


def merged(ranges: Iterable[Span], most: int) -> list[Span]:
    """Sort ranges (first, end) and merge adjacent ones into spans of at most `most` bytes."""
    spans: list[Span] = []
    for first, last in sorted(ranges):
        if spans and first <= spans[-1][1] + _GAP and max(last, spans[-1][1]) - spans[-1][0] <= most:
            spans[-1] = spans[-1][0], max(last, spans[-1][1])
        else:
            spans.append((first, last))
    return spans


class Ranges(io.RawIOBase):
    """A file in which only the `spans` can be read, roughly in their order."""

    def __init__(self, client: Client, bucket: str, key: str, spans: Sequence[Span], tuning: Tuning) -> None:
        super().__init__()
        self._client, self._bucket, self._key = client, bucket, key
        self._spans, self._part, self._position = list(spans), tuning.part, 0
        self._firsts = [first for first, _ in spans]
        self._etag = client.head(bucket, key).etag
        self._ahead = tuning.part * tuning.parallel
        self._pool = ThreadPoolExecutor(tuning.parallel, thread_name_prefix="mesh-ranges")
        self._coming: OrderedDict[int, tuple[bytearray, list[Future[None]]]] = OrderedDict()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence == io.SEEK_END:
            raise io.UnsupportedOperation("ranges have no end")
        self._position = offset + (self._position if whence == io.SEEK_CUR else 0)
        return self._position

    def readinto(self, into: Any, /) -> int:
        target = memoryview(into).cast("B")
        number = bisect_right(self._firsts, self._position) - 1
        if number < 0 or self._position >= self._spans[number][1] or not target:
            return 0
        start = self._position - self._spans[number][0]
        data = memoryview(self._span(number))[start : start + len(target)]
        target[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _span(self, number: int) -> bytearray:
        """Return the bytes of a span; drop the spans before it and prefetch those after it."""
        for done in [known for known in self._coming if known < number]:
            del self._coming[done]
        ahead = 0
        for coming in range(number, len(self._spans)):
            if coming > number and ahead >= self._ahead:
                break
            first, last = self._spans[coming]
            ahead += last - first if coming > number else 0
            if coming not in self._coming:
                self._coming[coming] = self._ask(first, last)
        data, parts = self._coming[number]
        for part in parts:
            part.result()
        return data

    def _ask(self, first: int, last: int) -> tuple[bytearray, list[Future[None]]]:
        data = bytearray(last - first)
        view = memoryview(data)
        parts = []
        for start in range(0, len(data), self._part):
            into = view[start : start + self._part]
            parts.append(self._pool.submit(self._fetch, first + start, into))
        return data, parts

    def _fetch(self, offset: int, into: memoryview) -> None:
        def read(response: Response) -> None:
            if response.length != len(into):
                raise CorruptFrameError(f"received {response.length} bytes for a range of {len(into)} bytes")
            response.readinto(into)

        request = get_request(self._bucket, self._key, offset, len(into), self._etag)
        self._client.transport.call(request, read)

    def close(self) -> None:
        if not self.closed:
            self._pool.shutdown(cancel_futures=True)
            self._coming.clear()
        super().close()
