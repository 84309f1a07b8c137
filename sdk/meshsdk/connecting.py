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
    """A client of an endpoint. What is left out comes from MESH_ENDPOINT (or AWS_ENDPOINT_URL_S3,
    AWS_ENDPOINT_URL), MESH_CREDENTIALS_FILE (read again when it changes) or AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, and AWS_REGION.

    `ca_cert` is a PEM file of the authorities to believe over https, else MESH_CA_BUNDLE or AWS_CA_BUNDLE,
    else the system's.

    `timeout` seconds of silence end one attempt; an unavailable server is asked again for `deadline`
    seconds. No request is made here. Raises ConfigurationError naming what is missing.
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
