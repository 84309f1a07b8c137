"""What a node says of the map it goes by: in a header of every answer, so that the SDK learns of the others;
and 421 to a node, or the SDK, that asked the wrong one.

Law: an S3 client is never told to ask elsewhere (RFC 9110 §15.5.20). A lone node says nothing.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from meshd.net.peers import MAP_HEADER
from meshd.web.replies import Reply

if TYPE_CHECKING:
    from meshd.cluster.mesh import Mesh
    from meshd.net.wires import AnswerHead
    from meshd.web.replies import Header
    from meshwire.s3.errors import S3Error

DAMAGED_HEADER: Final = "x-mesh-damaged"
SKEWED_HEADER: Final = "x-mesh-skewed"


class DamagedHereError(Exception):
    """The bytes that were asked for cannot be had as they were written on this node; nothing was sent.
    `told`: what a client hears if no other node has them."""

    def __init__(self, told: S3Error) -> None:
        super().__init__("damaged on this node")
        self.told = told


def map_headers(mesh: Mesh) -> list[Header]:
    """What tells the SDK that there are more nodes."""
    return [] if mesh.alone else [(MAP_HEADER, str(mesh.map().version))]


def stale(version: int, now: int) -> Reply:
    """421: this node goes by version `version` of the map."""
    message = f"this node goes by version {version} of the cluster map"
    return _reply(421, "MisdirectedRequest", message, MAP_HEADER, str(version), now)


def damaged(now: int) -> Reply:
    """503: what this node has of it is damaged."""
    message = "what this node has of it is damaged; ask another one that holds it"
    return _reply(503, "Damaged", message, DAMAGED_HEADER, "1", now)


def skewed(now: int) -> Reply:
    """503: this node's clock and that of the node that asked differ by minutes."""
    message = "the clocks of two nodes of this mesh differ by minutes: set them"
    return _reply(503, "Skewed", message, SKEWED_HEADER, "1", now)


def _reply(status: int, code: str, message: str, header: str, value: str, now: int) -> Reply:
    body = json.dumps({"error": {"code": code, "message": message}}).encode()
    headers = [("Content-Type", "application/json"), (header, value), ("Content-Length", str(len(body)))]
    return Reply(status, headers, body, now)


def is_stale(head: AnswerHead) -> bool:
    """Whether a node says that it goes by another map."""
    return head.status == 421 and head.headers.get(MAP_HEADER, "").isdigit()


def is_damaged(head: AnswerHead) -> bool:
    """Whether a node says that its copy is damaged."""
    return head.status == 503 and DAMAGED_HEADER in head.headers


def is_skewed(head: AnswerHead) -> bool:
    """Whether a node says that it has another time."""
    return head.status == 503 and SKEWED_HEADER in head.headers


def asks_elsewhere(head: AnswerHead) -> bool:
    """Whether an answer is for the node that asked, and not for its client."""
    return is_stale(head) or is_damaged(head) or is_skewed(head)
