"""Backed buckets, written: through and behind, in parts, with the origin away and the daemon killed."""

from __future__ import annotations

import os
import threading
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import BotoCoreError, ClientError

from tests.support.bounded_wait import await_end
from tests.support.daemons import Daemon
from tests.support.origin_fixtures import (
    bucket,
    code,
    eventually,
    put,
    read,
    small_daemon,
    until_kept,
    write_credentials,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.origin_places import Place

MIB = 1 << 20


def at_origin(origin: Place, name: str, key: str) -> bytes:
    found = origin.client.get_object(Bucket=origin.bucket, Key=f"{name}/{key}")
    return bytes(found["Body"].read())


def is_at_origin(origin: Place, name: str, key: str) -> bool:
    try:
        origin.client.head_object(Bucket=origin.bucket, Key=f"{name}/{key}")
    except ClientError:
        return False
    return True


def test_what_is_put_is_at_the_origin(backed: Daemon, origin: Place) -> None:
    client = bucket(backed, origin, "through")
    assert code(client.get_object, Bucket="through", Key="a/b") == "NoSuchKey"
    client.put_object(Bucket="through", Key="a/b", Body=b"1", ContentType="text/plain", Metadata={"k": "v"})
    assert at_origin(origin, "through", "a/b") == b"1"
    found = client.get_object(Bucket="through", Key="a/b")
    assert (found["Body"].read(), found["ContentType"], found["Metadata"]) == (b"1", "text/plain", {"k": "v"})
    until_kept(client, "through", "a/b", origin)
    client.put_object(Bucket="through", Key="a/b", Body=b"22")
    assert read(client, "through", "a/b") == b"22" == at_origin(origin, "through", "a/b")
    assert [each["Key"] for each in client.list_objects_v2(Bucket="through")["Contents"]] == ["a/b"]
    client.delete_object(Bucket="through", Key="a/b")
    assert not is_at_origin(origin, "through", "a/b")
    assert code(client.get_object, Bucket="through", Key="a/b") == "NoSuchKey"
    assert client.list_objects_v2(Bucket="through")["KeyCount"] == 0


def test_large_objects_in_parts(backed: Daemon, origin: Place) -> None:
    client, data = bucket(backed, origin, "parts"), os.urandom(21 * MIB)
    config = TransferConfig(multipart_threshold=5 * MIB, multipart_chunksize=5 * MIB)
    scratch = backed.data_dir.parent / "large.bin"
    scratch.write_bytes(data)
    client.upload_file(str(scratch), "parts", "large", Config=config)
    assert at_origin(origin, "parts", "large") == data
    assert read(client, "parts", "large") == data
    assert read(client, "parts", "large", Range="bytes=10000000-10000099") == data[10000000:10000100]


def test_many_are_removed_at_once(backed: Daemon, origin: Place) -> None:
    client = bucket(backed, origin, "removed")
    for index in range(12):
        put(origin, "removed", f"k{index}", b"x")
    wanted = [{"Key": f"k{index}"} for index in range(10)] + [{"Key": "never/was"}]
    answer = client.delete_objects(Bucket="removed", Delete={"Objects": wanted})
    assert len(answer["Deleted"]) == 11
    left = client.list_objects_v2(Bucket="removed")["Contents"]
    assert [each["Key"] for each in left] == ["k10", "k11"]


def test_what_an_origin_cannot_keep_is_refused(backed: Daemon, origin: Place) -> None:
    client = bucket(backed, origin, "refused")
    bucket(backed, origin, "readonly", write="off")
    put_object = client.put_object
    assert code(put_object, Bucket="refused", Key="k", Body=b"", Tagging="a=b") == "NotImplemented"
    assert code(put_object, Bucket="refused", Key="k", Body=b"", IfNoneMatch="*") == "NotImplemented"
    assert code(put_object, Bucket="refused", Key="k", Body=b"", ACL="public-read") == "NotImplemented"
    assert code(put_object, Bucket="refused", Key="a//b", Body=b"") == "NotImplemented"
    assert code(put_object, Bucket="readonly", Key="k", Body=b"") == "AccessDenied"
    assert code(client.delete_object, Bucket="readonly", Key="k") == "AccessDenied"
    enabled = {"Status": "Enabled"}
    setting = client.put_bucket_versioning
    assert code(setting, Bucket="refused", VersioningConfiguration=enabled) == "NotImplemented"


def test_write_through_that_fails_leaves_nothing(backed: Daemon, origin: Place) -> None:
    client = bucket(backed, origin, "failing")
    put(origin, "failing", "k", b"old")
    origin.faults.refuse = True
    assert code(client.put_object, Bucket="failing", Key="k", Body=b"new") == "ServiceUnavailable"
    origin.faults.refuse = False
    eventually(lambda: _reads(client, "failing", "k") == b"old")


def _reads(client: Any, name: str, key: str) -> bytes:
    try:
        return read(client, name, key)
    except ClientError:
        return b""


def test_a_power_cut_takes_nothing_back_at_the_origin(origin: Place, tmp_path: Path) -> None:
    """Of writes on their way through, a checkpoint was taken; the origin got them, and what came after them.
    Writes that are to be brought there later are in the checkpoint, too, and stay."""
    write_credentials(tmp_path, origin)
    through, back = (f"{mode}-{uuid.uuid4().hex[:8]}" for mode in ("through", "back"))
    relaxed = ["--durability", "relaxed", "--sync-interval", "3600", "--origin-credentials", str(tmp_path)]
    with Daemon.start(args=relaxed) as daemon:
        client = bucket(daemon, origin, through)
        bucket(daemon, origin, back, write="back")
        origin.faults.delay = 60.0
        writers = [
            threading.Thread(target=_put_until_cut, args=(daemon, through, key))
            for key in ("deleted", "replaced")
        ]
        for writer in writers:
            writer.start()
        client.put_object(Bucket=back, Key="later", Body=b"later")
        for name, key in ((through, "deleted"), (through, "replaced"), (back, "later")):
            eventually(lambda name=name, key=key: is_at_origin(origin, name, key))
        daemon.kill()
        for writer in writers:
            await_end(writer)
        origin.faults.delay, origin.faults.refuse = 0.0, True
        daemon.up()  # takes a checkpoint with all three, and no other one for a quarter of an hour
        origin.faults.refuse = False
        client = daemon.client()
        eventually(lambda: _succeeds(client.put_object, Bucket=through, Key="replaced", Body=b"newer"))
        client.delete_object(Bucket=through, Key="deleted")
        origin.client.delete_object(Bucket=origin.bucket, Key=f"{back}/later")
        daemon.kill()
        (daemon.data_dir / "boot").write_text("checkpoints another")
        daemon.up()
        client = daemon.client()
        assert read(client, through, "replaced") == b"newer"
        assert code(client.get_object, Bucket=through, Key="deleted") == "NoSuchKey"
        assert read(client, back, "later") == b"later"
        eventually(lambda: is_at_origin(origin, back, "later"))
        assert at_origin(origin, through, "replaced") == b"newer"
        assert not is_at_origin(origin, through, "deleted")


def _put_until_cut(daemon: Daemon, name: str, key: str) -> None:
    with suppress(BotoCoreError):
        daemon.client().put_object(Bucket=name, Key=key, Body=b"older")


def _succeeds(call: Any, **asked: Any) -> bool:
    try:
        call(**asked)
    except ClientError:  # the origin has been away
        return False
    return True


def test_write_back_survives_the_origin_and_the_daemon(origin: Place, tmp_path: Path) -> None:
    write_credentials(tmp_path, origin)
    name = f"back-{uuid.uuid4().hex[:8]}"  # what a try before this one brought there stays
    with Daemon.start(workers=2, args=["--origin-credentials", str(tmp_path)]) as daemon:
        client = bucket(daemon, origin, name, write="back")
        put(origin, name, "z-there", b"z")
        origin.faults.refuse = True
        for index in range(20):
            client.put_object(
                Bucket=name, Key=f"k{index:02d}", Body=b"v%d" % index, Metadata={"n": str(index)}
            )
        assert read(client, name, "k07") == b"v7"
        daemon.kill()
        daemon.up()
        client = daemon.client()
        assert read(client, name, "k07") == b"v7"
        assert not is_at_origin(origin, name, "k07")
        assert code(client.delete_bucket, Bucket=name) == "BucketNotEmpty"
        origin.faults.refuse = False
        whole = [*[f"k{index:02d}" for index in range(20)], "z-there"]
        eventually(lambda: _listed(client, name) == whole, told=lambda: _listed(client, name))
        for index in range(20):
            eventually(lambda index=index: is_at_origin(origin, name, f"k{index:02d}"))
            assert at_origin(origin, name, f"k{index:02d}") == b"v%d" % index
        head = origin.client.head_object(Bucket=origin.bucket, Key=f"{name}/k07")
        assert head["Metadata"] == {"n": "7"}
        eventually(lambda: _deleted(client, name))
        assert is_at_origin(origin, name, "k07")  # the bucket stood for it; what is there stays


def test_what_is_brought_to_its_origin_while_it_is_read_is_read_there(origin: Place, tmp_path: Path) -> None:
    name = f"back-{uuid.uuid4().hex[:8]}"
    with small_daemon(origin, tmp_path, workers=1, fail="origins.read.kept=sleep(4000)") as daemon:
        client = bucket(daemon, origin, name, write="back")
        origin.faults.delay = 1.0
        client.put_object(Bucket=name, Key="k", Body=b"1")
        # Found before it is at its origin, looked for afterwards; not by the short way, which is one moment.
        found = client.get_object(Bucket=name, Key="k", ResponseContentType="text/x")
        assert (found["Body"].read(), found["ContentType"]) == (b"1", "text/x")


def _listed(client: Any, name: str) -> list[str]:
    try:
        return [each["Key"] for each in client.list_objects_v2(Bucket=name)["Contents"]]
    except ClientError as error:
        return [str(error)]


def _deleted(client: Any, name: str) -> bool:
    try:
        client.delete_bucket(Bucket=name)
    except ClientError:
        return False
    return True


def test_the_last_write_is_the_one_that_stays(origin: Place, tmp_path: Path) -> None:
    write_credentials(tmp_path, origin)
    with Daemon.start(workers=2, args=["--origin-credentials", str(tmp_path)]) as daemon:
        client = bucket(daemon, origin, "last", write="back")
        origin.faults.delay = 0.02
        for index in range(60):
            client.put_object(Bucket="last", Key="k", Body=b"%d" % index)
            assert read(client, "last", "k") == b"%d" % index
        eventually(lambda: at_origin(origin, "last", "k") == b"59")
        eventually(lambda: read(client, "last", "k") == b"59")


@pytest.mark.parametrize("source", ["plain", "backed-from"])
def test_copies(backed: Daemon, origin: Place, source: str) -> None:
    client = bucket(backed, origin, "backed-to")
    if source == "plain":
        client.create_bucket(Bucket="plain")
        client.put_object(Bucket="plain", Key="k", Body=b"copied")
    else:
        bucket(backed, origin, "backed-from")
        put(origin, "backed-from", "k", b"copied")
    client.copy_object(Bucket="backed-to", Key="c", CopySource={"Bucket": source, "Key": "k"})
    assert at_origin(origin, "backed-to", "c") == b"copied"
