"""Conditions under concurrency: of many writers in several processes exactly one wins."""

from __future__ import annotations

import hashlib
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

from tests.support.one_node import one_node
from tests.support.s3_raw import Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.daemons import Daemon
    from tests.support.s3_raw import Answer

WRITERS = 16


@pytest.fixture(scope="module")
def crowd() -> Iterator[Daemon]:
    """A daemon with three workers: connections spread over them."""
    with one_node(workers=3) as running:
        yield running


@pytest.fixture(scope="module")
def client(crowd: Daemon) -> Iterator[Any]:
    client = crowd.client()
    yield client
    client.close()


@pytest.fixture(params=["", "Enabled", "Suspended"])
def place(request: pytest.FixtureRequest, client: Any) -> str:
    """A new bucket, with versioning as S3 has it three ways."""
    name = f"race-{request.param.lower() or 'plain'}-{secrets.token_hex(8)}"
    client.create_bucket(Bucket=name)
    if request.param:
        client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": request.param})
    return name


def race(crowd: Daemon, calls: list[Callable[[Wire], Answer]]) -> list[Answer]:
    """All calls at once, each on a connection of its own."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[Wire], Answer]) -> Answer:
        wire = Wire(crowd.endpoint, crowd.access_key, crowd.secret_key)
        try:
            start.wait(60)
            return call(wire)
        finally:
            wire.close()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def winners(answers: list[Answer], *refusals: tuple[int, str]) -> list[Answer]:
    """The successes; every other answer must be one of `refusals`."""
    lost = {(a.status, a.code) for a in answers if a.status >= 300}
    assert lost <= set(refusals), lost
    return [a for a in answers if a.status < 300]


def put(target: str, data: bytes, **conditions: str) -> Callable[[Wire], Answer]:
    headers = {name.replace("_", "-"): value for name, value in conditions.items()}
    return lambda wire: wire.call("PUT", target, data, headers=headers)


def copy(target: str, source: str, **conditions: str) -> Callable[[Wire], Answer]:
    return put(target, b"", x_amz_copy_source=source, **conditions)


def completion(client: Any, bucket: str, key: str, data: bytes, condition: str) -> Callable[[Wire], Answer]:
    upload = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
    etag = client.upload_part(Bucket=bucket, Key=key, UploadId=upload, PartNumber=1, Body=data)["ETag"]
    body = f"<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>{etag}</ETag></Part>"
    document = (body + "</CompleteMultipartUpload>").encode()
    headers = {condition.partition(":")[0]: condition.partition(":")[2]} if condition else {}
    return lambda wire: wire.call("POST", f"/{bucket}/{key}?uploadId={upload}", document, headers=headers)


def content(client: Any, bucket: str, key: str) -> bytes:
    return bytes(client.get_object(Bucket=bucket, Key=key)["Body"].read())


def test_one_creator_wins(crowd: Daemon, client: Any, place: str) -> None:
    for round_ in range(5):
        calls = [put(f"/{place}/k{round_}", b"%d" % i, if_none_match="*") for i in range(WRITERS)]
        answers = race(crowd, calls)
        assert len(winners(answers, (412, "PreconditionFailed"))) == 1
        number = next(i for i, answer in enumerate(answers) if answer.status == 200)
        assert content(client, place, f"k{round_}") == b"%d" % number
    versions = client.list_object_versions(Bucket=place)
    assert (len(versions["Versions"]), "DeleteMarkers" in versions) == (5, False)


def test_one_creator_wins_whatever_way_it_creates(crowd: Daemon, client: Any, place: str) -> None:
    client.put_object(Bucket=place, Key="source", Body=b"copied")
    for round_ in range(4):
        key = f"k{round_}"
        calls = []
        for i in range(4):
            calls.append(put(f"/{place}/{key}", b"put%d" % i, if_none_match="*"))
            calls.append(copy(f"/{place}/{key}", f"{place}/source", if_none_match="*"))
            calls.append(completion(client, place, key, b"part%d" % i, "if-none-match:*"))
        assert len(winners(race(crowd, calls), (412, "PreconditionFailed"))) == 1
        found = client.list_object_versions(Bucket=place, Prefix=key)["Versions"]
        assert len(found) == 1


def test_one_of_those_who_saw_the_same_object_replaces_it(crowd: Daemon, client: Any, place: str) -> None:
    """A counter that many writers raise loses no step."""
    etag = client.put_object(Bucket=place, Key="k", Body=b"0")["ETag"]
    for step in range(1, 6):
        calls = [put(f"/{place}/k", b"%d by %d" % (step, i), if_match=etag) for i in range(WRITERS)]
        won = winners(race(crowd, calls), (412, "PreconditionFailed"))
        assert len(won) == 1
        etag = won[0].headers["etag"]
        assert client.head_object(Bucket=place, Key="k")["ETag"] == etag
        assert content(client, place, "k").startswith(b"%d by" % step)


def test_one_deletes_what_all_saw(crowd: Daemon, client: Any, place: str) -> None:
    for round_ in range(4):
        etag = client.put_object(Bucket=place, Key="k", Body=b"%d" % round_)["ETag"]

        def delete(wire: Wire, etag: str = etag) -> Answer:
            return wire.call("DELETE", f"/{place}/k", headers={"if-match": etag})

        answers = race(crowd, [delete] * WRITERS)
        assert len(winners(answers, (404, "NoSuchKey"), (412, "PreconditionFailed"))) == 1
        with pytest.raises(ClientError):
            client.head_object(Bucket=place, Key="k")
    markers = client.list_object_versions(Bucket=place).get("DeleteMarkers", [])
    assert len(markers) == {"e": 4, "s": 1, "p": 0}[place.removeprefix("race-")[0]]


def test_deleters_and_writers_of_one_etag(crowd: Daemon, client: Any, place: str) -> None:
    for round_ in range(4):
        etag = client.put_object(Bucket=place, Key="k", Body=b"%d" % round_)["ETag"]

        def delete(wire: Wire, etag: str = etag) -> Answer:
            return wire.call("DELETE", f"/{place}/k", headers={"if-match": etag})

        calls = [delete, put(f"/{place}/k", b"new%d" % round_, if_match=etag)] * (WRITERS // 2)
        answers = race(crowd, calls)
        won = winners(answers, (404, "NoSuchKey"), (412, "PreconditionFailed"))
        assert len(won) == 1
        if won[0].status == 200:
            assert content(client, place, "k") == b"new%d" % round_
        else:
            with pytest.raises(ClientError):
                client.head_object(Bucket=place, Key="k")


def test_one_upload_completed_by_many_is_one_object(crowd: Daemon, client: Any, place: str) -> None:
    for condition in ("", "if-none-match:*"):
        key = f"k{len(condition)}"
        call = completion(client, place, key, b"whole", condition)
        answers = race(crowd, [call] * WRITERS)
        assert {answer.status for answer in answers} == {200}
        assert len({answer.headers.get("x-amz-version-id") for answer in answers}) == 1
        assert len(client.list_object_versions(Bucket=place, Prefix=key)["Versions"]) == 1
        assert content(client, place, key) == b"whole"


def test_losers_of_a_completion_keep_their_upload(crowd: Daemon, client: Any, place: str) -> None:
    calls = [completion(client, place, "k", b"%d" % i, "if-none-match:*") for i in range(6)]
    assert len(winners(race(crowd, calls), (412, "PreconditionFailed"))) == 1
    assert len(client.list_multipart_uploads(Bucket=place)["Uploads"]) == 5


def test_parts_sent_by_many_at_once_are_whole(crowd: Daemon, client: Any, place: str) -> None:
    """The last of the senders of one part wins; whoever it is, its bytes are not mixed with another's."""
    upload = client.create_multipart_upload(Bucket=place, Key="k")["UploadId"]
    target = f"/{place}/k?uploadId={upload}&partNumber=1"
    bodies = [bytes([65 + i]) * 100_000 for i in range(WRITERS)]
    assert {answer.status for answer in race(crowd, [put(target, body) for body in bodies])} == {200}
    part = client.list_parts(Bucket=place, Key="k", UploadId=upload)["Parts"]
    assert len(part) == 1
    parts = {"Parts": [{"PartNumber": 1, "ETag": part[0]["ETag"]}]}
    client.complete_multipart_upload(Bucket=place, Key="k", UploadId=upload, MultipartUpload=parts)
    assert content(client, place, "k") in bodies


