"""421: what a node says that was asked, by another one, for what it does not answer for.

Law: told to nodes and to our own SDK only; an S3 client is never told to ask elsewhere (RFC 9110 §15.5.20).
"""

from __future__ import annotations

import json

from meshd.net.peers import MAP_HEADER
from meshd.web.replies import Reply


def stale(version: int, now: int) -> Reply:
    """421: this node goes by version `version` of the map."""
    message = f"this node goes by version {version} of the cluster map"
    body = json.dumps({"error": {"code": "MisdirectedRequest", "message": message}}).encode()
    headers = [
        ("Content-Type", "application/json"),
        (MAP_HEADER, str(version)),
        ("Content-Length", str(len(body))),
    ]
    return Reply(421, headers, body, now)
