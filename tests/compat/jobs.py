"""What every client is asked to do: the table of jobs, each compared with what the server then holds.

Law: a job asks the client, then looks with the oracle: boto3 with the root keys, a process apart.
Invariant: bytes are compared, never only their number; a job that the client has no call for is raised as
CannotError before anything is claimed.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError

from meshwire.checksums import body_checksums as sums
from tests.compat.talking import CannotError, ClientFailedError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable
    from pathlib import Path

    from tests.compat.talking import Conversation

MIB = 1 << 20
LARGE = 17 * MIB + 3
MANY = 1_203
ODD_KEYS = (
    "a space",
    "plus+plus",
    "semi;colon",
    "at@colon:",
    "$dollar",
    "quote'quote",
    "(round)",
    "bang!",
    "star*",
    "tilde~",
    "per%cent",
    "%41",
    "hash#tag",
    "question?mark",
    "and&equals=",
    "ünï/cödé/日本/😀",
    "dots/..x/...",
    "comma,[square]{curly}|pipe^",
)


@dataclass
class Work:
    """What a job has: the client, its bucket, the oracle, a bucket of MANY keys, and a folder of its own."""

    client: Conversation
    bucket: str
    s3: Any
    many: str
    folder: Path
    trust: ssl.SSLContext | None = None
    notes: list[str] = field(default_factory=list)

    def file(self, data: bytes) -> str:
        """A new file with these bytes."""
        path = self.folder / uuid.uuid4().hex
        path.write_bytes(data)
        return str(path)

    def ask(self, verb: str, **arguments: Any) -> Any:
        return self.client.ask(verb, bucket=self.bucket, **arguments)

    def stored(self, key: str) -> bytes:
        """The object as the oracle reads it; its MD5 and its checksum are compared on the way."""
        return bytes(self.s3.get_object(Bucket=self.bucket, Key=key, ChecksumMode="ENABLED")["Body"].read())

    def got(self, key: str) -> bytes:
        """The object as the client reads it."""
        path = self.folder / uuid.uuid4().hex
        self.ask("get", key=key, path=str(path))
        return path.read_bytes()

    def keys(self, prefix: str = "") -> list[str]:
        """Without the empty objects that some clients put where they see a folder."""
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        return [
            entry["Key"] for page in pages for entry in page.get("Contents", []) if entry["Key"][-1] != "/"
        ]

    def seed(self, key: str, data: bytes = b"0123456789", **more: Any) -> None:
        """An object made by the oracle."""
        self.s3.put_object(Bucket=self.bucket, Key=key, Body=data, **more)

    def open_url(self, url: str, method: str = "GET", body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body that a program that knows nothing of S3 gets. No Content-Type goes with `body`: a
        signature of version 2 covers it."""
        parts = urlsplit(url)
        kind: Any = http.client.HTTPConnection
        more = {}
        if parts.scheme == "https":
            kind, more = http.client.HTTPSConnection, {"context": self.trust}
        with contextlib.closing(kind(parts.hostname, parts.port, timeout=60, **more)) as connection:
            connection.request(method, f"{parts.path}?{parts.query}", body)
            answer = connection.getresponse()
            return answer.status, answer.read()


def bucket(work: Work) -> None:
    name = f"made-{uuid.uuid4().hex[:12]}"
    work.client.ask("make_bucket", bucket=name)
    try:
        work.s3.head_bucket(Bucket=name)
        assert name in work.client.ask("list_buckets")
    finally:
        work.client.ask("remove_bucket", bucket=name)
    with pytest.raises(ClientError):
        work.s3.head_bucket(Bucket=name)


def empty(work: Work) -> None:
    work.ask("put", key="empty", path=work.file(b""))
    assert work.stored("empty") == b""
    assert work.got("empty") == b""


def small(work: Work) -> None:
    for data in (b"s", os.urandom(70_001)):
        work.ask("put", key="d/small.bin", path=work.file(data))
        assert work.stored("d/small.bin") == data
        assert work.got("d/small.bin") == data


def multipart(work: Work) -> None:
    data = os.urandom(LARGE)
    work.ask("put_large", key="large", path=work.file(data))
    assert work.stored("large") == data
    assert "-" in work.s3.head_object(Bucket=work.bucket, Key="large")["ETag"]
    assert work.got("large") == data
    assert not work.s3.list_multipart_uploads(Bucket=work.bucket).get("Uploads")


