"""Clock skew in responses: by how much the clock of a node that refuses a request differs from the local one.

Law: pure. The `Date` header is a node's clock in whole seconds. Which of two clocks is wrong is unknown here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from meshwire.http_values.dates import parse_http

if TYPE_CHECKING:
    from collections.abc import Mapping

REFUSED_CODE: Final = "RequestTimeTooSkewed"
"""Code by which a node refuses a call whose signature is of another time."""
CLOCKS_CODE: Final = "ClocksDiffer"
"""Code by which a node says that a third node refuses its calls for that; the message names both."""
_MINUTE: Final = 60


def describe_skew(node_id: str, own_id: str, headers: Mapping[str, str], now_ms: int) -> str:
    """Return why node `node_id` refused a request of node `own_id`, given the headers of its response."""
    sent = parse_http(headers.get("date", ""))
    if sent is None:
        found = f"the clocks of nodes {node_id} and {own_id} differ by minutes"
    else:
        ahead = sent - now_ms // 1000
        size = f"{round(abs(ahead) / _MINUTE)} min {'ahead of' if ahead > 0 else 'behind'}"
        found = f"the clock of node {node_id} is {size} that of node {own_id}"
    return f"{found}, so they refuse each other's requests: set the wrong clock"