def test_versions_of_a_crowd_are_all_there(crowd: Daemon, client: Any) -> None:
    bucket = f"crowd-{secrets.token_hex(8)}"
    client.create_bucket(Bucket=bucket)
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    answers = race(crowd, [put(f"/{bucket}/k", b"%d" % i) for i in range(WRITERS)])
    written = {answer.headers["x-amz-version-id"]: i for i, answer in enumerate(answers)}
    assert len(written) == WRITERS
    for name, i in written.items():
        got = client.get_object(Bucket=bucket, Key="k", VersionId=name)["Body"].read()
        assert got == b"%d" % i
    listed = client.list_object_versions(Bucket=bucket)["Versions"]
    assert {entry["VersionId"] for entry in listed} == set(written)
    assert [entry["IsLatest"] for entry in listed] == [True] + [False] * (WRITERS - 1)


def test_tags_set_by_many_are_one_writers(crowd: Daemon, client: Any, place: str) -> None:
    client.put_object(Bucket=place, Key="k", Body=b"1")
    body = (
        "<Tagging><TagSet><Tag><Key>a</Key><Value>{0}</Value></Tag><Tag><Key>b</Key><Value>{0}</Value></Tag>"
    )
    documents = [(body.format(i) + "</TagSet></Tagging>").encode() for i in range(WRITERS)]
    answers = race(crowd, [put(f"/{place}/k?tagging", document) for document in documents])
    assert {answer.status for answer in answers} == {200}
    tags = client.get_object_tagging(Bucket=place, Key="k")["TagSet"]
    assert tags[0]["Value"] == tags[1]["Value"]
    assert content(client, place, "k") == b"1"


