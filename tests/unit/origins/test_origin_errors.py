"""What an origin's library says, sorted by what it means."""

from __future__ import annotations

import pytest
from obstore.exceptions import GenericError

from meshd.origins.client.obstore_origin import _is_range


@pytest.mark.parametrize(
    "said",
    [
        "Server returned non-2xx status code: 416 Range Not Satisfiable: <Error><Code>InvalidRange</Code>",
        "Generic InMemory error: Invalid range: Wanted range starting at 10, but object was only 3 bytes",
    ],
)
def test_a_range_behind_the_end(said: str) -> None:
    assert _is_range(GenericError(said))


@pytest.mark.parametrize(
    "said",
    [
        "Error performing GET http://127.0.0.1:34163/down/kept in 2 ms - connection refused",
        "Error performing GET http://10.0.0.1:9000/b/photo-416.jpg - status code: 503 Service Unavailable",
    ],
)
def test_addresses_and_keys_say_nothing(said: str) -> None:
    assert not _is_range(GenericError(said))