def streamed(work: Work) -> None:
    for size in (1000, 11 * MIB + 1):
        data = os.urandom(size)
        work.ask("put_stream", key=f"streamed/{size}", path=work.file(data))
        assert work.stored(f"streamed/{size}") == data
        assert "aws-chunked" not in _encoding(work, f"streamed/{size}")


def _encoding(work: Work, key: str) -> str:
    return str(work.s3.head_object(Bucket=work.bucket, Key=key).get("ContentEncoding", ""))


def odd_keys(work: Work) -> None:
    refused = []
    for key in ODD_KEYS:
        name, data = f"odd/{key}", key.encode()
        try:
            work.ask("put", key=name, path=work.file(data))
        except CannotError:
            raise
        except ClientFailedError as error:
            refused.append(f"{key!r}: {error}")
            continue
        assert work.stored(name) == data, key
        assert work.got(name) == data, key
    assert not refused, refused
    assert sorted(work.keys("odd/")) == sorted(f"odd/{key}" for key in ODD_KEYS)
    assert sorted(work.ask("listing", prefix="odd/", delimiter="")["keys"]) == sorted(work.keys("odd/"))


def metadata(work: Work) -> None:
    sent = {"colour": "red", "a-b": "x y"}
    work.ask("put", key="meta", path=work.file(b"m"), metadata=sent, content_type="image/png")
    head = work.s3.head_object(Bucket=work.bucket, Key="meta")
    assert head["ContentType"] == "image/png"
    assert sent.items() <= head["Metadata"].items()
    shown = work.ask("head", key="meta")
    assert shown["size"] == 1
    assert shown.get("content_type", "image/png") == "image/png"
    assert shown.get("etag", head["ETag"].strip('"')) == head["ETag"].strip('"')
    if "metadata" in shown:
        assert sent.items() <= shown["metadata"].items()


def checksums(work: Work) -> None:
    if not work.client.checksums:
        raise CannotError("it names no checksum algorithm")
    data = os.urandom(30_000)
    for algorithm in work.client.checksums:
        work.ask("put", key=f"sum/{algorithm}", path=work.file(data), checksum=algorithm)
        head = work.s3.head_object(Bucket=work.bucket, Key=f"sum/{algorithm}", ChecksumMode="ENABLED")
        digest = sums.new_hasher(algorithm.lower())
        digest.update(data)
        assert head[f"Checksum{algorithm}"] == digest.base64()
        assert head["ChecksumType"] == "FULL_OBJECT"
        assert work.got(f"sum/{algorithm}") == data


def ranges(work: Work) -> None:
    data = os.urandom(300_000)
    work.seed("ranged", data)
    for start, end in ((0, 1), (0, 300_000), (1_000, 200_000), (299_999, 300_000)):
        path = work.folder / f"{start}-{end}"
        work.ask("read_range", key="ranged", start=start, end=end, path=str(path))
        assert path.read_bytes() == data[start:end]


def listing(work: Work) -> None:
    names = ["l/a", "l/b/1", "l/b/2", "l/c d/1", "l/ü/1", "l/z"]
    for name in names:
        work.seed(name)
    assert sorted(work.ask("listing", prefix="l/", delimiter="")["keys"]) == [*names[:4], "l/z", "l/ü/1"]
    level = work.ask("listing", prefix="l/", delimiter="/")
    assert sorted(level["keys"]) == ["l/a", "l/z"]
    assert sorted(level["prefixes"]) == ["l/b/", "l/c d/", "l/ü/"]


def pages(work: Work) -> None:
    found = work.client.ask("listing", bucket=work.many, prefix="", delimiter="")
    assert sorted(found["keys"]) == [f"many/{number:05}" for number in range(MANY)]


def copy(work: Work) -> None:
    for size in (0, 100_000, LARGE):
        data = os.urandom(size)
        work.seed(f"source/{size}", data)
        work.ask("copy", key=f"source/{size}", target=f"target/{size}")
        assert work.stored(f"target/{size}") == data


