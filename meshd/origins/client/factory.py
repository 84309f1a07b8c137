"""Opens origins from their descriptions, with credentials by name.

A secret is read from its file when an origin is opened, and is passed only to obstore. A credentials file
has `name=value` lines with the names of obstore (`aws_access_key_id`, `google_service_account_key`,
`azure_storage_account_name`, …), or is a directory with one file per name.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from meshd.origins.client.origin_api import OriginCredentialsError, OriginRefusedError
from meshd.util.malloc_tuning import keep_freed_pages
from meshwire.origin import ANONYMOUS

if TYPE_CHECKING:
    from pathlib import Path

    from meshd.origins.client.origin_api import Origin
    from meshwire.origin import Origin as Description

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
