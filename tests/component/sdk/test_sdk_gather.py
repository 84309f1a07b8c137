"""`Client.gather` against a real daemon: order, members, ranges, errors as values, credit, damage."""

from __future__ import annotations

import io
import os
import tarfile
from random import Random
from typing import TYPE_CHECKING

import pytest

import meshsdk as mesh
from meshsdk.errors import ConfigurationError, InvalidPlanError, ServerError
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Item = mesh.Item
CREDIT = 1 << 20


@pytest.fixture
def client(daemon: Daemon) -> Iterator[mesh.Client]:
    with mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client:
        yield client


def shard(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def test_objects_members_and_ranges_of_two_buckets_in_order(client: mesh.Client, bucket: str) -> None:
    other = f"{bucket}-b"
    client.create_bucket(other)
    members = {f"a/{number}.txt": os.urandom(number * 100) for number in range(20)}
    client.put(bucket, "shard.tar", shard(members))
    client.put(other, "ü b", b"0123456789")
    client.put(bucket, "empty", b"")
    asked = [
        Item(other, "ü b", tag={"any": object}),
        *(Item(bucket, "shard.tar", member=name) for name in reversed(members)),
        Item(other, "ü b", offset=2, length=3),
        Item(other, "ü b", offset=7),
        Item(other, "ü b", offset=7, length=0),
        Item(bucket, "shard.tar", member="a/7.txt", offset=100, length=50),
        Item(bucket, "empty"),
        Item(other, "ü b"),
    ]
    got = list(client.gather(asked))
    assert [answer.item for answer in got] == asked
    assert [answer.error for answer in got] == [None] * len(asked)
    assert got[0].tag == {"any": object}
    expected = [b"0123456789", *reversed(members.values()), b"234", b"789", b""]
    expected += [members["a/7.txt"][100:150], b"", b"0123456789"]
    assert [bytes(answer.data) for answer in got] == expected
    assert all(answer.data.readonly for answer in got)
    client.delete(other, "ü b")
    client.delete_bucket(other)


def test_what_fails_is_an_error_and_the_rest_comes(client: mesh.Client, bucket: str) -> None:
    client.put(bucket, "there", b"x")
    client.put(bucket, "no.tar", b"not a tar" * 200)
    client.put(bucket, "s.tar", shard({"m": b"y"}))
    client.put(bucket, "large", bytes(CREDIT + 1))
    asked = [
        Item(bucket, "nothing"),
        Item("no-such-bucket", "x"),
        Item(bucket, "there"),
        Item(bucket, "s.tar", member="n"),
        Item(bucket, "no.tar", member="m"),
        Item(bucket, "nothing.tar", member="m"),
        Item(bucket, "there", offset=2, length=1),
        Item(bucket, "large"),
        Item(bucket, "large", offset=1),
        Item(bucket, "s.tar", member="m"),
    ]
    got = list(client.gather(asked, credit=CREDIT))
    codes = [answer.error.code if answer.error else "" for answer in got]
    assert codes == [
        "NoSuchKey", "NoSuchBucket", "", "NoSuchKey", "BadSample", "NoSuchKey", "InvalidRange", "TooLarge",
        "", "",
    ]  # fmt: skip
    assert bytes(got[2].data) == b"x"
    assert len(got[8].data) == CREDIT
    assert bytes(got[9].data) == b"y"
    with pytest.raises(ServerError, match=f"s3://{bucket}/nothing does not exist"):
        _ = got[0].data


def test_no_more_comes_than_there_is_credit_for(client: mesh.Client, bucket: str) -> None:
    bodies = [os.urandom(100 + number * 777 % 5000) for number in range(300)]
    for number, body in enumerate(bodies):
        client.put(bucket, f"{number:03d}", body)
    items = (Item(bucket, f"{number:03d}", tag=number) for number in range(len(bodies)))
    answers = list(client.gather(items, credit=20_000))
    assert [answer.tag for answer in answers] == list(range(len(bodies)))
    assert [bytes(answer.data) for answer in answers] == bodies
    frames: dict[int, int] = {}
    for answer in answers:
        frames[id(answer.data.obj)] = frames.get(id(answer.data.obj), 0) + len(answer.data)
    assert len(frames) > 10
    assert max(frames.values()) <= 20_000


def test_any_sizes_and_order_give_the_bytes_that_were_stored(client: mesh.Client, bucket: str) -> None:
    random = Random(7)
    whole = {
        f"{size:07d}": random.randbytes(size) for size in (1, 65_535, 65_536, 65_537, 262_143, 3_000_001)
    }
    for key, body in whole.items():
        client.put(bucket, key, body)
    large = whole["3000001"]
    asked = [Item(bucket, random.choice(list(whole))) for _ in range(60)]
    for length in (262_143, 262_143, 262_144, 262_145, 1, 0, 524_289, 700_000, 63, 64, 65):
        asked.append(Item(bucket, "3000001", offset=random.randrange(2_000_000), length=length))
    random.shuffle(asked)
    for verify in (True, False):
        got = list(client.gather(asked, verify=verify))
        assert [answer.error for answer in got] == [None] * len(asked)
        for answer in got:
            item = answer.item
            end = None if item.length is None else item.offset + item.length
            source = large if item.length is not None else whole[item.key]
            assert answer.data == source[item.offset : end]


def test_nothing_is_asked_for_nothing_and_more_than_a_request_carries(
    client: mesh.Client, bucket: str
) -> None:
    client.put(bucket, "one", b"1")
    assert list(client.gather([])) == []
    answers = client.gather(Item(bucket, "one", tag=number) for number in range(20_001))
    assert [(answer.tag, bytes(answer.data)) for answer in answers] == [(n, b"1") for n in range(20_001)]


def test_what_is_no_item_is_refused(client: mesh.Client, bucket: str) -> None:
    for wrong in (
        Item(bucket, ""),
        Item(bucket, "k" * 1025),
        Item(bucket, "\ud800"),
        Item(bucket, "k", "\ud800"),
    ):
        with pytest.raises(ConfigurationError):
            list(client.gather([wrong]))
    with pytest.raises(InvalidPlanError):
        list(client.gather([Item(bucket, "k", offset=-1)]))
    with pytest.raises(ConfigurationError, match="credit"):
        client.gather([], credit=0)


def test_damaged_bytes_are_an_error(tmp_path: Path) -> None:
    body = b"0123456789abcdef" * 64
    with (
        Daemon.start(tmp_path / "data") as daemon,
        mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client,
    ):
        client.create_bucket("damaged")
        for key in ("a", "b", "c"):
            client.put("damaged", key, key.encode() + body)
        asked = [Item("damaged", key) for key in ("a", "b", "c")]
        assert [answer.error for answer in client.gather(asked)] == [None] * 3
        (file,) = (path for path in (tmp_path / "data").rglob("*.tar") if b"b" + body in path.read_bytes())
        content = file.read_bytes()
        with file.open("r+b") as stream:
            stream.seek(content.index(b"b" + body) + 500)
            stream.write(b"!")
        got = list(client.gather(asked))
    assert [answer.error.code if answer.error else "" for answer in got] == ["", "Unreadable", ""]
    assert bytes(got[2].data) == b"c" + body


def test_large_objects_that_are_damaged_or_cut_short_are_errors(tmp_path: Path) -> None:
    bodies = {key: key.encode() + os.urandom(2 << 20) for key in ("a", "b", "c", "d")}
    with (
        Daemon.start(tmp_path / "data") as daemon,
        mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client,
    ):
        client.create_bucket("damaged")
        for key, body in bodies.items():
            client.put("damaged", key, body)
        asked = [Item("damaged", key) for key in bodies]
        assert [bytes(answer.data) for answer in client.gather(asked)] == list(bodies.values())
        for key, change in (("b", "damage"), ("c", "cut")):
            (file,) = (
                path for path in (tmp_path / "data").rglob("*.tar") if bodies[key][:64] in path.read_bytes()
            )
            middle = file.read_bytes().index(bodies[key][:64]) + (1 << 20)
            with file.open("r+b") as stream:
                if change == "cut":
                    stream.truncate(middle)
                else:
                    stream.seek(middle)
                    stream.write(bytes(byte ^ 1 for byte in bodies[key][1 << 20 : (1 << 20) + 8]))
        got = list(client.gather(asked))
    codes = [answer.error.code if answer.error else "" for answer in got]
    assert codes == ["", "Damaged", "Unreadable", ""]
    assert bytes(got[3].data) == bodies["d"]


def test_it_comes_through_tls(tmp_path: Path) -> None:
    with (
        Daemon.start(tmp_path / "data", tls=True) as daemon,
        mesh.connect(
            daemon.endpoint,
            access_key=daemon.access_key,
            secret_key=daemon.secret_key,
            ca_cert=daemon.ca_cert,
        ) as client,
    ):
        client.create_bucket("sealed")
        bodies = [os.urandom(size) for size in (10, 200_000, 3_000_000, 70_001, 0, 60_000) * 3]
        for number, body in enumerate(bodies):
            client.put("sealed", f"{number:02d}", body)
        asked = [Item("sealed", f"{number:02d}") for number in range(len(bodies))]
        asked += [Item("sealed", "02", offset=1, length=2_000_000)]
        got = [bytes(answer.data) for answer in client.gather(asked)]
    assert got == [*bodies, bodies[2][1:2_000_001]]


def test_a_gather_may_be_left_early(client: mesh.Client, bucket: str) -> None:
    body = os.urandom(3 << 20)
    client.put(bucket, "large", body)
    for taken in (1, 7):
        answers = client.gather((Item(bucket, "large") for _ in range(20)), credit=6 << 20)
        assert all(next(answers).data == body for _ in range(taken))
        answers.close()
    assert client.get(bucket, "large") == body
