"""The S3 client and its transfers against a real daemon."""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

import pytest

import meshsdk as mesh
from meshsdk.client.transport import EndpointClient
from meshsdk.errors import (
    AccessError,
    ConfigurationError,
    ConnectError,
    NotFoundError,
    PreconditionError,
    ServerError,
)
from meshsdk.transfers import Tuning, copy, download, stream, upload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from meshsdk.client.http_connection import Connection, Response
    from meshsdk.client.request import Request
    from tests.support.daemons import Daemon

MIB = 1 << 20
PARTS = Tuning(part=5 * MIB, parallel=3)


@pytest.fixture
def client(daemon: Daemon) -> Iterator[mesh.Client]:
    with mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client:
        yield client


def test_buckets(client: mesh.Client, bucket: str) -> None:
    assert client.has_bucket(bucket)
    assert bucket in [entry.name for entry in client.buckets()]
    client.create_bucket(f"{bucket}-2")
    client.create_bucket(f"{bucket}-2")
    client.delete_bucket(f"{bucket}-2")
    assert not client.has_bucket(f"{bucket}-2")
    with pytest.raises(NotFoundError, match=f"mesh mb s3://{bucket}-2"):
        client.delete_bucket(f"{bucket}-2")


@pytest.mark.parametrize(
    "key",
    ["plain", "a b", "ü/ß", "a+b", "a//b", "/lead", "q?x=1&y=2", "#hash", "%41", "~*'()!", "😀", "k" * 1024],
)
def test_any_key_makes_the_round(client: mesh.Client, bucket: str, key: str) -> None:
    etag = client.put(bucket, key, b"hello", metadata={"Author": "me"}, content_type="text/plain")
    info = client.head(bucket, key)
    assert (info.size, info.etag, info.content_type) == (5, etag, "text/plain")
    assert info.metadata == {"author": "me"}
    assert info.modified_ms > 1_700_000_000_000
    assert client.get(bucket, key) == b"hello"
    assert [entry.key for entry in client.list(bucket)] == [key]
    assert client.copy(bucket, key, bucket, "copy") == etag
    assert client.delete_many(bucket, [key, "copy"]) == ()
    assert list(client.list(bucket)) == []


def test_an_empty_key_is_not_the_bucket(client: mesh.Client, bucket: str) -> None:
    """Its path would be that of the bucket, which a delete of it would remove."""
    for call in (client.get, client.head, client.delete):
        with pytest.raises(ConfigurationError, match="the key is empty"):
            call(bucket, "")
    with pytest.raises(ConfigurationError, match="the key is empty"):
        client.put(bucket, "", b"")
    with pytest.raises(ConfigurationError, match="the key is empty"):
        next(stream(client, bucket, ""))
    assert client.has_bucket(bucket)


