"""Where the SDK connects, as whom, and as which rank."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from meshsdk.client.settings import load_settings, parse_endpoint
from meshsdk.errors import ConfigurationError
from meshsdk.loader.arguments import check_rank_unchanged, find_rank

KEYS = {"AWS_ACCESS_KEY_ID": "envkey", "AWS_SECRET_ACCESS_KEY": "envsecret"}


@pytest.mark.parametrize(
    ("text", "expected", "authority"),
    [
        ("http://node:9000", ("http", "node", 9000), "node:9000"),
        ("node:9000", ("http", "node", 9000), "node:9000"),
        ("https://s3.example.com", ("https", "s3.example.com", 443), "s3.example.com"),
        ("http://[::1]:9000/", ("http", "::1", 9000), "[::1]:9000"),
    ],
)
def test_endpoints(text: str, expected: tuple[str, str, int], authority: str) -> None:
    endpoint = parse_endpoint(text)
    assert (endpoint.scheme, endpoint.host, endpoint.port) == expected
    assert endpoint.authority == authority


@pytest.mark.parametrize(
    "text", ["ftp://node", "http://", "http://node:port", "http://node/path", "http://u:p@node"]
)
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="endpoint"):
        parse_endpoint(text)


@pytest.mark.parametrize("text", ["fd00::5", "fd00::5:9000", "http://fd00::5:9000", "http://[fd00::5:9000"])
def test_an_address_of_ipv6_without_brackets_is_named(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"http://\[fd00::5\]:9000, with brackets"):
        parse_endpoint(text)


def test_arguments_win_over_the_environment() -> None:
    env = KEYS | {"MESH_ENDPOINT": "http://a:1", "AWS_ENDPOINT_URL": "http://b:2", "AWS_REGION": "eu-west-1"}
    settings = load_settings(env=env)
    assert (str(settings.endpoint), settings.access_key, settings.region) == (
        "http://a:1",
        "envkey",
        "eu-west-1",
    )
    settings = load_settings(endpoint="http://c:3", access_key="k", secret_key="s", region="x", env=env)
    assert (str(settings.endpoint), settings.access_key, settings.region) == ("http://c:3", "k", "x")


def test_the_s3_variables_serve_too() -> None:
    env = KEYS | {"AWS_ENDPOINT_URL_S3": "http://s3:1", "AWS_ENDPOINT_URL": "http://all:2"}
    assert load_settings(env=env).endpoint.host == "s3"


def test_a_session_token_of_the_environment_goes_with_its_keys_only() -> None:
    env = KEYS | {"MESH_ENDPOINT": "http://a", "AWS_SESSION_TOKEN": "token"}
    assert load_settings(env=env).session_token == "token"
    assert load_settings(access_key="k", secret_key="s", env=env).session_token is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"env": KEYS}, "MESH_ENDPOINT"),
        ({"env": {"MESH_ENDPOINT": "http://a"}}, "AWS_ACCESS_KEY_ID"),
        ({"env": {}, "endpoint": "http://a", "access_key": "k"}, "secret_key"),
    ],
)
def test_what_is_missing_is_named(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        load_settings(**arguments)  # type: ignore[arg-type]  # on purpose


def test_no_secret_is_shown() -> None:
    settings = load_settings(
        endpoint="http://a", access_key="k", secret_key="hidden", session_token="too", env={}
    )
    assert "hidden" not in repr(settings)
    assert "too" not in repr(settings)


def test_ranks_come_from_arguments_then_the_environment() -> None:
    assert find_rank(2, 4, {"RANK": "0", "WORLD_SIZE": "1"}) == (2, 4)
    assert find_rank(env={"RANK": "3", "WORLD_SIZE": "8"}) == (3, 8)
    assert find_rank(env={}) == find_rank(env={"WORLD_SIZE": "1"}) == (0, 1)


def test_ranks_come_from_jax_once_its_processes_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process would otherwise load the whole batch, without a word."""
    met = False
    distributed = SimpleNamespace(is_initialized=lambda: met)
    jax = SimpleNamespace(distributed=distributed, process_index=lambda: 1, process_count=lambda: 4)
    monkeypatch.setitem(sys.modules, "jax", jax)
    assert find_rank(env={}) == (0, 1)
    check_rank_unchanged(0, 1, found=True)
    met = True
    assert find_rank(env={}) == find_rank(env={"RANK": "0", "WORLD_SIZE": "2"}) == (1, 4)
    assert find_rank(0, 2) == (0, 2)
    with pytest.raises(
        ConfigurationError, match=r"this process is rank 1 of 4: .* jax\.distributed\.initialize"
    ):
        check_rank_unchanged(0, 1, found=True)


@pytest.mark.parametrize(
    ("rank", "world", "env"),
    [
        (1, None, {}),
        (4, 4, {}),
        (-1, 4, {}),
        (0, 0, {}),
        ("0", "2", {}),
        (None, None, {"RANK": "1"}),
        (None, None, {"WORLD_SIZE": "4"}),  # each process would be rank 0
        (None, None, {"RANK": "x", "WORLD_SIZE": "2"}),
    ],
)
def test_half_a_rank_is_refused(rank: Any, world: Any, env: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=r"rank|RANK|integers"):
        find_rank(rank, world, env)
