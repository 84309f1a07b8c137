"""Writes generated samples as tar shards, in WebDataset's convention: a sample is the files of one stem.

Law: a shard appears whole or not at all, under a name that no other writer has taken, and so does a sample:
one whose writing was interrupted is in no shard. What a value is stored
as follows from its type and its field's extension, so the same samples give the same bytes. A writer that is
started again continues after the last stored shard; a request of its earlier life that is carried out only
now is met by its bytes.
"""

from __future__ import annotations

import io
import json
import logging
import re
import secrets
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import IO, TYPE_CHECKING, Any, Final, Self

import numpy as np

from meshsdk.byte_sizes import format_size, parse_size
from meshsdk.errors import ClosedError, ConfigurationError, PreconditionError
from meshsdk.transfers import upload
from meshwire.dataset.fields import parse_source
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from concurrent.futures import Future
    from types import TracebackType

    from meshsdk.client.s3_client import Client
    from meshwire.dataset.fields import Source

SHARD_BYTES: Final = 256 << 20
_COMPARED_BYTES: Final = 16 << 20
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_KEY: Final = re.compile(r"[^./\x00-\x1f][^.\x00-\x1f]*")
_FIELD: Final = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
_SHARD: Final = "{name}-{number:06d}.tar"
_log = logging.getLogger("meshsdk")


