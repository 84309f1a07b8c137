"""Jobs as their users meet them: whose they are, what they may, how they are stopped, how many there are."""

from __future__ import annotations

import json
import secrets
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from botocore.exceptions import ClientError

from meshd.jobs.job_service import MAX_WAITING_EACH
from meshsdk.admin import jobs as sdk_jobs
from meshsdk.cli import run
from meshsdk.client.s3_client import connect
from tests.support.daemons import Daemon
from tests.support.job_fixtures import done, ended, objects, start
from tests.support.native_fixtures import Mesh, error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.s3_raw import Answer

ARN = "arn:aws:s3:::"
SLOW = {"MESHD_FAILPOINTS": "jobs.output.written=sleep(40)"}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    users = tmp_path_factory.mktemp("users") / "users.yaml"
    users.write_text(yaml.safe_dump([{"user_id": "eve", "access_key": "EVEKEY", "secret_key": "evesecret"}]))
    users.chmod(0o600)
    with Daemon.start(args=["--users", str(users)], workers=2, env=SLOW) as running:
        s3 = running.client()
        for bucket in ("sources", "targets"):
            s3.create_bucket(Bucket=bucket)
        for number in range(60):
            s3.put_object(Bucket="sources", Key=f"open/{number:03d}.txt", Body=b"x" * number)
        s3.put_object(Bucket="sources", Key="open/secret.txt", Body=b"secret")
        yield running
        assert "Traceback" not in running.output()


@pytest.fixture
def node(started: Daemon) -> Daemon:
    """Without jobs that another test began."""
    listed = json.loads(started.request("GET", "/-/jobs").body)["jobs"]
    for job in (each for each in listed if each["state"] not in ("done", "failed", "cancelled")):
        started.request("DELETE", f"/-/jobs/{job['id']}")
        ended(started, job)
    return started


@pytest.fixture
def run_id() -> str:
    """Of this try: what it begins nobody has begun before."""
    return secrets.token_hex(4)


@pytest.fixture
def s3(node: Daemon) -> Any:
    return node.client()


@pytest.fixture
def root(node: Daemon) -> Iterator[Mesh]:
    wire = Mesh(node.endpoint, node.access_key, node.secret_key)
    yield wire
    wire.close()


@pytest.fixture
def eve(node: Daemon) -> Iterator[Mesh]:
    wire = Mesh(node.endpoint, "EVEKEY", "evesecret")
    yield wire
    wire.close()


