"""Uploads of a bucket that was deleted are not its successor's, where a node did not hear of the end."""

from __future__ import annotations

import pytest

from meshd.control.buckets import Bucket
from meshd.store.records import Upload
from meshwire.s3 import operations as ops
from tests.support.object_fixtures import Desk, refusal, run


@pytest.fixture
def desk() -> Desk:
    made = Desk()
    succeed(made, 1000)
    return made


def succeed(desk: Desk, created_ms: int) -> None:
    """Another bucket has the name; nobody dropped the uploads of the one before."""
    run(desk.buckets.delete("b"))
    run(desk.buckets.create(Bucket("b", "bob", created_ms)))


def shown(desk: Desk) -> list[str]:
    page = run(desk.listings.list_uploads(ops.ListMultipartUploads("b")))
    return [entry.key for entry in page.uploads]


def test_an_upload_of_a_former_bucket_is_no_more(desk: Desk) -> None:
    upload = desk.begin("secret")
    part = desk.part("secret", upload, 1, b"x")
    assert shown(desk) == ["secret"]
    succeed(desk, 2000)
    assert shown(desk) == []
    assert refusal(desk.part, "secret", upload, 2, b"x").code == "NoSuchUpload"
    assert refusal(desk.complete, "secret", upload, part).code == "NoSuchUpload"
    desk.begin("own")
    assert shown(desk) == ["own"]


def test_an_upload_without_a_birth_belongs_to_whoever_has_the_name(desk: Desk) -> None:
    """An earlier version began it."""
    run(desk.store.create_upload(Upload("", "b", "old")))
    assert shown(desk) == ["old"]
