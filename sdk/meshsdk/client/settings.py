"""Connection settings and credentials: endpoint, keys, region and timeouts.

Law: arguments take precedence over the environment, which is read once, when a client is created. Keys from
a credentials file are re-read when the file changes; the last valid keys stay in use until then. Keys of a
web identity are exchanged at first use (`web_identity`). Thread-safe.
Invariant: neither `repr` nor an error message shows a secret.
"""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from meshsdk.errors import ConfigurationError
from meshwire.sigv4 import Credential

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshsdk.errors import ServerError


CREDENTIALS_VARIABLE: Final = "MESH_CREDENTIALS_FILE"
WEB_IDENTITY_VARIABLES: Final = ("AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_SESSION_NAME")
_STS_VARIABLE: Final = "AWS_ENDPOINT_URL_STS"
_AWS: Final = ("AccessKeyId", "SecretAccessKey", "SessionToken")
_OURS: Final = ("access_key", "secret_key", "session_token")
_LOOK: Final = 10.0  # seconds between two checks of the file


def read_keys(path: str) -> Credential:
    """Read the keys from a credentials file. Raises ConfigurationError."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        names = _OURS if "access_key" in found else _AWS
        token = found.get(names[2]) or None
        return Credential(str(found[names[0]]), str(found[names[1]]), token)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"{CREDENTIALS_VARIABLE}={path} cannot be used ({type(error).__name__}): "
            "expected JSON with AccessKeyId, SecretAccessKey and optionally SessionToken (meshd admin sts), "
            "or access_key and secret_key (meshd admin key add --json)"
        ) from None


class RenewableKeys:
    """The credential to sign with, re-read from a file when that changes.

    `path` is the credentials file; "" for a credential that never changes.
    """

    def __init__(self, path: str, first: Credential, clock: Callable[[], float]) -> None:
        self.path, self._credential, self._clock = path, first, clock
        self._seen, self._next = (0, 0, 0), 0.0
        self._trouble = ""

    def __repr__(self) -> str:
        return f"<RenewableKeys {self.path}>"

    def current(self) -> Credential:
        """Return the newest credential; the file is checked every 10 s."""
        if self.path and self._clock() >= self._next:
            self._look()
        return self._credential

    def replacement(self, refused: Credential | None) -> Credential | None:
        """Check the file now and return the credential to use after a refusal; None if there is no other one.

        `refused`: the credential that was refused; None if it is unknown.
        """
        if not self.path:
            return None
        self._look()
        return None if self._credential == refused else self._credential

    def expiry_hint(self) -> str:
        """Return a hint about the file for the error of refused keys; "" without a file."""
        if not self.path or self._trouble:
            return self._trouble
        changed = datetime.fromtimestamp(self._seen[0] / 1e9, UTC)
        return (
            f"{CREDENTIALS_VARIABLE}={self.path} has no newer keys: it was last written at "
            f"{changed:%Y-%m-%d %H:%M:%S} UTC."
        )

    def _look(self) -> None:
        self._next = self._clock() + _LOOK
        try:
            found = os.stat(self.path)
            changed = (found.st_mtime_ns, found.st_ino, found.st_size)
            if changed != self._seen:
                self._credential, self._seen = read_keys(self.path), changed
            self._trouble = ""
        except OSError as error:  # perhaps it is being replaced; the old keys stay in use until refused
            self._trouble = f"{CREDENTIALS_VARIABLE}={self.path} cannot be read ({type(error).__name__})."
        except ConfigurationError as error:
            self._trouble = f"{error}."


def replacement_keys(keys: RenewableKeys, error: ServerError, refused: Credential | None) -> Credential:
    """Return renewed keys for an immediate retry; raise the error if there are none.

    `refused`: the keys that this function returned for the last retry of the same request, if any.
    """
    found = keys.replacement(refused)
    if found is None:
        raise error.saying(hint) if (hint := keys.expiry_hint()) else error
    return found


ENDPOINT_VARIABLES = ("MESH_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
CA_VARIABLES = ("MESH_CA_BUNDLE", "AWS_CA_BUNDLE")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed `http(s)://host[:port]`.

    `ca_bundle`: path of a PEM file with the authorities to trust; the system's if empty.
    """

    scheme: str
    host: str
    port: int
    ca_bundle: str = field(default="", repr=False)

    @property
    def authority(self) -> str:
        """The value of the Host header: host and port, without a default port, as SigV4 signers expect."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 443 if self.scheme == "https" else 80
        return host if self.port == default else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


def parse_endpoint(text: str, ca_bundle: str = "") -> Endpoint:
    """Parse a URL. Raises ConfigurationError for anything but http(s)://host[:port]."""
    try:
        url = urlsplit(text if "://" in text else f"http://{text}")
        port = url.port
    except ValueError as error:
        several = (text.partition("://")[2] or text).count(":") > 1  # in an IPv6 address without its brackets
        example = "http://[fd00::5]:9000, with brackets" if several else "http://host:9000"
        raise ConfigurationError(f"the endpoint {text!r} has a bad port: use {example}") from error
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigurationError(f"the endpoint {text!r} is not http(s)://host[:port]")
    if url.path.strip("/") or url.query or url.username:
        raise ConfigurationError(f"the endpoint {text!r} must have no path, query or user")
    return Endpoint(url.scheme, url.hostname, port or (443 if url.scheme == "https" else 80), ca_bundle)