def test_many_objects_in_few_requests(
    client: mesh.Client, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = {f"t/{number}.json": b"%d" % number for number in range(300)}
    bodies |= {"large.png": os.urandom(3 * MIB), "../a b/ä.txt": b"1", "./c": b"", "d": b"xy"}
    send, sent = client.transport.call, list[Any]()

    def count(*call: Any) -> Any:
        sent.append(call)
        return send(*call)

    monkeypatch.setattr(client.transport, "call", count)
    assert (
        client.put_many(bucket, [*bodies.items(), ("e", memoryview(b"e")), ("d", b"last")]) == len(bodies) + 2
    )
    assert 3 <= len(sent) <= 10
    bodies |= {"d": b"last", "e": b"e"}
    assert {entry.key for entry in client.list(bucket)} == set(bodies)
    for key in [*bodies][::10] + [*bodies][-6:]:
        assert client.get(bucket, key) == bodies[key]
    assert client.head(bucket, "t/7.json").content_type == "application/json"
    assert client.put_many(bucket, []) == 0
    with pytest.raises(NotFoundError, match="mesh mb"):
        client.put_many("no-such-bucket", bodies.items())


def test_many_objects_have_exactly_the_keys_that_they_were_given(client: mesh.Client, bucket: str) -> None:
    long = "k" * 150
    kept = {"ä": b"a file", long: b"another"}
    client.put_many(bucket, kept.items())
    client.put_many(bucket, [("ä/", b""), (f"{long}/", b""), ("a/", b""), ("b", b"b")])
    assert {entry.key for entry in client.list(bucket)} == {*kept, "ä/", f"{long}/", "a/", "b"}
    for key, data in kept.items():
        assert client.get(bucket, key) == data
    with pytest.raises(ConfigurationError, match="NUL"):
        client.put_many(bucket, [("c", b"1"), ("b\0c", b"2")])
    assert client.get(bucket, "b") == b"b"


@pytest.mark.parametrize(
    ("objects", "told"),
    [
        ([("a", "text")], r"for the key 'a' a str: text must be encoded, 'a', text\.encode\(\)"),
        ([("a", None)], "for the key 'a' a NoneType"),
        (["ab"], "got 'ab'"),
        ([("a", b"x", b"y")], r"got \('a', b'x', b'y'\)"),
    ],
)
def test_many_objects_are_pairs_of_a_key_and_bytes(
    client: mesh.Client, bucket: str, objects: Any, told: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"put_many takes pairs .*{told}"):
        client.put_many(bucket, objects)
    assert client.put_many(bucket, {"a": b"1", "b": b"2"}) == 2
    assert (client.get(bucket, "a"), client.get(bucket, "b")) == (b"1", b"2")


def test_ranges(client: mesh.Client, bucket: str) -> None:
    client.put(bucket, "k", bytes(range(100)))
    assert client.get(bucket, "k", offset=10, length=5) == bytes(range(10, 15))
    assert client.get(bucket, "k", offset=95) == bytes(range(95, 100))
    assert client.get(bucket, "k", length=0) == b""
    for read in (client.get, lambda *of, **more: next(stream(client, *of, **more))):
        with pytest.raises(ServerError, match=rf"InvalidRange.*s3://{bucket}/k ends before byte 100$"):
            read(bucket, "k", offset=100)


@pytest.mark.parametrize("given", [{"offset": -5}, {"offset": 5, "length": -1}])
def test_a_negative_range_is_not_the_whole_object(
    client: mesh.Client, bucket: str, given: dict[str, Any]
) -> None:
    client.put(bucket, "k", bytes(range(100)))
    with pytest.raises(ConfigurationError, match=r"a range begins at byte 0.*client\.head"):
        client.get(bucket, "k", **given)
    with pytest.raises(ConfigurationError, match="a range begins"):
        next(stream(client, bucket, "k", offset=-5))


def test_paths_are_texts_too(client: mesh.Client, bucket: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    upload(client, str(tmp_path / "a"), bucket, "k")
    download(client, bucket, "k", str(tmp_path / "b"))
    assert (tmp_path / "b").read_bytes() == b"abc"
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match=r"Is a directory: '.*/folder'"):
        download(client, bucket, "k", tmp_path / "folder")
    with pytest.raises(ConfigurationError, match=r"for bytes: client\.put"):
        upload(client, cast("Any", b"abc"), bucket, "k")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "folder"}


def test_conditions(client: mesh.Client, bucket: str) -> None:
    etag = client.put(bucket, "k", b"one", if_absent=True)
    with pytest.raises(PreconditionError):
        client.put(bucket, "k", b"two", if_absent=True)
    assert client.get(bucket, "k", etag=etag) == b"one"
    with pytest.raises(PreconditionError):
        client.get(bucket, "k", etag="0" * 32)