class Writer:
    """Writes samples to tar shards under a URL, for `mesh.open`, WebDataset and any S3 client.

    A shard is filled in a temporary file and stored in the background, so up to two shards lie on the local
    disk. The open shard is stored at the end of the `with` block, also if the block raises. A writer belongs
    to one thread; several processes write to one folder under a `name` each.

    Arguments:
        url: a folder, such as "s3://synthetic/train". The bucket must exist.
        name: what the names of shards and samples begin with: `shard-000000.tar`, `shard-000000000.jpg`.
        shard_bytes: a shard ends with the sample that reaches this size: bytes, or text such as "256MiB".
        shard_samples: and with so many samples. Default: no such limit.
        optional: fields that a sample may leave out.
        resume: continue after the shards of this name that are there; without it, they are an error.
        client: a client from `mesh.connect`. Default: one configured by the environment.

    Attributes:
        position: samples in stored shards when the writer was opened; a generator continues with this number.
        samples: samples written so far, `position` included.
        shards: stored shards, earlier ones included. Only samples in these survive a crash.

    Raises:
        ConfigurationError: an argument is invalid, or the folder has shards of this name.
        NotFoundError: the bucket does not exist.

    Example:
        with mesh.Writer("s3://synthetic/train", resume=True) as out:
            for number in range(out.position, 100_000):
                out.write({"jpg": render(number), "json": {"seed": number}, "cls": number % 10})
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "shard",
        shard_bytes: int | str = SHARD_BYTES,
        shard_samples: int | None = None,
        optional: Collection[str] = (),
        resume: bool = False,
        client: Client | None = None,
    ) -> None:
        self._place, self._name = _folder(url), _checked_name(name)
        self._shard_bytes = _checked_limit("shard_bytes", shard_bytes)
        self._shard_samples = (
            None if shard_samples is None else _checked_limit("shard_samples", shard_samples)
        )
        self._optional = frozenset(optional)
        if client is None:
            from meshsdk.client.s3_client import connect

            client = connect()
        self._client = client
        self._fields: dict[str, str] = {}  # how each is stored: as the first sample that had it
        self._token = secrets.token_hex(8)
        self.shards, self.position = self._stored_shards(resume=resume)
        self.samples = self.position
        self._pool = ThreadPoolExecutor(1, "mesh-writer")
        self._storing: Future[None] | None = None
        self._shard: _Shard | None = None
        self._closed = False

    def write(self, sample: Mapping[str, Any], key: str | None = None) -> None:
        """Add a sample: each field's extension and its value.

        bytes are stored as they are, text as UTF-8, numbers as decimal text, NumPy arrays and CPU tensors
        under "npy" as NumPy's own files, and under "json" anything that JSON can hold. All samples have the
        same fields, except `optional` ones, and a field is stored in one way. `key`: the stem of the sample's
        files, which must be unique in the folder. Default: the writer's name and the sample's number.

        Raises ConfigurationError for a wrong sample, which is then not written, and the error of an earlier
        shard that could not be stored: the writer is of no more use then, and a new one continues.
        """
        if self._closed:
            raise ClosedError("the writer is closed")
        where = f"sample {self.samples}"
        stored = {field: _encode_value(where, field, value) for field, value in sample.items()}
        self._check_fields(where, {field: kind for field, (kind, _) in stored.items()})
        stem = f"{self._name}-{self.samples:09d}" if key is None else key
        if not _KEY.fullmatch(stem):
            raise ConfigurationError(f"{where}: key={key!r:.80}: expected a name without a dot: 'cat/0001'")
        if self._shard is None:
            self._shard = _Shard(self.samples)
        if stem in self._shard.stems:
            raise ConfigurationError(f"{where}: there is a sample {stem!r:.80} in this shard already")
        self._shard.add(stem, {field: data for field, (_, data) in stored.items()})
        for field, (kind, _) in stored.items():
            self._fields.setdefault(field, kind)
        self.samples += 1
        if self._shard.size >= self._shard_bytes or self._shard.samples == self._shard_samples:
            self._end_shard()

    def close(self) -> None:
        """Store the open shard and wait until it is durable. Raises the error of a shard that could not be
        stored."""
        if self._closed:
            return
        try:
            self._end_shard()
            self._await_stored()
        finally:
            self._abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as failed:  # the error of the block is the one to be seen
            _log.warning("the last shard was not stored: %s", failed)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<Writer {self._place} {self._name}: {self.samples} samples, {self.shards} shards, {state}>"

    # --- shards -----------------------------------------------------------------------------------------

    def _end_shard(self) -> None:
        if self._shard is None:
            return
        self._await_stored()
        shard, self._shard = self._shard, None
        self._storing = self._pool.submit(self._store, shard, self.shards)

    def _await_stored(self) -> None:
        if self._storing is None:
            return
        storing, self._storing = self._storing, None
        try:
            storing.result()
        except BaseException:
            self._abandon()
            raise
        self.shards += 1

    def _abandon(self) -> None:
        self._closed = True
        if self._shard is not None:
            self._shard.file.close()
            self._shard = None
        self._pool.shutdown(wait=False)

    def _store(self, shard: _Shard, number: int) -> None:
        key = self._place.prefix + _SHARD.format(name=self._name, number=number)
        metadata = {
            "mesh-writer": self._token,
            "mesh-first": str(shard.first),
            "mesh-samples": str(shard.samples),
            "mesh-fields": json.dumps(self._fields, separators=(",", ":"), sort_keys=True),
        }
        with shard.file as file:
            shard.finish()
            try:
                upload(self._client, file, self._place.bucket, key, metadata=metadata, if_absent=True)
            except PreconditionError as error:
                if not self._is_stored(key, file, metadata):
                    raise ConfigurationError(
                        f"s3://{self._place.bucket}/{key} has been written by another writer, with "
                        "other contents: give each writer of a folder its own name=. If it was this program "
                        "before it was killed, start it again with resume=True"
                    ) from error

    def _is_stored(self, key: str, file: IO[bytes], metadata: Mapping[str, str]) -> bool:
        """Return whether a shard that exists already is this one. A repeated request has met its own first
        try, or a program that was killed and started again the last request of its earlier life."""
        found = self._client.head(self._place.bucket, key)
        if found.metadata.get("mesh-writer") == self._token:
            return True
        samples = ("mesh-first", "mesh-samples")
        if any(found.metadata.get(name) != metadata[name] for name in samples):
            return False
        if found.size != file.seek(0, io.SEEK_END):
            return False
        file.seek(0)
        for offset in range(0, found.size, _COMPARED_BYTES):
            stored = self._client.get(
                self._place.bucket, key, offset=offset, length=_COMPARED_BYTES, etag=found.etag
            )
            if stored != file.read(len(stored)):
                return False
        _log.info("s3://%s/%s was stored by an earlier request already", self._place.bucket, key)
        return True

    def _stored_shards(self, *, resume: bool) -> tuple[int, int]:
        """Return the number of shards of this name, and of their samples."""
        begin = f"{self._place.prefix}{self._name}-"
        listed = {entry.key for entry in self._client.list(self._place.bucket, begin)}
        count = 0
        while self._place.prefix + _SHARD.format(name=self._name, number=count) in listed:
            count += 1
        if not count:
            return 0, 0
        last = self._place.prefix + _SHARD.format(name=self._name, number=count - 1)
        found = self._client.head(self._place.bucket, last).metadata
        try:
            position = int(found["mesh-first"]) + int(found["mesh-samples"])
            fields = json.loads(found["mesh-fields"])
        except (KeyError, ValueError) as error:
            raise ConfigurationError(
                f"s3://{self._place.bucket}/{last} is of no Writer; choose another folder or name="
            ) from error
        if not resume:
            raise ConfigurationError(
                f"{self._place} has {count} shards of {position} samples named {self._name!r}: pass "
                "resume=True to continue after them, or choose another folder or name="
            )
        self._fields = {str(field): str(kind) for field, kind in fields.items()}
        return count, position

    # --- fields -----------------------------------------------------------------------------------------

    def _check_fields(self, where: str, given: Mapping[str, str]) -> None:
        """Raise ConfigurationError unless a sample has the fields of those before, stored in the same way."""
        if not given:
            raise ConfigurationError(f"{where} has no fields")
        for field, kind in given.items():
            known = self._fields.get(field)
            if known is None and self._fields and field not in self._optional:
                raise ConfigurationError(
                    f"{where} has the field {field!r}, which the samples before do not have; they have "
                    f"{', '.join(sorted(self._fields))}. Name it in optional= if only some samples have it"
                )
            if known is not None and known != kind:
                raise ConfigurationError(f"{where}: {field!r} is {kind}, and was {known} before")
        if missing := self._fields.keys() - given.keys() - self._optional:
            raise ConfigurationError(
                f"{where} lacks {', '.join(sorted(missing))}; name fields that some samples lack in optional="
            )


class _Shard:
    """The tar that is being filled. `first`: number of its first sample; `stems`: of its samples."""

    def __init__(self, first: int) -> None:
        self.first, self.stems = first, set[str]()
        self.file: IO[bytes] = tempfile.TemporaryFile(prefix="mesh-writer-")  # noqa: SIM115  # until it is stored
        self._whole = 0, 0
        """The number of complete samples, and where the last one ends: one value, which changes at once."""

    @property
    def samples(self) -> int:
        """The number of its samples."""
        return self._whole[0]

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._whole[1]

    def add(self, stem: str, files: Mapping[str, bytes]) -> None:
        """Append a sample: the bytes of its files by extension. If interrupted, nothing is appended."""
        self.file.seek(self.size)
        for extension, data in files.items():
            member = tarfile.TarInfo(f"{stem}.{extension}")
            member.size = len(data)
            self.file.write(member.tobuf(tarfile.PAX_FORMAT))
            self.file.write(data)
            self.file.write(bytes(-len(data) % tarfile.BLOCKSIZE))
        self._whole = self.samples + 1, self.file.tell()
        self.stems.add(stem)

    def finish(self) -> None:
        """Write the end of the archive, as tarfile does, and go back to its beginning."""
        end = self.size + 2 * tarfile.BLOCKSIZE
        self.file.truncate(self.size)
        self.file.truncate(end + -end % tarfile.RECORDSIZE)  # zeros
        self.file.seek(0)

    def __repr__(self) -> str:
        return f"<_Shard from {self.first}: {self.samples} samples, {format_size(self.size)}>"


def _folder(url: str) -> Source:
    try:
        return parse_source(url, "url")
    except PlanError as error:
        raise ConfigurationError(str(error)) from error


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"name={name!r:.80}: expected letters, digits, '-' and '_', such as 'rank-03'"
        )
    return name


def _checked_limit(argument: str, given: int | str) -> int:
    limit = parse_size(given, argument) if isinstance(given, str) else given
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ConfigurationError(f"{argument}={given!r}: expected an integer of at least 1")
    return limit


def _encode_value(where: str, field: str, value: Any) -> tuple[str, bytes]:
    """Return how a value is stored, in a word, and its bytes. Raises ConfigurationError."""
    if not isinstance(field, str) or not _FIELD.fullmatch(field):
        raise ConfigurationError(
            f"{where}: {field!r:.80} is not a field: expected an extension, such as 'jpg'"
        )
    last = field.rpartition(".")[2].lower()
    if isinstance(value, bytes | bytearray | memoryview):
        return "bytes", bytes(value)
    if last == "json":
        try:
            return "JSON", json.dumps(
                value, allow_nan=False, separators=(",", ":"), ensure_ascii=False
            ).encode()
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{where}: {field!r} cannot be written as JSON: {error}") from error
    if isinstance(value, str):
        return "text", value.encode()
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        number = value.item() if isinstance(value, np.generic) else value
        return "a number", repr(number).encode()
    if last == "npy" and (array := _as_array(value)) is not None:
        out = io.BytesIO()
        np.lib.format.write_array(out, array, allow_pickle=False)
        return f"an array of {array.dtype}", out.getvalue()
    hint = {"ndarray": "name the field 'npy'", "Tensor": "name the field 'npy', and pass tensor.cpu()"}.get(
        type(value).__name__, "encode it to bytes, or name the field 'json'"
    )
    raise ConfigurationError(f"{where}: {field!r} is a {type(value).__name__}: {hint}")


def _as_array(value: Any) -> np.ndarray[Any, np.dtype[Any]] | None:
    """Return an array or a CPU tensor as a C-ordered array; None for anything else, or for objects."""
    if type(value).__name__ == "Tensor" and getattr(getattr(value, "device", None), "type", "") == "cpu":
        value = value.detach().numpy()
    if not isinstance(value, np.ndarray) or value.dtype.hasobject:
        return None
    return np.ascontiguousarray(value)
