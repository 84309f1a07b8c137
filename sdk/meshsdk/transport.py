"""Earlier path of requests to the native API, kept for one release: see `meshsdk.client.transport`."""

from __future__ import annotations

from meshsdk.client.transport import Request, json_request

__all__ = ["Request", "json_request"]
