"""OriginPool: opens the origin of each bucket on first use, behind a circuit breaker.

There is one origin per bucket and process; a changed description opens a new one. After a failure one
request at a time probes the origin, and all others fail at once until it answers.

A secret is read from its file when an origin is opened, and is passed only to obstore. A credentials file
has `name=value` lines with the names of obstore (`aws_access_key_id`, `google_service_account_key`,
`azure_storage_account_name`, …), or is a directory with one file per name.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from meshd.origins.client.origin_api import (
    OriginCredentialsError,
    OriginDownError,
    OriginError,
    OriginRefusedError,
)
from meshd.telemetry import metrics
from meshd.util.malloc_tuning import keep_freed_pages
from meshwire.origin import ANONYMOUS

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Iterator, Sequence

    from meshd.control.buckets import Bucket
    from meshd.origins.client.origin_api import (
        ObjectFacts,
        Origin,
        OriginEntry,
        OriginListing,
        OriginResponse,
    )
    from meshd.util.clock import Clock
    from meshwire.origin import Origin as Description

_REST: Final = 2.0  # seconds without requests after a failure
_TOLD: Final = 60.0  # seconds between two log lines about a failing origin
_MOST: Final = 256
_log = logging.getLogger("meshd.origins")


class OriginPool:
    """The open origins of a process, by bucket."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._directory, self._clock = directory, clock
        self._open: OrderedDict[tuple[object, ...], GuardedOrigin] = OrderedDict()
        self._troubles: OrderedDict[str, FailureLog] = OrderedDict()

    def __repr__(self) -> str:
        return f"<OriginPool {len(self._open)} open>"

    def origin_for(self, bucket: Bucket) -> GuardedOrigin:
        """Return the origin of a bucket that has one. Raises OriginRefusedError."""
        assert bucket.origin is not None
        key = (bucket.name, bucket.origin, self._modified_ns(bucket.origin.credentials))
        found = self._open.get(key)
        if found is None:
            try:
                origin = open_origin(bucket.name, bucket.origin, self._directory)
            except OriginRefusedError as error:
                metrics.origin_errors.inc()
                self.failure_log(bucket).record_failure(error)
                raise
            found = self._open[key] = GuardedOrigin(
                bucket.name, origin, self._clock, self.failure_log(bucket)
            )
            while len(self._open) > _MOST:
                self._open.popitem(last=False)
        return found

    def failure_log(self, bucket: Bucket) -> FailureLog:
        """Return the failure log of a bucket's origin."""
        found = self._troubles.get(bucket.name)
        if found is None:
            found = self._troubles[bucket.name] = FailureLog(bucket.name, self._clock)
            while len(self._troubles) > _MOST:
                self._troubles.popitem(last=False)
        return found

    def _modified_ns(self, credentials: str) -> int:
        try:
            return (self._directory / credentials).stat().st_mtime_ns if credentials else 0
        except OSError:
            return 0


