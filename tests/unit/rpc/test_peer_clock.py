"""What a refused node says of the other node's clock."""

from __future__ import annotations

import pytest

from meshd.rpc.peer_clock import describe_skew
from meshwire.http_values.dates import format_http

NOW = 1_700_000_000


@pytest.mark.parametrize(
    ("ahead", "told"),
    [
        (420, "the clock of node n3 is 7 min ahead of that of node n1,"),
        (-1200, "the clock of node n3 is 20 min behind that of node n1,"),
    ],
)
def test_the_date_of_the_response_tells_the_skew(ahead: int, told: str) -> None:
    assert describe_skew("n3", "n1", {"date": format_http(NOW + ahead)}, NOW * 1000).startswith(told)


@pytest.mark.parametrize("headers", [{}, {"date": "soon"}])
def test_without_a_date_both_nodes_are_named(headers: dict[str, str]) -> None:
    assert describe_skew("n3", "n1", headers, NOW * 1000).startswith("the clocks of nodes n3 and n1 differ")
