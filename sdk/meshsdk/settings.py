"""Where the SDK connects and as whom.

Law: arguments win over the environment; nothing is read after the start. Invariant: `repr` shows no secret.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from meshsdk.errors import ConfigurationError
from meshsdk.keyfiles import VARIABLE, read_keys

if TYPE_CHECKING:
    from collections.abc import Mapping

ENDPOINT_VARIABLES = ("MESH_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
CA_VARIABLES = ("MESH_CA_BUNDLE", "AWS_CA_BUNDLE")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed `http(s)://host[:port]`. `ca_bundle`: PEM file of the authorities believed there; the system's
    when empty."""

    scheme: str
    host: str
    port: int
    ca_bundle: str = field(default="", repr=False)

    @property
    def authority(self) -> str:
        """What goes into the Host header: the default port is left out, as every signer does."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 443 if self.scheme == "https" else 80
        return host if self.port == default else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


def parse_endpoint(text: str, ca_bundle: str = "") -> Endpoint:
    """The endpoint of a URL; raises ConfigurationError for anything but http(s)://host[:port]."""
    url = urlsplit(text if "://" in text else f"http://{text}")
    try:
        port = url.port
    except ValueError as error:
        raise ConfigurationError(f"the endpoint {text!r} has a bad port: use http://host:9000") from error
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigurationError(f"the endpoint {text!r} is not http(s)://host[:port]")
    if url.path.strip("/") or url.query or url.username:
        raise ConfigurationError(f"the endpoint {text!r} must end after the port: no path, query or user")
    return Endpoint(url.scheme, url.hostname, port or (443 if url.scheme == "https" else 80), ca_bundle)


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a client needs to reach its endpoint.

    `timeout` (seconds) is the longest silence on a socket before it is given up and asked again;
    `deadline` (seconds) is how long an unavailable server is waited for. `others`: further endpoints of the
    same mesh.
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

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """All that were given; each leads to the whole mesh."""
        return (self.endpoint, *self.others)


def checked_seconds(name: str, seconds: float) -> float:
    """An argument that is a time; raises ConfigurationError."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise ConfigurationError(f"{name}={seconds!r}: seconds, as 600")
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
    """Settings from arguments, else from the environment; or a ConfigurationError naming what is missing."""
    env = os.environ if env is None else env
    if not isinstance(endpoint, (str, type(None))):
        raise ConfigurationError(f"endpoint={endpoint!r}: a URL, as 'http://host:9000', several with commas")
    timeout, deadline = checked_seconds("timeout", timeout), checked_seconds("deadline", deadline)
    endpoint = endpoint or next((env[name] for name in ENDPOINT_VARIABLES if env.get(name)), None)
    if not endpoint or not endpoint.strip(", "):
        raise ConfigurationError(
            "no endpoint: set MESH_ENDPOINT=http://host:9000, or pass endpoint= (commands: --endpoint-url)"
        )
    if (access_key is None) != (secret_key is None):
        raise ConfigurationError("access_key and secret_key belong together: pass both, or neither")
    file = env.get(VARIABLE, "") if access_key is None else ""
    if file:
        keys = read_keys(file)
        access_key, secret_key, session_token = keys.access_key, keys.secret_key, keys.session_token
    elif access_key is None or secret_key is None:
        access_key, secret_key = env.get("AWS_ACCESS_KEY_ID"), env.get("AWS_SECRET_ACCESS_KEY")
        session_token = session_token or env.get("AWS_SESSION_TOKEN") or None
    if not access_key or not secret_key:
        raise ConfigurationError(
            "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or MESH_CREDENTIALS_FILE, "
            "or pass access_key= and secret_key="
        )
    region = region or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or "us-east-1"
    ca_cert = ca_cert or next((env[name] for name in CA_VARIABLES if env.get(name)), "")
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
    )