def copy_odd_keys(work: Work) -> None:
    for source, target in (("a b+c", "d e+f"), ("ü&=", "é;@"), ("%41", "100%")):
        work.seed(f"source/{source}", source.encode())
        work.ask("copy", key=f"source/{source}", target=f"target/{target}")
        assert work.stored(f"target/{target}") == source.encode()


def copy_metadata(work: Work) -> None:
    work.seed("source", Metadata={"m": "1"}, ContentType="image/png")
    work.ask("copy", key="source", target="target")
    head = work.s3.head_object(Bucket=work.bucket, Key="target")
    assert (head["Metadata"].get("m"), head["ContentType"]) == ("1", "image/png")


def delete_many(work: Work) -> None:
    names = [f"del/{name}" for name in ("a", "b c", "d+e", "f&g", "ü", "h%20", "k")]
    for name in names:
        work.seed(name)
    work.ask("delete_many", keys=names[:-1])
    assert work.keys("del/") == ["del/k"]


def presigned(work: Work) -> None:
    data = os.urandom(1000)
    work.seed("signed/a b+ü", data)
    url = work.ask("presign_get", key="signed/a b+ü")
    assert work.open_url(url) == (200, data)
    assert work.open_url(url.replace("signed", "other"))[0] == 403
    try:
        url = work.ask("presign_put", key="signed/put")
    except CannotError:
        return
    assert work.open_url(url, "PUT", b"by url")[0] == 200
    assert work.stored("signed/put") == b"by url"
    presigned_part(work)


def presigned_part(work: Work) -> None:
    """As the pages of web applications send large files."""
    upload = {"Bucket": work.bucket, "Key": "signed/parts"}
    upload["UploadId"] = work.s3.create_multipart_upload(**upload)["UploadId"]
    try:
        url = work.ask("presign_part", key="signed/parts", upload=upload["UploadId"], number=1)
    except CannotError:
        return
    assert work.open_url(url, "PUT", b"part")[0] == 200
    parts = [{"PartNumber": 1, "ETag": work.s3.list_parts(**upload)["Parts"][0]["ETag"]}]
    work.s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    assert work.stored("signed/parts") == b"part"


def conditional(work: Work) -> None:
    first, second = work.file(b"first"), work.file(b"second")
    assert work.ask("put_if_absent", key="once", path=first) is True
    assert work.ask("put_if_absent", key="once", path=second) is False
    assert work.stored("once") == b"first"
    etag = hashlib.md5(b"first", usedforsecurity=False).hexdigest()
    try:
        assert work.ask("put_if_match", key="once", path=second, etag=etag) is True
    except CannotError:
        return
    assert work.stored("once") == b"second"


def sync(work: Work) -> None:
    files = {
        "empty": b"",
        "small.txt": b"small",
        "dir/sub/a b+c&ü.bin": os.urandom(1000),
        "dir/large.bin": os.urandom(LARGE),
    }
    out, back = work.folder / "out", work.folder / "back"
    for name, data in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(data)
    sent = work.ask("sync_up", folder=str(out), prefix="synced")
    assert sent in {None, len(files)}, sent
    for name, data in files.items():
        assert work.stored(f"synced/{name}") == data, name
    assert len(work.keys("synced/")) == len(files)
    again = work.ask("sync_up", folder=str(out), prefix="synced")
    assert again in {None, 0}, again
    back.mkdir()
    work.ask("sync_down", prefix="synced", folder=str(back))
    for name, data in files.items():
        assert (back / name).read_bytes() == data, name


def own_work(work: Work) -> None:
    work.notes.append(str(work.ask("own_work", prefix="own")))
    assert work.keys("own")


JOBS: dict[str, Callable[[Work], None]] = {
    "bucket": bucket,
    "empty": empty,
    "small": small,
    "multipart": multipart,
    "streamed": streamed,
    "odd keys": odd_keys,
    "metadata": metadata,
    "checksums": checksums,
    "range": ranges,
    "list": listing,
    "pages": pages,
    "copy": copy,
    "copy odd keys": copy_odd_keys,
    "copy metadata": copy_metadata,
    "delete many": delete_many,
    "presign": presigned,
    "conditional": conditional,
    "sync": sync,
    "own work": own_work,
}