@pytest.mark.parametrize("other", [False, True])
def test_a_conditional_write_whose_answer_is_lost_knows_its_own_object(
    client: mesh.Client, bucket: str, monkeypatch: pytest.MonkeyPatch, *, other: bool
) -> None:
    """`other`: another writer has stored the same bytes, while the request of this one was lost."""
    etag = hashlib.md5(b"locked", usedforsecurity=False).hexdigest()
    receive, send, lost = client.transport.receive, EndpointClient.send, list[str]()

    def lose_answer(connection: Connection, request: Request) -> Response:
        response = receive(connection, request)
        if request.method == "PUT" and not lost:
            lost.append(request.path)
            raise ConnectError("the answer is lost")
        return response

    def lose_request(line: EndpointClient, connection: Connection, request: Request) -> None:
        if request.method == "PUT" and not lost:
            lost.append(request.path)
            with mesh.Client(client.settings) as another:
                assert another.put(bucket, "k", b"locked", if_absent=True) == etag
            raise ConnectError("the request is lost")
        send(line, connection, request)

    if other:
        monkeypatch.setattr(EndpointClient, "send", lose_request)
        with pytest.raises(PreconditionError):
            client.put(bucket, "k", b"locked", if_absent=True)
        return
    monkeypatch.setattr(client.transport, "receive", lose_answer)
    assert client.put(bucket, "k", b"locked", if_absent=True, metadata={"by": "me"}) == etag
    assert client.head(bucket, "k").metadata == {"by": "me"}
    lost.clear()
    changed = client.put(bucket, "k", b"open", etag=etag)
    assert client.head(bucket, "k").etag == changed
    with pytest.raises(PreconditionError):
        client.put(bucket, "k", b"again", etag=etag)
    assert len(lost) == 1


def test_pages_and_folders(client: mesh.Client, bucket: str) -> None:
    for number in range(5):
        client.put(bucket, f"a/{number}/x y", b"")
    client.put(bucket, "b", b"1")
    pages = list(client.pages(bucket, page=2))
    assert [len(page.entries) for page in pages] == [2, 2, 2]
    assert [entry.key for page in pages for entry in page.entries][-2:] == ["a/4/x y", "b"]
    folders = next(client.pages(bucket, "a/", delimiter="/"))
    assert folders.common_prefixes == tuple(f"a/{number}/" for number in range(5))
    assert [entry.key for entry in client.list(bucket, start_after="a/3/x y")] == ["a/4/x y", "b"]


@pytest.mark.parametrize("size", [0, 1, 5 * MIB - 1, 5 * MIB, 5 * MIB + 1, 23 * MIB])
def test_files_go_up_and_come_down(client: mesh.Client, bucket: str, tmp_path: Path, size: int) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(os.urandom(size))
    counted: list[int] = []
    etag = upload(client, source, bucket, "k", tuning=PARTS, progress=counted.append, content_type="x/y")
    assert sum(counted) == size
    assert ("-" in etag) == (size >= 5 * MIB)
    counted.clear()
    info = download(client, bucket, "k", target, tuning=PARTS, progress=counted.append)
    assert (info.size, info.etag, sum(counted)) == (size, etag, size)
    assert client.head(bucket, "k").content_type == "x/y"
    assert target.read_bytes() == source.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


class Trickle(io.RawIOBase):
    """A pipe: hands out less than it is asked for."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def read(self, size: int = -1) -> bytes:
        return self._data.read(min(size, 100_000))


def test_streams_of_unknown_length(client: mesh.Client, bucket: str) -> None:
    data = os.urandom(7 * MIB)
    upload(client, Trickle(data), bucket, "k", tuning=PARTS)  # type: ignore[arg-type]  # enough of a file
    assert b"".join(stream(client, bucket, "k")) == data
    assert b"".join(stream(client, bucket, "k", offset=3, length=2 * MIB)) == data[3 : 3 + 2 * MIB]
    assert b"".join(stream(client, bucket, "k", length=0)) == b""


def test_a_failed_upload_leaves_nothing(client: mesh.Client, bucket: str, s3: object) -> None:
    class Torn(io.RawIOBase):
        calls = 0

        def read(self, size: int = -1) -> bytes:
            self.calls += 1
            if self.calls > 2:
                raise OSError("the disk went away")
            return os.urandom(size)

    with pytest.raises(OSError, match="went away"):
        upload(client, Torn(), bucket, "k", tuning=PARTS)  # type: ignore[arg-type]  # enough of a file
    assert list(client.list(bucket)) == []
    assert "Uploads" not in s3.list_multipart_uploads(Bucket=bucket)  # type: ignore[attr-defined]


def test_a_failed_download_leaves_nothing(client: mesh.Client, bucket: str, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="mesh ls"):
        download(client, bucket, "nope", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def _flip(daemon: Daemon, stored: bytes) -> None:
    """Flip a bit of these bytes, which only one data file has, where they lie on the node's disk."""
    for path in (daemon.data_dir / "extents").rglob("*.tar"):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            if (found := mapped.find(stored)) >= 0:
                mapped[found] ^= 1
                return
    raise AssertionError("no data file has these bytes")