@pytest.fixture
def shell(node: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_ENDPOINT", node.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", node.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", node.secret_key)


def allow(s3: Any, bucket: str, *statements: dict[str, Any]) -> None:
    full = [{"Effect": "Allow", "Principal": {"AWS": "eve"}, **statement} for statement in statements]
    s3.put_bucket_policy(Bucket=bucket, Policy=json.dumps({"Version": "2012-10-17", "Statement": full}))


def job(target: str, **more: Any) -> dict[str, Any]:
    return {
        "kind": "shard",
        "source": "s3://sources/open",
        "target": f"s3://targets/{target}",
        "count": 2,
        **more,
    }


def refused(answer: Answer) -> tuple[int, str]:
    return answer.status, error(answer)["code"]


def _metric(node: Daemon, name: str) -> float:
    with urllib.request.urlopen(f"{node.endpoint}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def _until(holds: Callable[[], bool]) -> None:
    """What the coordinator does, or reports, a moment later."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def awaited(wire: Mesh, job_id: str) -> dict[str, Any]:
    while True:
        found: dict[str, Any] = wire.ok(wire.call("GET", f"/-/jobs/{job_id}?wait=5"))
        if found["state"] in ("done", "failed", "cancelled"):
            return found


# --- stopping -------------------------------------------------------------------------------------------


def test_cancelling(node: Daemon, s3: Any, run_id: str) -> None:
    target = f"cancelled-{run_id}"
    begun = start(node, **job(target))
    same = start(node, **job(target))
    assert (same["id"], same["run"]) == (begun["id"], 1)
    assert node.request("DELETE", f"/-/jobs/{begun['id']}").status == 200
    found = ended(node, begun)
    assert found["state"] == "cancelled"
    assert found["progress"]["outputs"] < 31
    some = objects(s3, "targets", f"{target}/")
    again = done(node, **job(target))
    assert (again["run"], again["progress"]["there"]) == (2, len(some))
    assert len(objects(s3, "targets", f"{target}/")) == 31
    assert json.loads(node.request("DELETE", f"/-/jobs/{begun['id']}").body)["state"] == "done"


def test_too_many_are_told_when_to_come_back(node: Daemon, run_id: str) -> None:
    begun: list[dict[str, Any]] = []
    while True:  # the first ones may end meanwhile
        document = job(f"many-{run_id}/{len(begun)}")
        answer = node.request("POST", "/-/jobs", json.dumps(document).encode())
        if answer.status != 200:
            break
        begun.append(json.loads(answer.body))
    assert f"{MAX_WAITING_EACH} of them yours" in json.loads(answer.body)["error"]["message"]
    assert (answer.status, int(answer.headers["retry-after"]) > 0) == (503, True)
    assert "mesh job cancel" in json.loads(answer.body)["error"]["help"]
    node.request("DELETE", f"/-/jobs/{begun[-1]['id']}")
    ended(node, begun[-1])
    _until(lambda: 0 < _metric(node, "meshd_jobs_waiting") < MAX_WAITING_EACH)
    for item in begun:
        node.request("DELETE", f"/-/jobs/{item['id']}")
    assert {ended(node, item)["state"] for item in begun} <= {"cancelled", "done"}
    assert start(node, **document)["state"] == "queued"


def test_a_source_that_changes_under_a_job(node: Daemon, s3: Any, run_id: str) -> None:
    name = f"moving-{run_id}"
    for number in range(40):
        s3.put_object(Bucket="sources", Key=f"{name}/{number:03d}.txt", Body=b"a")
    document = {
        "kind": "shard",
        "source": f"s3://sources/{name}",
        "target": f"s3://targets/{name}",
        "count": 1,
    }
    begun = start(node, **document)
    while not json.loads(node.request("GET", f"/-/jobs/{begun['id']}?wait=0.2").body)["progress"].get(
        "outputs"
    ):
        pass
    s3.put_object(Bucket="sources", Key=f"{name}/039.txt", Body=b"b")
    found = ended(node, begun)
    assert (found["state"], f"{name}/039.txt was replaced" in found["error"]) == ("failed", True)
    there = done(node, **document)["progress"]["there"]
    assert 39 - there < 2, "one more output may have been in progress when the job failed"


def test_a_bucket_deleted_under_a_job(node: Daemon, s3: Any) -> None:
    s3.create_bucket(Bucket="fleeting")
    begun = start(node, **job("x") | {"target": "s3://fleeting/x"})
    _until(lambda: _deleted(s3, "fleeting"))
    found = ended(node, begun)
    assert (found["state"], "fleeting" in found["error"] or "NoSuchBucket" in found["error"]) == (
        "failed",
        True,
    )


def _deleted(s3: Any, bucket: str) -> bool:
    """False where the job has just written something to it."""
    for key in objects(s3, bucket):
        s3.delete_object(Bucket=bucket, Key=key)
    try:
        s3.delete_bucket(Bucket=bucket)
    except ClientError as error:
        if error.response["Error"]["Code"] != "BucketNotEmpty":
            raise
        return False
    return True


# --- rights ---------------------------------------------------------------------------------------------


def test_who_may_not_read_and_write_starts_nothing(s3: Any, eve: Mesh) -> None:
    for bucket in ("sources", "targets"):
        s3.delete_bucket_policy(Bucket=bucket)
    assert refused(eve.post("/-/jobs", job("eve"))) == (403, "AccessDenied")
    listing = {"Action": "s3:ListBucket", "Resource": f"{ARN}sources"}
    allow(s3, "sources", listing, {"Action": "s3:GetObject", "Resource": f"{ARN}sources/*"})
    assert refused(eve.post("/-/jobs", job("eve"))) == (403, "AccessDenied")


def test_every_key_is_decided_for_itself(s3: Any, eve: Mesh, run_id: str) -> None:
    target = f"eve/{run_id}"
    listing = {"Action": "s3:ListBucket", "Resource": f"{ARN}sources"}
    reading = {"Action": "s3:GetObject", "Resource": f"{ARN}sources/*"}
    secret = {"Effect": "Deny", "Action": "s3:GetObject", "Resource": f"{ARN}sources/open/secret*"}
    allow(s3, "sources", listing, reading, secret)
    allow(s3, "targets", {"Action": "s3:PutObject", "Resource": f"{ARN}targets/eve/*"})
    found = awaited(eve, eve.ok(eve.post("/-/jobs", job(target)))["id"])
    assert (found["state"], "open/secret.txt" in found["error"]) == ("failed", True)
    allow(s3, "sources", listing, reading)
    found = awaited(eve, eve.ok(eve.post("/-/jobs", job(target)))["id"])
    assert found["state"] == "done"
    assert s3.get_object_acl(Bucket="targets", Key=f"{target}/shard-000000.tar")["Owner"]["ID"] == "eve"


def test_jobs_are_seen_by_their_owner_and_root(s3: Any, root: Mesh, eve: Mesh, run_id: str) -> None:
    listing = {"Action": "s3:ListBucket", "Resource": f"{ARN}sources"}
    allow(s3, "sources", listing, {"Action": "s3:GetObject", "Resource": f"{ARN}sources/*"})
    allow(s3, "targets", {"Action": "s3:PutObject", "Resource": f"{ARN}targets/eve/*"})
    hers = eve.ok(eve.post("/-/jobs", job(f"eve/{run_id}")))["id"]
    mine = root.ok(root.post("/-/jobs", job("rootonly")))["id"]
    assert refused(eve.call("GET", f"/-/jobs/{mine}")) == (404, "NoSuchJob")
    assert refused(eve.call("DELETE", f"/-/jobs/{mine}")) == (404, "NoSuchJob")
    assert mine not in [item["id"] for item in eve.ok(eve.call("GET", "/-/jobs"))["jobs"]]
    owners = {item["id"]: item["owner"] for item in root.ok(root.call("GET", "/-/jobs"))["jobs"]}
    assert (owners[mine], owners[hers]) == ("root", "eve")


def test_a_bounded_key_bounds_its_jobs(s3: Any, root: Mesh) -> None:
    policy = {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": f"{ARN}sources"},
            {"Effect": "Allow", "Action": "s3:GetObject", "Resource": f"{ARN}sources/*"},
            {"Effect": "Allow", "Action": "s3:PutObject", "Resource": f"{ARN}targets/bound/*"},
            {"Effect": "Deny", "Action": "s3:PutObject", "Resource": f"{ARN}targets/bound/shard-000003.tar"},
        ],
    }
    made = root.ok(root.post("/-/sts", {"policy": policy}))
    wire = Mesh(root.endpoint, made["AccessKeyId"], made["SecretAccessKey"])
    wire.session_token = made["SessionToken"]
    assert refused(wire.post("/-/jobs", job("elsewhere"))) == (403, "AccessDenied")
    found = awaited(wire, wire.ok(wire.post("/-/jobs", job("bound")))["id"])
    wire.close()
    assert (found["state"], "bound/shard-000003.tar" in found["error"]) == ("failed", True)


def session(wire: Mesh, *statements: dict[str, Any]) -> Mesh:
    """Temporary credentials within these statements."""
    full = [{"Effect": "Allow", **statement} for statement in statements]
    made = wire.ok(wire.post("/-/sts", {"policy": {"Version": "2012-10-17", "Statement": full}}))
    return Mesh(
        wire.endpoint, made["AccessKeyId"], made["SecretAccessKey"], session_token=made["SessionToken"]
    )


LIST = {"Action": "s3:ListBucket", "Resource": f"{ARN}sources"}
READ = {"Action": "s3:GetObject", "Resource": f"{ARN}sources/*"}
WRITE = {"Action": "s3:PutObject", "Resource": f"{ARN}targets/*"}


@pytest.mark.parametrize(
    "statements",
    [
        pytest.param(({"Action": "s3:GetObject", "Resource": f"{ARN}sources/pub/*"},), id="another folder"),
        pytest.param((LIST, READ), id="no writing"),
        pytest.param((READ, WRITE), id="no listing"),
        pytest.param((LIST, READ | {"Resource": f"{ARN}sources/open/?"}, WRITE), id="keys of one character"),
        pytest.param(
            (LIST, READ, WRITE, {**READ, "Effect": "Deny", "Resource": f"{ARN}sources/open/secret.txt"}),
            id="all but one object",
        ),
    ],
)
def test_a_bounded_key_neither_sees_nor_ends_other_jobs(root: Mesh, run_id: str, statements: Any) -> None:
    begun = root.ok(root.post("/-/jobs", job(f"bounds-{run_id}")))["id"]
    pod = session(root, *statements)
    assert begun not in [item["id"] for item in pod.ok(pod.call("GET", "/-/jobs"))["jobs"]]
    assert refused(pod.call("GET", f"/-/jobs/{begun}?wait=0.1")) == (404, "NoSuchJob")
    assert refused(pod.call("DELETE", f"/-/jobs/{begun}")) == (404, "NoSuchJob")
    pod.close()
    assert awaited(root, begun)["state"] == "done"


def test_a_bounded_key_ends_a_job_that_it_may_do_whole(root: Mesh, run_id: str) -> None:
    begun = root.ok(root.post("/-/jobs", job(f"whole-{run_id}")))["id"]
    pod = session(root, LIST, READ, WRITE)
    assert begun in [item["id"] for item in pod.ok(pod.call("GET", "/-/jobs"))["jobs"]]
    assert pod.ok(pod.call("DELETE", f"/-/jobs/{begun}"))["id"] == begun
    pod.close()
    assert awaited(root, begun)["state"] == "cancelled"


def test_a_bounded_key_sees_what_it_started_with_credentials_alike(root: Mesh, run_id: str) -> None:
    """Its rights are for some keys only; temporary credentials are renewed while the job runs."""
    some = (LIST, READ, WRITE, {**READ, "Effect": "Deny", "Resource": f"{ARN}sources/open/secret.txt"})
    first, later, narrower = session(root, *some), session(root, *some), session(root, LIST, READ)
    begun = first.ok(first.post("/-/jobs", job(f"some-{run_id}")))["id"]
    assert refused(narrower.call("GET", f"/-/jobs/{begun}")) == (404, "NoSuchJob")
    assert later.ok(later.call("DELETE", f"/-/jobs/{begun}"))["id"] == begun
    for wire in (first, later, narrower):
        wire.close()


# --- what is wrong is said --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "status", "word"),
    [
        (job("x", sort="siz"), 400, "sort"),
        (job("x", sort="(("), 400, "sort"),
        (job("x", counts=1), 400, "counts"),
        (job("x") | {"source": "s3://nowhere-at-all/x"}, 404, "nowhere-at-all"),
        (job("x") | {"target": "s3://nowhere-at-all/x"}, 404, "nowhere-at-all"),
        (
            {"kind": "materialize", "source": "s3://sources/", "target": "s3://targets/x"},
            400,
            "is not a view",
        ),
        ([], 400, "object"),
    ],
)
def test_refusals(node: Daemon, document: Any, status: int, word: str) -> None:
    answer = node.request("POST", "/-/jobs", json.dumps(document).encode())
    assert (answer.status, word in json.loads(answer.body)["error"]["message"]) == (status, True), answer.body


def test_odd_requests(node: Daemon) -> None:
    assert node.request("GET", "/-/jobs/%00?wait=1").status == 404
    assert node.request("GET", "/-/jobs?all=1").status == 400
    assert node.request("GET", "/-/jobs/x?wait=-1").status == 400
    assert node.request("DELETE", "/-/jobs/0123456789abcdef").status == 404
    assert node.request("PUT", "/-/jobs/x").status in (404, 405)


# --- the command and the SDK --------------------------------------------------------------------------------


@pytest.mark.usefixtures("shell")
def test_the_command(s3: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def output(*arguments: str, code: int = 0) -> str:
        assert run(list(arguments)) == code
        return capfd.readouterr().out

    told = json.loads(
        output(
            "shard", "s3://sources/open/", "s3://targets/cli/", "--count", "20", "--shuffle", "0", "--json"
        )
    )
    assert (told["state"], told["spec"]["shuffle"]) == ("done", 0)
    assert told["id"] in output("job", "ls")
    assert "outputs  4 of 4" in output("job", "show", told["id"])
    extracting = ["extract", "s3://targets/cli/", "s3://targets/cli-out/", "--match", ".txt"]
    begun = json.loads(output("job", "start", *extracting, "--detach", "--json"))
    assert json.loads(output("job", "watch", begun["id"], "--json"))["state"] == "done"
    assert len(objects(s3, "targets", "cli-out/")) == 61
    assert "61 unchanged" in output(*extracting)
    split = ["--split", "a=0.5", "--split", "b=0.5", "--sort", "-size", "--size", "4096", "--name", "part"]
    output("reshard", "s3://targets/cli/", "s3://targets/cli-re/", *split)
    assert {key.partition("/")[0] for key in objects(s3, "targets", "cli-re/")} == {"a", "b"}
    assert "no matching objects under" in output("shard", "s3://sources/none/", "s3://targets/none/", code=1)
    slow = json.loads(
        output("shard", "s3://sources/open/", "s3://targets/slow/", "--count", "1", "-d", "--json")
    )
    assert "cancelled" in output("job", "cancel", slow["id"])
    output("job", "show", "nothing", code=3)


def test_the_sdk(node: Daemon, s3: Any) -> None:
    with connect(node.endpoint, access_key=node.access_key, secret_key=node.secret_key) as client:
        document = sdk_jobs.shard_job("s3://sources/open", "s3://targets/sdk", count=30, where="size > 10")
        begun = sdk_jobs.start_job(client.transport, document)
        found = sdk_jobs.wait_for_job(client.transport, begun.id)
        assert (found.state, found.progress.samples, found.ended) == ("done", 49, True)
        assert found in sdk_jobs.list_jobs(client.transport)
        assert sdk_jobs.cancel_job(client.transport, begun.id) == found
    assert len(objects(s3, "targets", "sdk/")) == 2
