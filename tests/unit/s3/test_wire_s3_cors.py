"""Which rule a page's request falls under, and what the answer then says."""

from __future__ import annotations

import pytest

from meshwire.s3.bucket_settings import CorsRule
from meshwire.s3.cors import cors_allow_headers, cors_response_headers, find_cors_rule

VARY = ("vary", "Origin, Access-Control-Request-Headers, Access-Control-Request-Method")


@pytest.mark.parametrize(
    ("pattern", "origin", "fits"),
    [
        ("*", "https://any.example", True),
        ("https://a.example", "https://a.example", True),
        ("https://a.example", "https://A.example", False),
        ("https://a.example", "https://a.example:8443", False),
        ("https://*.example", "https://a.b.example", True),
        ("https://*.example", "https://.example", True),
        ("https://*.example", "http://a.example", False),
        ("a*a", "a", False),
        ("*.example", "https://evil.example.com", False),
    ],
)
def test_origins(pattern: str, origin: str, fits: bool) -> None:
    rule = CorsRule((pattern,), ("GET",))
    assert (find_cors_rule([rule], origin, "GET") is rule) is fits


@pytest.mark.parametrize(
    ("allowed", "asked", "fits"),
    [
        ((), (), True),
        ((), ("x-a",), False),
        (("*",), ("x-a", "x-b"), True),
        (("x-amz-*",), ("x-amz-date", "x-amz-meta-a"), True),
        (("x-amz-*",), ("x-amz-date", "range"), False),
        (("x-a", "range"), ("range",), True),
    ],
)
def test_headers(allowed: tuple[str, ...], asked: tuple[str, ...], fits: bool) -> None:
    rule = CorsRule(("*",), ("PUT",), allowed)
    assert (find_cors_rule([rule], "o", "PUT", asked) is rule) is fits


def test_the_first_rule_that_fits_counts() -> None:
    rules = (CorsRule(("http://a",), ("GET",)), CorsRule(("*",), ("GET",)), CorsRule(("*",), ("PUT",)))
    assert find_cors_rule(rules, "http://a", "GET") is rules[0]
    assert find_cors_rule(rules, "http://b", "GET") is rules[1]
    assert find_cors_rule(rules, "http://b", "PUT") is rules[2]
    assert find_cors_rule(rules, "http://b", "DELETE") is None


def test_what_an_answer_says() -> None:
    rule = CorsRule(("http://a", "http://*.b"), ("GET", "PUT"), ("*",), ("ETag", "x-amz-version-id"), 600)
    assert cors_allow_headers(rule, "http://x.b", ("x-a",)) == [
        ("access-control-allow-origin", "http://x.b"),
        ("access-control-allow-methods", "GET, PUT"),
        ("access-control-allow-headers", "x-a"),
        ("access-control-expose-headers", "ETag, x-amz-version-id"),
        ("access-control-max-age", "600"),
        ("access-control-allow-credentials", "true"),
        VARY,
    ]


def test_anyone_gets_no_credentials() -> None:
    headers = dict(cors_allow_headers(CorsRule(("*",), ("GET",)), "http://a"))
    assert headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in headers
    assert "access-control-max-age" not in headers


def test_caches_learn_that_the_origin_matters() -> None:
    rules = (CorsRule(("http://a",), ("GET",)),)
    assert cors_response_headers((), "http://a", "GET") == []
    assert cors_response_headers(rules, None, "GET") == [VARY]
    assert cors_response_headers(rules, "http://b", "GET") == [VARY]
    assert cors_response_headers(rules, "http://a", "PUT") == [VARY]
    assert ("access-control-allow-origin", "http://a") in cors_response_headers(rules, "http://a", "GET")
