"""`Loader(cache=)` and the header that carries it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshsdk.errors import ConfigurationError
from meshsdk.loader.arguments import checked_cache
from meshwire.http_values.mesh_headers import parse_sample_cache, sample_cache_value


@pytest.mark.parametrize(
    ("given", "limit"), [("auto", None), ("off", 0), (0, 0), (5, 5), (np.int64(1 << 40), 1 << 40)]
)
def test_what_is_asked_for_is_what_a_node_reads(given: Any, limit: int | None) -> None:
    found = checked_cache(given)
    assert found == limit
    if found is not None:
        assert parse_sample_cache(sample_cache_value(found)) == limit


@pytest.mark.parametrize("given", ["", "on", "5", -1, 1.5, True, None, 10**18])
def test_other_arguments_are_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="cache="):
        checked_cache(given)


@pytest.mark.parametrize("header", [None, "", "auto", "-1", "1e9", "9" * 19, " 5"])
def test_a_node_decides_without_a_valid_header(header: str | None) -> None:
    assert parse_sample_cache(header) is None
