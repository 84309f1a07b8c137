"""The audit log of a running node: one line a request, whatever happens to it, and nothing secret in it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen
from zipfile import ZIP_STORED

import pytest
from botocore.exceptions import ClientError

from tests.support.archive_files import zip_of
from tests.support.bounded_wait import await_end
from tests.support.daemons import Daemon
from tests.support.s3_raw import Wire, read_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "audit.jsonl"


@pytest.fixture(scope="module")
def audited(log: Path) -> Iterator[Daemon]:
    with Daemon.start(args=("--audit-log", str(log), "--sigv2", "all"), workers=2) as running:
        with contextlib.closing(running.client()) as client:
            client.create_bucket(Bucket="photos")
            client.put_object(Bucket="photos", Key="big", Body=b"x" * (8 << 20))
        yield running


@pytest.fixture
def client(audited: Daemon) -> Iterator[Any]:
    client = audited.client()
    yield client
    client.close()


@pytest.fixture
def raw(audited: Daemon) -> Iterator[Wire]:
    wire = Wire(audited.endpoint, audited.access_key, audited.secret_key)
    yield wire
    wire.close()


def lines(log: Path) -> list[dict[str, Any]]:
    """All of them, when the last one is written to its end."""
    if not log.read_text():
        return []
    text: str = eventually(lambda: _ended(log.read_text()))
    return [json.loads(line) for line in text.splitlines()]


def _ended(text: str) -> str:
    return text if text.endswith("\n") else ""


def of(log: Path, request_id: str) -> list[dict[str, Any]]:
    return [line for line in lines(log) if line["request_id"] == request_id]


def eventually(condition: Callable[[], Any]) -> Any:
    pause = threading.Event()
    for _ in range(3000):
        if result := condition():
            return result
        pause.wait(0.02)
    raise AssertionError("it did not happen")


def request_id(answer: dict[str, Any]) -> str:
    return str(answer["ResponseMetadata"]["HTTPHeaders"]["x-amz-request-id"])


def test_a_line_tells_who_did_what_to_which_object_and_how_it_went(
    audited: Daemon, client: Any, log: Path
) -> None:
    put = client.put_object(Bucket="photos", Key="a/ü \n", Body=b"hello")
    (line,) = eventually(lambda: of(log, request_id(put)))
    assert line.pop("ms") >= 0
    assert line.pop("time").endswith("Z")
    assert line == {
        "request_id": request_id(put),
        "remote": "127.0.0.1",
        "user": "root",
        "access_key": audited.access_key,
        "operation": "PutObject",
        "bucket": "photos",
        "key": "a/ü \n",
        "status": 200,
        "bytes_in": 5,
    }
    got = client.get_object(Bucket="photos", Key="a/ü \n")
    assert got["Body"].read() == b"hello"
    (line,) = eventually(lambda: of(log, request_id(got)))
    assert (line["operation"], line["bytes_out"]) == ("GetObject", 5)


def test_copies_name_their_source_and_refusals_their_code(client: Any, log: Path) -> None:
    client.put_object(Bucket="photos", Key="from", Body=b"1")
    copied = client.copy_object(Bucket="photos", Key="to", CopySource="photos/from")
    (line,) = eventually(lambda: of(log, request_id(copied)))
    assert (line["key"], line["source"]) == ("to", "photos/from")
    with pytest.raises(ClientError) as refusal:
        client.get_object(Bucket="photos", Key="none")
    (line,) = eventually(lambda: of(log, request_id(refusal.value.response)))
    assert (line["status"], line["code"], line["key"]) == (404, "NoSuchKey", "none")


def test_members_of_archives_are_named(client: Any, log: Path) -> None:
    client.put_object(Bucket="photos", Key="x.zip", Body=zip_of({"a/b": b"x"}, ZIP_STORED))
    got = client.get_object(Bucket="photos", Key="x.zip/-/a/b")
    assert got["Body"].read() == b"x"
    (line,) = eventually(lambda: of(log, request_id(got)))
    assert (line["operation"], line["key"], line["member"]) == ("GetObject", "x.zip", "a/b")
    copied = client.copy_object(Bucket="photos", Key="b", CopySource="photos/x.zip/-/a/b")
    (line,) = eventually(lambda: of(log, request_id(copied)))
    assert (line["key"], line["source"]) == ("b", "photos/x.zip/-/a/b")


def test_versions_that_were_made_and_keys_in_bodies_are_named(client: Any, log: Path) -> None:
    client.create_bucket(Bucket="kept")
    client.put_bucket_versioning(Bucket="kept", VersioningConfiguration={"Status": "Enabled"})
    put = client.put_object(Bucket="kept", Key="a", Body=b"1")
    (line,) = eventually(lambda: of(log, request_id(put)))
    assert line["version"] == put["VersionId"]
    entries = [{"Key": "a", "VersionId": put["VersionId"]}, {"Key": "b"}]
    deleted = client.delete_objects(Bucket="kept", Delete={"Objects": entries, "Quiet": True})
    (line,) = eventually(lambda: of(log, request_id(deleted)))
    assert (line["keys"], "failed" in line) == (["a", "b"], False)
    form = client.generate_presigned_post("photos", "formed")
    status, form_id = post_form(form["url"], form["fields"], b"from a form")
    (line,) = eventually(lambda: of(log, form_id))
    assert (line["operation"], line["bucket"], line["key"], line["status"]) == (
        "PostObject",
        "photos",
        "formed",
        status,
    )
    assert line["user"] == "root"


def post_form(url: str, fields: dict[str, str], file: bytes) -> tuple[int, str]:
    """Status and request id of an upload by form."""
    parts = [f'--B\r\nContent-Disposition: form-data; name="{n}"\r\n\r\n{v}\r\n' for n, v in fields.items()]
    last = '--B\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    body = "".join([*parts, last]).encode() + file + b"\r\n--B--\r\n"
    request = Request(url, body, {"Content-Type": "multipart/form-data; boundary=B"})
    with urlopen(request) as answer:
        return answer.status, answer.headers["x-amz-request-id"]


def test_who_could_not_prove_it_is_not_named_as_a_user(audited: Daemon, log: Path) -> None:
    with (
        contextlib.closing(audited.client(aws_secret_access_key="x" * 20)) as liar,
        pytest.raises(ClientError) as refusal,
    ):
        liar.list_buckets()
    (line,) = eventually(lambda: of(log, request_id(refusal.value.response)))
    assert (line["code"], line["access_key"]) == ("SignatureDoesNotMatch", audited.access_key)
    assert "user" not in line


def test_native_and_admin_requests_and_temporary_credentials_have_lines_and_probes_none(
    audited: Daemon, log: Path
) -> None:
    made = json.loads(audited.request("POST", "/-/sts", b'{"name": "pod-7"}').body)
    options = {
        "aws_access_key_id": made["AccessKeyId"],
        "aws_secret_access_key": made["SecretAccessKey"],
        "aws_session_token": made["SessionToken"],
    }
    with contextlib.closing(audited.client(**options)) as pod:
        listed = pod.list_buckets()
    (line,) = eventually(lambda: of(log, request_id(listed)))
    assert line["access_key"] == made["AccessKeyId"]
    assert (line["user"], line["session"], line["made_with"]) == ("root", "pod-7", audited.access_key)
    audited.request("GET", "/-/healthy")
    refused = json.loads(audited.request("DELETE", "/-/admin/users/nobody?force=true").body)["error"]
    (line,) = eventually(lambda: of(log, refused["request_id"]))
    assert (line["path"], line["status"], line["code"]) == ("/-/admin/users/nobody", 404, "NoSuchUser")
    assert line["operation"] == "DELETE /-/admin/"
    paths = [line["path"] for line in lines(log) if "path" in line]
    assert "/-/sts" in paths
    assert "/-/healthy" not in paths


def test_a_client_that_goes_away_has_exactly_one_line(raw: Wire, log: Path) -> None:
    def lines_of(key: str) -> list[dict[str, Any]]:
        return [line for line in lines(log) if line.get("key") == key]

    reading = raw.connect(receive_buffer=4096)
    reading.sendall(raw.head("GET", "/photos/big"))
    assert reading.recv(1000).startswith(b"HTTP/1.1 200")
    reading.close()
    (line,) = eventually(lambda: [line for line in lines_of("big") if line["operation"] == "GetObject"])
    assert (line["status"], line["code"]) == (499, "ClientGone")
    sending = raw.connect()
    head = raw.head("PUT", "/photos/half", headers={"content-length": str(1 << 20)})
    sending.sendall(head + b"x" * 100)
    sending.shutdown(1)
    answer = read_answer(sending)
    (line,) = eventually(lambda: lines_of("half"))
    assert (line["status"], line["code"]) == (answer.status, answer.code) == (400, "IncompleteBody")


def test_every_request_of_a_crowd_has_exactly_one_line(audited: Daemon, log: Path) -> None:
    with contextlib.closing(audited.client()) as client:
        ids: list[str] = []

        def work(number: int) -> None:
            for turn in range(25):
                ids.append(request_id(client.head_object(Bucket="photos", Key="big")))
                with pytest.raises(ClientError) as refusal:
                    client.get_object(Bucket="photos", Key=f"none-{number}-{turn}")
                ids.append(request_id(refusal.value.response))

        crowd = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in crowd:
            thread.start()
        for thread in crowd:
            await_end(thread)
    assert len(set(ids)) == 200
    eventually(lambda: set(ids) <= {line["request_id"] for line in lines(log)})
    counted = [line["request_id"] for line in lines(log) if line["request_id"] in set(ids)]
    assert len(counted) == 200


def test_a_renamed_log_goes_on_under_its_name_after_sighup(audited: Daemon, client: Any, log: Path) -> None:
    before = request_id(client.list_buckets())
    eventually(lambda: of(log, before))
    old = log.with_suffix(".old")
    log.rename(old)
    os.kill(audited.pid, signal.SIGHUP)

    def both_workers_write_here() -> bool:
        for _ in range(8):
            with contextlib.closing(audited.client()) as one:  # a new connection: either worker's
                one.list_buckets()
        return log.exists() and len(lines(log)) >= 8

    eventually(both_workers_write_here)
    assert of(old, before)
    assert not of(log, before)
    for line in (*lines(old), *lines(log)):
        assert line["request_id"]  # every line is whole


def test_nothing_secret_is_in_it(audited: Daemon, log: Path) -> None:
    made = json.loads(audited.request("POST", "/-/sts").body)
    with (
        contextlib.closing(audited.client(aws_session_token=made["SessionToken"])) as mixed,
        pytest.raises(ClientError) as refusal,
    ):
        mixed.get_object(Bucket="photos", Key="secret")
    eventually(lambda: of(log, request_id(refusal.value.response)))
    options = {
        "aws_access_key_id": made["AccessKeyId"],
        "aws_secret_access_key": made["SecretAccessKey"],
        "aws_session_token": made["SessionToken"],
    }
    with contextlib.closing(audited.client(**options)) as pod:
        url = pod.generate_presigned_url("get_object", {"Bucket": "photos", "Key": "big"})
    audited.request("GET", "/-/whoami?" + url.partition("?")[2])
    text = log.read_text()
    for secret in (audited.secret_key, made["SecretAccessKey"], made["SessionToken"], "Signature="):
        assert secret not in text
        assert secret not in audited.output()


def test_a_log_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    from tests.support.daemons import DaemonFailedError

    with pytest.raises(DaemonFailedError, match=r"exit code 2(.|\n)*audit-log: cannot append to"):
        Daemon.start(args=("--audit-log", str(tmp_path / "none" / "audit.jsonl")))


def test_to_the_standard_output(tmp_path: Path) -> None:
    with Daemon.start(args=("--audit-log", "-")) as daemon:
        answer = daemon.request("GET", "/-/whoami")
        assert answer.status == 200
        daemon.stop()
        told = [line for line in daemon.output().splitlines() if line.startswith("{")]
    assert [json.loads(line)["path"] for line in told] == ["/-/whoami"]


def test_an_access_key_that_is_no_text_has_its_line_and_one_answer(
    audited: Daemon, raw: Wire, log: Path
) -> None:
    ask = b"GET %b HTTP/1.1\r\nHost: x\r\nAuthorization: AWS odd\xff:x\r\n\r\n"
    sock = raw.connect()
    for target in (b"/photos/big", b"/-/whoami"):
        sock.sendall(ask % target)
        assert read_answer(sock).status == 403
    sock.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n")
    assert read_answer(sock).body == b"healthy\n"
    assert "Traceback" not in audited.output()
    eventually(lambda: sum(line.get("access_key") == "odd\\udcff" for line in lines(log)) == 2)
