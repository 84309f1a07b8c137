"""Requests whose bodies are held back while what allowed them is taken away: they carry out nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from botocore.exceptions import ClientError

from meshd.control.buckets import Bucket
from meshd.datasets.archives.decompression import decompress
from meshd.server.request_body import reserve_body_memory
from meshd.util.tenant_limits import Admission
from meshwire.errors import S3Error
from tests.support.archive_files import archive_of
from tests.support.daemons import Daemon
from tests.support.mesh_nodes import NodesBeside
from tests.support.s3_raw import Wire, read_answer

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from tests.support.s3_raw import Answer


class Person(NamedTuple):
    """A user, and one key of theirs."""

    user_id: str
    wire: Wire


@pytest.fixture(scope="module")
def node() -> Iterator[Daemon]:
    with Daemon.start() as running:
        yield running


@pytest.fixture
def ann(node: Daemon, request: pytest.FixtureRequest) -> Iterator[Person]:
    user = {"user_id": f"ann-{abs(hash(request.node.name)) % 10**8}"}
    node.request("POST", "/-/admin/users", json.dumps(user).encode())
    key = json.loads(node.request("POST", "/-/admin/keys", json.dumps(user).encode()).body)
    with contextlib.closing(Wire(node.endpoint, key["access_key"], key["secret_key"])) as wire:
        yield Person(user["user_id"], wire)


def hold(wire: Wire, method: str, target: str, body: bytes) -> socket.socket:
    """All of a request but its last byte."""
    sock, digest = wire.connect(), hashlib.sha256(body).hexdigest()
    head = wire.head(method, target, headers={"content-length": str(len(body))}, payload_hash=digest)
    sock.sendall(head + body[:-1])
    return sock


def let_go(sock: socket.socket, body: bytes, method: str) -> Answer:
    sock.sendall(body[-1:])
    return read_answer(sock, method)


def until_begun(node: Daemon) -> None:
    """What was sent before on other connections has been read: one loop serves them in turn."""
    for _ in range(3):
        node.request("GET", "/-/whoami")


def test_a_new_session_is_not_asked_for_over_the_end_of_the_old_one(node: Daemon, ann: Person) -> None:
    made = json.loads(ann.wire.call("POST", "/-/sts", b"{}").body)
    token, body = made["SessionToken"], b"{" + b" " * 100 + b"}"
    pod = Wire(node.endpoint, made["AccessKeyId"], made["SecretAccessKey"], session_token=token)
    with contextlib.closing(pod):
        held = hold(pod, "POST", "/-/sts", body)
        until_begun(node)
        assert node.request("DELETE", f"/-/admin/users/{ann.user_id}/sessions").status == 200
        answer = let_go(held, body, "POST")
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (400, "InvalidToken")
    assert ann.wire.call("POST", "/-/sts", b"{}").status == 200


def test_a_disabled_key_opens_no_bucket(node: Daemon, ann: Person) -> None:
    bucket = ann.user_id
    assert ann.wire.call("PUT", f"/{bucket}").status == 200
    anybody = {"Effect": "Allow", "Principal": "*", "Action": "s3:*", "Resource": f"arn:aws:s3:::{bucket}/*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": anybody}).encode()
    held = hold(ann.wire, "PUT", f"/{bucket}?policy", policy)
    until_begun(node)
    node.request("PATCH", f"/-/admin/keys/{ann.wire.access_key}", b'{"enabled": false}')
    answer = let_go(held, policy, "PUT")
    assert (answer.status, answer.code) == (403, "InvalidAccessKeyId")
    assert node.request("GET", f"/{bucket}?policy").status == 404


def test_a_key_of_root_that_is_disabled_makes_no_other(node: Daemon, ann: Person) -> None:
    key = json.loads(node.request("POST", "/-/admin/keys", b'{"user_id": "root"}').body)
    body = json.dumps({"user_id": ann.user_id}).encode()
    with contextlib.closing(Wire(node.endpoint, key["access_key"], key["secret_key"])) as wire:
        held = hold(wire, "POST", "/-/admin/keys", body)
        until_begun(node)
        node.request("PATCH", f"/-/admin/keys/{key['access_key']}", b'{"enabled": false}')
        answer = let_go(held, body, "POST")
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (403, "InvalidAccessKeyId")


@pytest.mark.parametrize(
    ("method", "target", "document"),
    [
        ("POST", "/-/admin/users", {"user_id": "made-late"}),
        ("PATCH", "/-/admin/users/{user}", {"display_name": "late"}),
        ("PUT", "/-/admin/policies/late", {"Version": "2012-10-17", "Statement": []}),
        ("PUT", "/-/admin/log-level/debug", {"seconds": 60}),
        ("POST", "/-/admin/roles", {"role": "late"}),
    ],
)
def test_a_key_of_root_that_is_disabled_administers_nothing(
    node: Daemon, ann: Person, method: str, target: str, document: dict[str, Any]
) -> None:
    key = json.loads(node.request("POST", "/-/admin/keys", b'{"user_id": "root"}').body)
    body = json.dumps(document).encode()
    with contextlib.closing(Wire(node.endpoint, key["access_key"], key["secret_key"])) as wire:
        held = hold(wire, method, target.format(user=ann.user_id), body)
        until_begun(node)
        node.request("DELETE", f"/-/admin/keys/{key['access_key']}")
        answer = let_go(held, body, method)
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (403, "InvalidAccessKeyId")


def test_a_right_that_was_taken_away_deletes_nothing(node: Daemon, ann: Person) -> None:
    """The user is still there; the bucket's policy names them no more."""
    bucket, s3 = f"shared-{ann.user_id}", node.client()
    s3.create_bucket(Bucket=bucket)
    s3.put_object(Bucket=bucket, Key="k", Body=b"")
    who = {"AWS": f"arn:aws:iam:::user/{ann.user_id}"}
    allowed = {"Effect": "Allow", "Principal": who, "Action": "s3:*", "Resource": f"arn:aws:s3:::{bucket}/*"}
    s3.put_bucket_policy(Bucket=bucket, Policy=json.dumps({"Version": "2012-10-17", "Statement": allowed}))
    body = b"<Delete><Object><Key>k</Key></Object></Delete>"
    held = hold(ann.wire, "POST", f"/{bucket}?delete", body)
    until_begun(node)
    s3.delete_bucket_policy(Bucket=bucket)
    assert let_go(held, body, "POST").status == 403
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b""
    s3.close()


