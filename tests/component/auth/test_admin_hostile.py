"""Whatever root, or anybody, sends to the admin API: an answer in its shape, and the node goes on."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.daemons import Daemon
from tests.support.s3_raw import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = st.one_of(st.sampled_from(["users", "keys", "policies", "root", "*", ".."]), st.text(max_size=12))
PATHS = st.lists(NAMES, max_size=5).map(lambda parts: "/".join(quote(part, safe="") for part in parts))
QUERIES = st.sampled_from(["", "?limit=0", "?limit=²", "?after=%FF", "?force=yes", "?x", "?limit=1&limit=2"])
FIELDS = st.sampled_from(["user_id", "name", "policies", "access_key", "secret_key", "enabled", "email"])
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=30), st.lists(st.text(max_size=5))
)
BODIES = st.one_of(
    st.binary(max_size=60),
    st.dictionaries(FIELDS, VALUES, max_size=4).map(lambda fields: json.dumps(fields).encode()),
)
QUICK = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One of its own: what these requests make stays in it."""
    with Daemon.start() as running:
        yield running
        assert "Traceback" not in running.output()


@QUICK
@given(st.sampled_from(["GET", "PUT", "POST", "PATCH", "DELETE", "HEAD"]), PATHS, QUERIES, BODIES)
def test_any_request_of_root_is_answered_in_shape(
    daemon: Daemon, method: str, path: str, query: str, body: bytes
) -> None:
    answer = daemon.request(method, f"/-/admin/{path}{quote(query, safe='?=&%')}", body)
    assert answer.status in (200, 201, 400, 403, 404, 405, 409)
    if method != "HEAD":
        document = json.loads(answer.body)
        assert (answer.status >= 400) == ("error" in document)
        if answer.status >= 400:
            assert document["error"]["code"]
            assert document["error"]["message"]


@QUICK
@given(BODIES)
def test_any_wish_for_temporary_credentials_is_answered_in_shape(daemon: Daemon, body: bytes) -> None:
    answer = daemon.request("POST", "/-/sts", body)
    document = json.loads(answer.body)
    assert answer.status in (200, 400)
    assert ("error" in document) == (answer.status == 400)


@pytest.mark.parametrize("method", ["GET", "PUT", "POST", "PATCH", "DELETE"])
@pytest.mark.parametrize("path", ["users", "keys", "policies", "users/root", "keys/x/policies/y", "nothing"])
def test_nobody_but_root_learns_anything(daemon: Daemon, method: str, path: str) -> None:
    user, key = f"hostile-{method}-{path.replace('/', '.')}", {}
    daemon.request("POST", "/-/admin/users", json.dumps({"user_id": user}).encode())
    key = json.loads(daemon.request("POST", "/-/admin/keys", json.dumps({"user_id": user}).encode()).body)
    with contextlib.closing(Wire(daemon.endpoint, key["access_key"], key["secret_key"])) as wire:
        answer = wire.call(method, f"/-/admin/{path}")
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (403, "AccessDenied")
        unsigned = f"{method} /-/admin/{path} HTTP/1.1\r\nHost: {wire.host}\r\nContent-Length: 0\r\n\r\n"
        assert wire.exchange(unsigned.encode(), method=method).status == 403
    daemon.request("DELETE", f"/-/admin/users/{user}")