def test_one_replaces_whatever_way_it_writes(crowd: Daemon, client: Any, place: str) -> None:
    client.put_object(Bucket=place, Key="source", Body=b"copied")
    etag = client.put_object(Bucket=place, Key="k", Body=b"first")["ETag"]
    for round_ in range(4):
        calls = []
        for i in range(4):
            calls.append(put(f"/{place}/k", b"put %d %d" % (round_, i), if_match=etag))
            calls.append(copy(f"/{place}/k", f"{place}/source", if_match=etag))
            calls.append(completion(client, place, "k", b"part %d %d" % (round_, i), f"if-match:{etag}"))
        assert len(winners(race(crowd, calls), (412, "PreconditionFailed"))) == 1
        # What a copy left is the same in every round; the next round shall see another object.
        etag = client.put_object(Bucket=place, Key="k", Body=b"between %d" % round_)["ETag"]


def test_readers_see_one_of_the_writes_whole(crowd: Daemon, client: Any, place: str) -> None:
    """ETag and bytes of one answer belong together, whatever is written meanwhile; nobody is refused. Objects
    this large have files of their own, which go with the object."""
    bodies = [bytes([65 + i]) * ((1 << 20) + i) for i in range(1, 1 + WRITERS // 2)]
    client.put_object(Bucket=place, Key="k", Body=bodies[0])

    def read(wire: Wire) -> Answer:
        return wire.call("GET", f"/{place}/k")

    for _ in range(4):
        calls = [call for body in bodies for call in (put(f"/{place}/k", body), read)]
        for answer in winners(race(crowd, calls)):
            if answer.body:
                assert answer.body in bodies
                assert answer.headers["etag"] == f'"{hashlib.md5(answer.body).hexdigest()}"'
