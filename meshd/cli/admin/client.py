"""Client of a node's admin API: signed requests, and the options for endpoint and credentials.

Credentials come from files and the environment, never from flags. An error of the node becomes a message that
says what to do.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.client
import json
import os
import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

import click

from meshwire.s3.parse_request import RequestHead
from meshwire.sigv4 import Credential, sign

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_DEFAULT_ENDPOINT = "http://127.0.0.1:9000"
_ROOT = ("MESHD_ROOT_ACCESS_KEY", "MESHD_ROOT_SECRET_KEY", "")
_AWS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_TIMEOUT = 30
_OPTIONS = (
    click.option("--endpoint", metavar="URL", help="URL of the node.  [MESHD_ENDPOINT, AWS_ENDPOINT_URL]"),
    click.option(
        "--keys",
        metavar="FILE",
        help="JSON file with access_key and secret_key, as printed by `key add --json`.",
    ),
    click.option("--data-dir", metavar="DIR", help="Use the root keys stored in this data directory."),
    click.option("--ca-cert", metavar="FILE", help="CA certificates to trust for https.  [MESH_CA_BUNDLE]"),
)


@dataclass(frozen=True, slots=True)
class AdminClient:
    """A node, and the keys to sign requests with."""

    endpoint: str
    credential: Credential = field(repr=False)
    ca_cert: str | None = None

    def request(
        self, method: str, *path: str, query: Mapping[str, str] | None = None, body: object = None
    ) -> Any:
        """Send a request under `/-/` and return its response. Raises ClickException, which says what to
        do."""
        target = "/-/" + "/".join(quote(part, safe="") for part in path)
        if query:
            target += "?" + urlencode({name: query[name] for name in sorted(query)}, quote_via=quote)
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        try:
            status, answer = self._exchange(method, target, data)
        except ssl.SSLError as error:
            raise click.ClickException(
                f"{self.endpoint}: {error.reason or error}; give --ca-cert FILE if the node's certificate is "
                "signed by your own authority"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise click.ClickException(
                f"cannot reach {self.endpoint} ({error}); is the node running? Set --endpoint URL"
            ) from None
        return _document(status, answer)

    def list_all(self, *path: str, query: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """Return all entries of a list, page by page."""
        found: list[dict[str, Any]] = []
        after = ""
        while True:
            more = {"after": after, "limit": "1000", **(query or {})}
            page = self.request("GET", *path, query={name: value for name, value in more.items() if value})
            found += page[path[-1]]
            after = page["next"]
            if not after:
                return found

    def _exchange(self, method: str, target: str, body: bytes) -> tuple[int, bytes]:
        where = urlsplit(self.endpoint)
        path, _, query = target.partition("?")
        headers = {"host": where.netloc}
        headers |= sign(
            RequestHead(method, path, query, headers),
            self.credential,
            region="us-east-1",
            timestamp=datetime.now(UTC),
            payload_hash=hashlib.sha256(body).hexdigest(),
        )
        connection: http.client.HTTPConnection
        if where.scheme == "https":
            context = ssl.create_default_context(cafile=self.ca_cert)
            connection = http.client.HTTPSConnection(
                str(where.hostname), where.port, timeout=_TIMEOUT, context=context
            )
        else:
            connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=_TIMEOUT)
        with contextlib.closing(connection):
            connection.request(method, target, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()


def admin_client_options(
    *, own_keys_first: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options for the endpoint and the keys; the command gets `node`. `own_keys_first`: prefer AWS_*
    to MESHD_ROOT_*, for commands that do not need root."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def wrapped(
            endpoint: str | None, keys: str | None, data_dir: str | None, ca_cert: str | None, **rest: Any
        ) -> Any:
            sources = (_AWS, _ROOT) if own_keys_first else (_ROOT, _AWS)
            credential = find_keys(keys, data_dir, os.environ, sources)
            bundle = ca_cert or os.environ.get("MESH_CA_BUNDLE") or None
            if bundle is not None and not os.path.isfile(bundle):
                raise click.UsageError(f"--ca-cert: there is no file {bundle}")
            return command(node=AdminClient(find_endpoint(endpoint, os.environ), credential, bundle), **rest)

        for option in reversed(_OPTIONS):
            wrapped = option(wrapped)
        return wrapped

    return decorate


def find_endpoint(given: str | None, env: Mapping[str, str]) -> str:
    """Return the node's URL. Raises UsageError unless it is valid."""
    endpoint = given or env.get("MESHD_ENDPOINT") or env.get("AWS_ENDPOINT_URL") or _DEFAULT_ENDPOINT
    where = urlsplit(endpoint)
    if (
        where.scheme not in ("http", "https")
        or not where.hostname
        or where.path not in ("", "/")
        or where.query
    ):
        raise click.UsageError(f"{endpoint!r} is not an endpoint; expected a URL such as {_DEFAULT_ENDPOINT}")
    return f"{where.scheme}://{where.netloc}"


def find_keys(
    file: str | None,
    data_dir: str | None,
    env: Mapping[str, str],
    sources: Sequence[tuple[str, str, str]] = (_ROOT, _AWS),
) -> Credential:
    """Return the keys to sign with. Raises UsageError, which lists the possible sources."""
    if file and data_dir:
        raise click.UsageError("give --keys or --data-dir, not both")
    if file:
        return _read(Path(file), "")
    if data_dir:
        lack = f"; if the node's root keys come from its environment, set {_ROOT[0]} and {_ROOT[1]} here, too"
        return _read(Path(data_dir) / "root-credentials.json", lack)
    for access, secret, token in sources:
        if env.get(access) and env.get(secret):
            return Credential(env[access], env[secret], env.get(token) or None)
    raise click.UsageError(
        f"no keys: set {sources[0][0]} and {sources[0][1]}, or give --keys FILE or --data-dir DIR"
    )


def _read(path: Path, lack: str) -> Credential:
    """Read keys from a JSON file: ours, or a document of `meshd admin sts`."""
    try:
        document = json.loads(path.read_bytes())
        if "AccessKeyId" in document:
            names = ("AccessKeyId", "SecretAccessKey", "SessionToken")
        else:
            names = ("access_key", "secret_key", "session_token")
        return Credential(str(document[names[0]]), str(document[names[1]]), document.get(names[2]))
    except OSError as error:
        raise click.UsageError(f"cannot read {path}: {error.strerror}{lack}") from None
    except (ValueError, KeyError, TypeError):
        raise click.UsageError(
            f"{path} contains no key pair: expected JSON with access_key and secret_key"
        ) from None


def _document(status: int, answer: bytes) -> Any:
    try:
        document = json.loads(answer)
        error = document.get("error") if status >= 400 else None
    except (ValueError, AttributeError):
        raise click.ClickException(
            f"the endpoint answered {status}, but not like a meshd node; check the URL"
        ) from None
    if error is None:
        return document
    message = f"{error['message']} ({error['code']})"
    if error.get("help"):
        message += f"\n{error['help']}"
    raise click.ClickException(message)