@dataclass(frozen=True, slots=True)
class WebIdentity:
    """A role to assume with the token in a file. `endpoint`: of the STS; None for those of the mesh."""

    role_arn: str
    token_file: str
    session_name: str
    endpoint: Endpoint | None = None


def read_web_identity(env: Mapping[str, str], ca_bundle: str) -> WebIdentity | None:
    """Return the web identity that the environment names; None if it names none. Raises
    ConfigurationError."""
    role, file, name = (env.get(variable, "") for variable in WEB_IDENTITY_VARIABLES)
    if not role or not file:
        return None
    name = name or re.sub(r"[^\w+=,.@-]", "-", f"meshsdk-{socket.gethostname()}", flags=re.ASCII)[:64]
    sts = env.get(_STS_VARIABLE, "")
    return WebIdentity(role, file, name, parse_endpoint(sts, ca_bundle) if sts else None)


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a client needs to reach its endpoint.

    `timeout` (seconds) is the longest silence on a socket before the request is retried; `deadline` (seconds)
    is how long an unavailable server is retried. `others`: further endpoints of the same mesh. With a
    `web_identity`, the keys are empty.
    """

    endpoint: Endpoint
    access_key: str
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)
    region: str = "us-east-1"
    timeout: float = 60.0
    deadline: float = 60.0
    connect_timeout: float = 5.0
    others: tuple[Endpoint, ...] = ()
    credentials_file: str = ""
    web_identity: WebIdentity | None = None

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """All configured endpoints; each gives access to the whole mesh."""
        return (self.endpoint, *self.others)


def checked_seconds(name: str, seconds: float) -> float:
    """Return an argument that is a time in seconds, as a float. Raises ConfigurationError."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise ConfigurationError(f"{name}={seconds!r}: expected a number of seconds, such as 600")
    return float(seconds)


def load_settings(
    *,
    endpoint: str | None = None,
    access_key: str | None = None,
    secret_key: str | None = None,
    session_token: str | None = None,
    region: str | None = None,
    timeout: float = 60.0,
    deadline: float = 60.0,
    ca_cert: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Settings:
    """Return settings from the arguments, else from the environment.

    Raises ConfigurationError, which names what is missing.
    """
    env = os.environ if env is None else env
    if not isinstance(endpoint, (str, type(None))):
        raise ConfigurationError(
            f"endpoint={endpoint!r}: expected a URL such as 'http://host:9000', or several with commas"
        )
    timeout, deadline = checked_seconds("timeout", timeout), checked_seconds("deadline", deadline)
    endpoint = endpoint or next((env[name] for name in ENDPOINT_VARIABLES if env.get(name)), None)
    if not endpoint or not endpoint.strip(", "):
        raise ConfigurationError(
            "no endpoint: set MESH_ENDPOINT=http://host:9000, or pass endpoint= (commands: --endpoint-url)"
        )
    if (access_key is None) != (secret_key is None):
        raise ConfigurationError("access_key and secret_key belong together: pass both, or neither")
    file = env.get(CREDENTIALS_VARIABLE, "") if access_key is None else ""
    if file:
        keys = read_keys(file)
        access_key, secret_key, session_token = keys.access_key, keys.secret_key, keys.session_token
    elif access_key is None or secret_key is None:
        access_key, secret_key = env.get("AWS_ACCESS_KEY_ID"), env.get("AWS_SECRET_ACCESS_KEY")
        session_token = session_token or env.get("AWS_SESSION_TOKEN") or None
    ca_cert = ca_cert or next((env[name] for name in CA_VARIABLES if env.get(name)), "")
    web_identity = None if access_key and secret_key else read_web_identity(env, ca_cert)
    if web_identity is not None:
        access_key, secret_key, session_token = "", "", None
    elif not access_key or not secret_key:
        raise ConfigurationError(
            "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, MESH_CREDENTIALS_FILE, "
            "or AWS_ROLE_ARN and AWS_WEB_IDENTITY_TOKEN_FILE, or pass access_key= and secret_key="
        )
    region = region or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or "us-east-1"
    first, *others = [parse_endpoint(text.strip(), ca_cert) for text in endpoint.split(",") if text.strip()]
    return Settings(
        first,
        access_key,
        secret_key,
        session_token,
        region,
        timeout,
        deadline,
        others=tuple(dict.fromkeys(others)),
        credentials_file=file,
        web_identity=web_identity,
    )