@pytest.mark.parametrize("where", [0, 6 * MIB], ids=["first part", "second part"])
@pytest.mark.parametrize("declared", [True, False], ids=["a node", "a server that declares nothing"])
def test_damage_on_a_disk_is_no_file(
    client: mesh.Client,
    daemon: Daemon,
    bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: int,
    declared: bool,  # beside the first part, the checksum of the object
) -> None:
    """The node sends large objects without seeing their bytes."""
    missing = "meshsdk.client.verified_reads.WHOLE_CHECKSUM_PREFIX", "x-other-"
    monkeypatch.setattr(*(("meshsdk.transfers.fetch_checksum", None) if declared else missing))
    data = os.urandom(7 * MIB)
    client.put(bucket, "k", data)
    download(client, bucket, "k", tmp_path / "sound", tuning=PARTS)
    assert (tmp_path / "sound").read_bytes() == data == client.get(bucket, "k")
    _flip(daemon, data[where : where + 4096])
    with pytest.raises(ServerError, match="mesh cluster scrub") as caught:
        download(client, bucket, "k", tmp_path / "out", tuning=PARTS)
    assert caught.value.code == "Damaged"
    assert [path.name for path in tmp_path.iterdir()] == ["sound"]
    with pytest.raises(ServerError, match="mesh cluster scrub"):
        client.get(bucket, "k")
    with pytest.raises(ServerError, match="mesh cluster scrub"):
        list(stream(client, bucket, "k"))
    assert len(client.get(bucket, "k", offset=1)) == len(data) - 1  # a range has no checksum


def test_parts_are_compared_with_the_checksum_of_the_object(
    client: mesh.Client, daemon: Daemon, bucket: str, tmp_path: Path
) -> None:
    data = os.urandom(11 * MIB)
    upload(client, io.BytesIO(data), bucket, "k", tuning=PARTS)
    download(client, bucket, "k", tmp_path / "out", tuning=Tuning(part=2 * MIB + 1))
    assert (tmp_path / "out").read_bytes() == data == b"".join(stream(client, bucket, "k"))
    _flip(daemon, data[-4096:])
    with pytest.raises(ServerError, match="crc64nvme"):
        download(client, bucket, "k", tmp_path / "again", tuning=Tuning(part=2 * MIB + 1))


