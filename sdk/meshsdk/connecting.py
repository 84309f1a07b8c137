"""Making a client out of arguments and the environment."""

from __future__ import annotations

from meshsdk.client import Client
from meshsdk.settings import load_settings


def connect(
    endpoint: str | None = None,
    *,
    access_key: str | None = None,
    secret_key: str | None = None,
    session_token: str | None = None,
    region: str | None = None,
    timeout: float = 60.0,
    deadline: float = 60.0,
    ca_cert: str | None = None,
) -> Client:
    """A client of a store. No request is made here. Raises ConfigurationError naming what is missing.

    Arguments:
        endpoint: "http://HOST:PORT", several of one mesh with commas; MESH_ENDPOINT (or AWS_ENDPOINT_URL_S3,
            AWS_ENDPOINT_URL) if left out.
        access_key, secret_key, session_token: those of MESH_CREDENTIALS_FILE (read again when it changes) if
            left out, else AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN.
        region: AWS_REGION if left out.
        timeout: seconds of silence that end one attempt.
        deadline: seconds for which an unavailable server is asked again.
        ca_cert: a PEM file of the authorities to believe over https; MESH_CA_BUNDLE or AWS_CA_BUNDLE if left
            out, else the system's.
    """
    settings = load_settings(
        endpoint=endpoint,
        access_key=access_key,
        secret_key=secret_key,
        session_token=session_token,
        region=region,
        timeout=timeout,
        deadline=deadline,
        ca_cert=ca_cert,
    )
    return Client(settings)