class FailureLog:
    """Logs for one bucket's origin that it fails, once a minute, and that it works again."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name, self._clock = name, clock
        self._next: float | None = None  # None: it answers

    def __repr__(self) -> str:
        return f"<FailureLog of {self._name}{'' if self._next is None else ': it fails'}>"

    def record_failure(self, error: OriginError) -> None:
        """Record that a request failed."""
        now = self._clock.monotonic()
        if self._next is None or now >= self._next:
            self._next = now + _TOLD
            _log.warning("requests to an origin fail", extra={"bucket": self._name, "why": str(error)})

    def record_success(self) -> None:
        """Record that a request succeeded."""
        if self._next is not None:
            self._next = None
            _log.info("the origin answers again", extra={"bucket": self._name})


class GuardedOrigin:
    """An Origin that fails at once while it is down."""

    def __init__(self, name: str, origin: Origin, clock: Clock, trouble: FailureLog) -> None:
        self._name, self._origin, self._clock, self._failure_log = name, origin, clock, trouble
        self._until = 0.0
        self._why = ""
        self._probing = False

    def __repr__(self) -> str:
        return f"<GuardedOrigin of {self._name}{' down' if self._until else ''}>"

    @contextmanager
    def _watch_failures(self) -> Iterator[None]:
        probing = self._admit()
        try:
            yield
        except OriginDownError as error:
            self._until, self._why = self._clock.monotonic() + _REST, str(error)
            self._failure_log.record_failure(error)
            raise
        except OriginError as error:
            self._until = 0.0  # it answers
            if isinstance(error, OriginRefusedError):
                self._failure_log.record_failure(error)
            raise
        else:
            self._until = 0.0
            self._failure_log.record_success()
        finally:
            if probing:
                self._probing = False

    def _admit(self) -> bool:
        if not self._until:
            return False
        if self._probing or self._clock.monotonic() < self._until:
            metrics.origin_errors.inc()  # counted like a request, so that the metric shows all failures
            raise OriginDownError(self._why)
        self._probing = True
        return True

    async def get(self, key: str, offset: int, length: int, *, etag: str = "") -> OriginResponse:
        with self._watch_failures():
            return await self._origin.get(key, offset, length, etag=etag)

    async def head(self, key: str) -> ObjectFacts:
        with self._watch_failures():
            return await self._origin.head(key)

    async def list(self, prefix: str, delimiter: str, after: str, limit: int) -> OriginListing:
        with self._watch_failures():
            return await self._origin.list(prefix, delimiter, after, limit)

    async def list_all(self, prefix: str) -> Sequence[OriginEntry]:
        with self._watch_failures():
            return await self._origin.list_all(prefix)

    async def put(self, key: str, body: AsyncIterable[bytes], facts: ObjectFacts) -> str:
        with self._watch_failures():
            return await self._origin.put(key, body, facts)

    async def delete(self, keys: Sequence[str]) -> None:
        with self._watch_failures():
            await self._origin.delete(keys)


_RETRY: Final[dict[str, Any]] = {
    "max_retries": 4,
    "backoff": {
        "init_backoff": timedelta(milliseconds=50),
        "max_backoff": timedelta(seconds=1),
        "base": 2,
    },
    "retry_timeout": timedelta(seconds=8),
}
_CLIENT: Final[dict[str, Any]] = {
    "connect_timeout": "3s",
    "read_timeout": "20s",  # a stalled connection
    "timeout": "600s",  # one whole request: a chunk, or a part
    "allow_http": True,
    "pool_idle_timeout": "60s",
}
_SECRETS: Final = "a credentials file has `name=value` lines, such as `aws_access_key_id=…`"


def open_origin(name: str, origin: Description, directory: Path) -> Origin:
    """Open the origin of bucket `name`; `directory` holds credentials files. Raises OriginRefusedError."""
    from meshd.origins.client.obstore_origin import (
        ObstoreOrigin,  # obstore's threads begin with its first use, after the fork
    )

    keep_freed_pages()
    folder = Path(unquote(urlsplit(origin.url).path))
    if origin.scheme == "file" and not folder.is_dir():
        raise OriginRefusedError(f"the origin of {name}: there is no folder {folder} on this node")
    secrets = read_credentials(directory, origin.credentials)
    try:
        store = _store(origin, secrets)
    except Exception as error:  # its text is not passed on: it may quote a secret
        raise OriginRefusedError(
            f"the origin of {name} cannot be opened ({type(error).__name__}); check its "
            "URL, region and credentials"
        ) from None
    return ObstoreOrigin(
        name,
        store,
        sorted_pages=origin.scheme in {"s3", "gs", "az"},
        ranged=origin.scheme in {"s3", "gs"},
        listed=not origin.is_web,
        plain=origin.scheme == "file",
    )


def read_credentials(directory: Path, name: str) -> dict[str, str]:
    """Read a credentials file. Raises OriginRefusedError."""
    if name in {"", ANONYMOUS}:
        return {}
    path = directory / name
    try:
        if path.is_dir():
            return {
                each.name: each.read_text().strip()
                for each in sorted(path.iterdir())
                if each.is_file() and not each.name.startswith(".")
            }
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        raise OriginCredentialsError(
            f"there are no credentials {name!r} in this node's --origin-credentials; {_SECRETS}"
        ) from None
    found = {}
    for line in lines:
        text = line.strip()
        if not text or text.startswith(("#", "[")):
            continue
        key, equals, value = text.partition("=")
        if not equals:
            raise OriginRefusedError(f"the credentials {name!r} have an invalid line: {_SECRETS}")
        found[key.strip().lower()] = value.strip()
    return found


def _store(origin: Description, secrets: dict[str, str]) -> Any:
    from obstore import store as stores

    parts = urlsplit(origin.url)
    prefix = parts.path.strip("/") or None
    options: dict[str, Any] = {"client_options": _CLIENT, "retry_config": _RETRY}
    if origin.scheme == "file":
        return stores.LocalStore(unquote(parts.path))
    if origin.is_web:
        return stores.HTTPStore.from_url(origin.url, **options)
    if origin.scheme == "gs":
        if origin.credentials == ANONYMOUS:
            secrets = {"skip_signature": "true"}
        return stores.GCSStore(parts.netloc, prefix=prefix, config=secrets, **options)
    if origin.scheme == "az":
        if origin.credentials == ANONYMOUS:
            secrets = {"skip_signature": "true"}
        return stores.AzureStore(parts.netloc, prefix=prefix, config=secrets, **options)
    return stores.S3Store(parts.netloc, prefix=prefix, config=_s3(origin, secrets), **options)


def _s3(origin: Description, secrets: dict[str, str]) -> dict[str, str]:
    config = dict(secrets)
    if origin.endpoint:
        config["endpoint"] = origin.endpoint
    if origin.region or "region" not in config:
        config["region"] = origin.region or "us-east-1"
    if origin.credentials == ANONYMOUS:
        config["skip_signature"] = "true"
    return config