@pytest.mark.parametrize("letter", ["k", "ü", "漢"])
def test_a_file_may_have_a_name_of_255_bytes(
    client: mesh.Client, bucket: str, tmp_path: Path, letter: str
) -> None:
    name = letter * (255 // len(letter.encode()))
    client.put(bucket, "k", b"body")
    download(client, bucket, "k", tmp_path / name)
    assert (tmp_path / name).read_bytes() == b"body"
    assert len(list(tmp_path.iterdir())) == 1


def test_two_downloads_to_one_file_do_not_meet(client: mesh.Client, bucket: str, tmp_path: Path) -> None:
    """Threads of a process, or pods on a shared volume, whose processes have the same number."""
    data, target = os.urandom(3 * MIB), tmp_path / "out"
    client.put(bucket, "k", data)
    begun, goes_on = threading.Event(), threading.Event()

    def pause(_: int) -> None:
        begun.set()
        assert goes_on.wait(60)

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(download, client, bucket, "k", target, progress=pause)
        try:
            assert begun.wait(60)
            download(client, bucket, "k", target)
            assert target.read_bytes() == data
        finally:
            goes_on.set()
        assert slow.result(60).size == len(data)
    assert target.read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_copy_in_parts_keeps_what_a_whole_one_keeps(client: mesh.Client, bucket: str, s3: Any) -> None:
    given = {
        "CacheControl": "max-age=60",
        "ContentDisposition": "inline",
        "ContentEncoding": "gzip",
        "ContentLanguage": "de",
        "ContentType": "text/plain",
        "Metadata": {"author": "me"},
    }
    s3.put_object(Bucket=bucket, Key="a", Body=os.urandom(6 * MIB), Tagging="k%201=v%2F2&b=", **given)
    for name, tuning in (("whole", Tuning()), ("parts", PARTS)):
        copy(client, (bucket, "a"), (bucket, name), tuning=tuning)
        found = s3.head_object(Bucket=bucket, Key=name)
        assert ("-" in found["ETag"]) == (name == "parts")
        assert {field: found[field] for field in given} == given
        tags = s3.get_object_tagging(Bucket=bucket, Key=name)["TagSet"]
        assert {tag["Key"]: tag["Value"] for tag in tags} == {"k 1": "v/2", "b": ""}


def test_refusals_say_what_to_do(daemon: Daemon, client: mesh.Client, bucket: str) -> None:
    with pytest.raises(NotFoundError, match=f"mesh ls s3://{bucket}/a/"):
        client.get(bucket, "a/b")
    with pytest.raises(NotFoundError, match="no object"):
        client.head(bucket, "a/b")
    with pytest.raises(ConfigurationError, match="bucket name"):
        client.get("NO", "k")
    wrong = mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key="wrong")
    with wrong, pytest.raises(AccessError, match="AWS_SECRET_ACCESS_KEY") as raised:
        wrong.get(bucket, "k")
    assert daemon.secret_key not in str(raised.value)
    unknown = mesh.connect(daemon.endpoint, access_key="nobody", secret_key="x")
    with unknown, pytest.raises(AccessError, match="AWS_ACCESS_KEY_ID"):
        unknown.get(bucket, "k")


def test_metadata_is_one_line(client: mesh.Client, bucket: str) -> None:
    with pytest.raises(ConfigurationError, match="one line"):
        client.put(bucket, "k", b"", metadata={"a": "b\r\nx-evil: 1"})


def test_an_unreachable_endpoint_is_named() -> None:
    client = mesh.connect("http://127.0.0.1:1", access_key="k", secret_key="s", deadline=0.0)
    with pytest.raises((ConnectError, TimeoutError), match=r"127\.0\.0\.1:1"):
        client.buckets()


def test_a_client_travels(client: mesh.Client, bucket: str) -> None:
    client.put(bucket, "k", b"x")
    with pickle.loads(pickle.dumps(client)) as again:
        assert again.get(bucket, "k") == b"x"
    assert client.settings.secret_key not in repr(client)


def test_large_copies_go_in_parts(client: mesh.Client, bucket: str) -> None:
    body = os.urandom(12 * MIB + 7)
    client.put(bucket, "large", body, metadata={"a": "1"}, content_type="text/plain")
    seen: list[int] = []
    etag = copy(client, (bucket, "large"), (bucket, "copied"), tuning=PARTS, progress=seen.append)
    info = client.head(bucket, "copied")
    assert client.get(bucket, "copied") == body
    assert (info.etag, info.metadata, info.content_type) == (etag, {"a": "1"}, "text/plain")
    assert etag.endswith("-3")
    assert sum(seen) == len(body)
    assert not copy(client, (bucket, "large"), (bucket, "whole"), len(body)).endswith("-3")
    with pytest.raises(NotFoundError):
        copy(client, (bucket, "missing"), (bucket, "copied"))