def test_nothing_comes_into_a_bucket_that_is_anothers_by_now(node: Daemon, ann: Person) -> None:
    """A name that was given up and taken by somebody else is another bucket."""
    bucket, s3, body = f"name-{ann.user_id}", node.client(), b"of the one before"
    assert ann.wire.call("PUT", f"/{bucket}").status == 200
    held = [hold(ann.wire, "PUT", f"/{bucket}/{key}", body) for key in ("k", "other")]
    until_begun(node)
    assert ann.wire.call("DELETE", f"/{bucket}").status == 204
    s3.create_bucket(Bucket=bucket)
    s3.put_object(Bucket=bucket, Key="k", Body=b"mine")
    assert {let_go(sock, body, "PUT").code for sock in held} == {"NoSuchBucket"}
    assert [entry["Key"] for entry in s3.list_objects_v2(Bucket=bucket)["Contents"]] == ["k"]
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"mine"
    s3.close()


def test_what_did_not_change_is_carried_out(node: Daemon, ann: Person) -> None:
    """A body may take its time; another user's changes meanwhile are nothing to it."""
    body = b'{"name": "slow"}'
    held = hold(ann.wire, "POST", "/-/sts", body)
    until_begun(node)
    node.request("POST", "/-/admin/users", b'{"user_id": "somebody-else"}')
    assert let_go(held, body, "POST").status == 200


def test_no_member_is_copied_into_a_bucket_that_is_anothers_by_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive may be inflated for minutes."""
    with NodesBeside(1) as mesh:
        buckets, s3 = mesh.nodes[0].node.buckets, mesh.nodes[0].client()
        s3.create_bucket(Bucket="given-up")
        s3.put_object(Bucket="bench", Key="x.tgz", Body=archive_of("tgz", {"a": b"copied"}))

        def taken(*args: Any) -> Any:
            monkeypatch.undo()
            mesh.run(buckets.delete("given-up"))
            mesh.run(buckets.create(Bucket("given-up", "bob", 1)))
            return decompress(*args)

        monkeypatch.setattr("meshd.datasets.archives.reader.decompress", taken)
        with pytest.raises(ClientError, match="NoSuchBucket"):
            s3.copy_object(Bucket="given-up", Key="k", CopySource="bench/x.tgz/-/a")
        assert mesh.nodes[0].node.store.get("given-up", "k") is None
        s3.copy_object(Bucket="bench", Key="k", CopySource="bench/x.tgz/-/a")
        s3.close()


def test_a_list_of_keys_is_not_kept_for_whoever_may_delete_none() -> None:
    """On a mesh it goes to several nodes; who has no right is refused before it is here."""
    with NodesBeside(2) as mesh:
        wire = Wire(mesh.nodes[0].member.endpoint, "", "")
        with contextlib.closing(wire):
            sock = wire.connect()
            head = f"POST /bench?delete HTTP/1.1\r\nHost: {wire.host}\r\nContent-Length: 1000000\r\n\r\n"
            sock.sendall(head.encode() + bytes(1000))
            assert read_answer(sock, "POST").code == "AccessDenied"


def test_documents_that_are_received_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what was announced; nobody waits, and what was given back is there for others."""
    monkeypatch.setattr("meshd.server.request_body._room", Admission(100))
    with reserve_body_memory(80, 100):
        for size in (30, None):
            with pytest.raises(S3Error) as refused, reserve_body_memory(size, 100):
                pass
            assert refused.value.code == "SlowDown"
        with reserve_body_memory(20, 100):
            pass
    with reserve_body_memory(None, 100):
        pass
    with pytest.raises(S3Error, match="MaxMessageLengthExceeded"), reserve_body_memory(101, 100):
        pass
