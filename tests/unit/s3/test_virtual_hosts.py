"""Which bucket a host names."""

from __future__ import annotations

import pytest

from meshd.config import ConfigError, load_settings
from meshd.server.s3.request_auth import VirtualHosts
from meshwire.errors import S3Error
from meshwire.s3 import operations as ops
from meshwire.s3.parse_request import RequestHead, parse_request

HOSTS = VirtualHosts(["example.com", "s3.example.com", "localhost"])


@pytest.mark.parametrize(
    ("host", "bucket"),
    [
        ("photos.s3.example.com", "photos"),
        ("photos.s3.example.com:9000", "photos"),
        ("my.dotted.bucket.s3.example.com", "my.dotted.bucket"),
        ("PHOTOS.S3.Example.com", "photos"),
        ("photos.s3.example.com.", "photos"),
        ("photos.example.com", "photos"),
        ("s3.example.com", ""),
        ("example.com", ""),
        ("photoss3.example.com", "photoss3"),
        ("photosexample.com", ""),
        (".s3.example.com", ""),
        ("photos.localhost:9000", "photos"),
        ("127.0.0.1:9000", ""),
        ("[::1]:9000", ""),
        ("other.org", ""),
        ("", ""),
    ],
)
def test_buckets(host: str, bucket: str) -> None:
    assert HOSTS.bucket_of(host) == bucket
    assert VirtualHosts().bucket_of(host) == ""


def operation(host: str, method: str, path: str) -> ops.Operation:
    return parse_request(RequestHead(method, path, "", {"host": host}, HOSTS.bucket_of(host)))


def test_the_path_is_the_keys() -> None:
    assert operation("photos.s3.example.com", "GET", "/") == operation("h", "GET", "/photos")
    assert operation("photos.s3.example.com", "PUT", "/") == ops.CreateBucket("photos")
    assert operation("photos.s3.example.com", "GET", "/a%2Fb//c") == operation("h", "GET", "/photos/a/b//c")
    assert operation("photos.s3.example.com", "GET", "/-/healthy") == operation(
        "h", "GET", "/photos/-/healthy"
    )
    assert operation("s3.example.com", "GET", "/photos/k") == operation("h", "GET", "/photos/k")
    with pytest.raises(S3Error, match="InvalidBucketName"):
        operation("x_y.s3.example.com", "GET", "/k")


@pytest.mark.parametrize(
    ("given", "domains"),
    [
        ("s3.example.com", ("s3.example.com",)),
        ("a.example, B.example", ("a.example", "b.example")),
        (("a.example", "localhost"), ("a.example", "localhost")),
    ],
)
def test_settings(given: object, domains: tuple[str, ...]) -> None:
    settings = load_settings({"data-dir": "d", "domain": given}, env={})
    assert settings.http.domains == domains


@pytest.mark.parametrize("given", ["http://a", "a:9000", "*.a", "10.0.0.1", "a..b", "-a"])
def test_what_is_no_domain(given: str) -> None:
    with pytest.raises(ConfigError, match="domain"):
        load_settings({"data-dir": "d", "domain": given}, env={})
