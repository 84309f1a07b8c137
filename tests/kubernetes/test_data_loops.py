"""MeshDataset, MeshLoad, MeshView: their loops against a real API server and a real daemon; killed at every
call they make."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import pytest
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ConfigMap, Secret
from lightkube.types import PatchType

from meshd.testing.daemons import Daemon
from meshoperator.daemons import Daemons
from meshoperator.datasets import DatasetLoop
from meshoperator.kube import Kube
from meshoperator.loads import LoadLoop
from meshoperator.placing import Board
from meshoperator.resources import KINDS, parse
from meshoperator.views import ViewLoop
from tests.kubernetes.dying import Calls, DiedError, Dying, Ear
from tests.kubernetes.looping import Loop, client
from tests.kubernetes.test_crds_served import BY_NAME, create, resource
from tests.kubernetes.test_webhook import GROUP_VERSION, dataset, mesh, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from lightkube import Client

STATUSES = {kind.name: kind.status for kind in KINDS}
PHOTO = 100 << 10


@dataclass
class Operator:
    """The loops of one process, over one daemon."""

    kube: Client
    loop: Loop
    daemon: Daemon
    namespace: str
    own: Kube
    daemons: Daemons
    source: Path
    now: Callable[[], float] = time.time

    def loops(self, calls: Calls | None = None) -> dict[str, Any]:
        """As after a start: nothing is remembered."""
        own: Any = Dying(self.own, calls) if calls else self.own
        daemons: Any = Dying(self.daemons, calls) if calls else self.daemons
        self.ear = Ear()
        return {
            "MeshDataset": DatasetLoop(own, daemons, self.ear, self.now, Board()),
            "MeshLoad": LoadLoop(own, daemons, self.ear, self.now),
            "MeshView": ViewLoop(own, daemons, self.ear, self.now),
        }

    def look(self, kind: str, name: str, calls: Calls | None = None) -> float | None:
        """One pass."""
        found: float | None = self.loop.run(self.loops(calls)[kind].run(self.namespace, name))
        return found

    def status(self, kind: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = (
            self.kube.get(resource(BY_NAME[kind]), name, namespace=self.namespace).status or {}
        )
        parse(STATUSES[kind], found)  # what is written is what the kind says
        return found

    def until(self, kind: str, name: str, true: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """Passes until the status is so."""
        for _ in range(300):
            self.look(kind, name)
            found = self.status(kind, name)
            if true(found):
                return found
            time.sleep(0.1)
        raise AssertionError(found)

    def make(self, kind: str, name: str, spec: dict[str, Any]) -> None:
        document = {"apiVersion": GROUP_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
        create(self.kube, self.namespace, document)

    def change(self, kind: str, name: str, change: dict[str, Any]) -> None:
        self.kube.patch(
            resource(BY_NAME[kind]),
            name,
            change,
            namespace=self.namespace,
            patch_type=PatchType.MERGE,
        )

    def delete(self, kind: str, name: str) -> None:
        self.kube.delete(resource(BY_NAME[kind]), name, namespace=self.namespace)

    def gone(self, kind: str, name: str) -> bool:
        every = self.kube.list(resource(BY_NAME[kind]), namespace=self.namespace)
        return name not in {each.metadata.name for each in every if each.metadata}

    def ask(self, method: str, target: str) -> Any:
        answer = self.daemon.request(method, target)
        return json.loads(answer.body) if answer.status == 200 and answer.body else answer.status


def condition(status: dict[str, Any], kind: str) -> tuple[str, str, str]:
    found = next(each for each in status["conditions"] if each["type"] == kind)
    return found["status"], found["reason"], found["message"]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    credentials = tmp_path_factory.mktemp("origins")
    with Daemon.start(args=["--origin-credentials", str(credentials)]) as found:
        yield found


@pytest.fixture
def operator(
    kubeconfig: Path, kube: Client, namespace: str, daemon: Daemon, tmp_path: Path
) -> Iterator[Operator]:
    mesh(kube, namespace)
    keys(kube, namespace, daemon)
    source = tmp_path / "source"
    for part in ("train", "val"):
        (source / part).mkdir(parents=True)
        for number in range(4):
            (source / part / f"{number}.bin").write_bytes(bytes([number]) * PHOTO)
    with Loop() as loop:
        api = loop.run(client(kubeconfig))
        own = Kube(api)
        daemons = Daemons(own, time.time, lambda _: daemon.endpoint)
        try:
            yield Operator(kube, loop, daemon, namespace, own, daemons, source)
        finally:
            loop.run(daemons.aclose())
            loop.run(api.close())


def keys(kube: Client, namespace: str, daemon: Daemon) -> None:
    """Root's, as the operator makes them."""
    root = {"AWS_ACCESS_KEY_ID": daemon.access_key, "AWS_SECRET_ACCESS_KEY": daemon.secret_key}
    kube.create(Secret(metadata=ObjectMeta(name="mesh-root", namespace=namespace), stringData=root))


def bucket_of(operator: Operator) -> str:
    """Of this test: the daemon is shared."""
    return f"b-{operator.namespace[-12:]}"


def backed(operator: Operator, **more: Any) -> None:
    dataset(
        operator.kube,
        operator.namespace,
        "photos",
        f"file://{operator.source}",
        bucket=bucket_of(operator),
        **more,
    )


def test_a_dataset_is_a_bucket_warms_is_compared_and_goes(operator: Operator) -> None:
    backed(operator, placement={"pin": True}, source={"uri": f"file://{operator.source}", "revision": "1"})
    status = operator.until(
        "MeshDataset", "photos", lambda found: found.get("phase") == "Ready" and found.get("sourceBytes")
    )
    assert (status["sourceBytes"], status["cachedBytes"], status["objects"]) == (8 * PHOTO, 8 * PHOTO, 8)
    assert condition(status, "Warm")[:2] == ("True", "Cached")
    assert condition(status, "SourceReachable")[0] == condition(status, "Healthy")[0] == "True"
    assert status["nodeLabel"].startswith("host.shardmesh.io/photos.")
    (spot,) = status["placement"]
    assert spot["bytes"] == 8 * PHOTO
    read = operator.daemon.client().get_object(Bucket=bucket_of(operator), Key="val/3.bin")["Body"].read()
    assert read == b"\3" * PHOTO
    (operator.source / "val" / "3.bin").write_bytes(b"new")
    spec = {"spec": {"source": {"revision": "2"}}}
    operator.change("MeshDataset", "photos", spec)
    operator.until("MeshDataset", "photos", lambda found: found.get("sourceBytes") == 7 * PHOTO + 3)
    operator.look("MeshDataset", "photos")
    origin = operator.ask("GET", f"/-/buckets/{bucket_of(operator)}")["origin"]
    assert origin["ttl"] == 300  # and no longer asked about at every read
    operator.delete("MeshDataset", "photos")
    assert not operator.gone("MeshDataset", "photos")
    operator.look("MeshDataset", "photos")
    assert operator.gone("MeshDataset", "photos")
    assert operator.ask("GET", f"/-/buckets/{bucket_of(operator)}") == 404


def test_what_nobody_reads_goes_by_itself(operator: Operator) -> None:
    backed(operator, retention={"idleSeconds": 2})
    operator.look("MeshDataset", "photos")
    client = operator.daemon.client()
    for _ in range(4):
        client.get_object(Bucket=bucket_of(operator), Key="val/3.bin")["Body"].read()
    operator.until("MeshDataset", "photos", lambda found: (found.get("hitPercent") or 0) > 50)
    heard = []

    def gone(found: dict[str, Any]) -> bool:
        heard.extend(operator.ear.heard)
        return bool(found["cachedBytes"] == 0)

    operator.until("MeshDataset", "photos", gone)
    assert "Idle" in {reason for reason, _ in heard}
    assert client.get_object(Bucket=bucket_of(operator), Key="val/3.bin")["Body"].read() == b"\3" * PHOTO


def test_what_is_wrong_with_a_source_is_told(operator: Operator) -> None:
    dataset(
        operator.kube, operator.namespace, "none", "file:///nowhere/at/all", bucket=f"{bucket_of(operator)}-n"
    )
    operator.look("MeshDataset", "none")
    status = operator.status("MeshDataset", "none")
    assert (status["phase"], condition(status, "SourceReachable")[0]) == ("Failed", "False")
    dataset(operator.kube, operator.namespace, "absent", "mesh://no-such-bucket/")
    operator.look("MeshDataset", "absent")
    assert "no bucket 'no-such-bucket'" in condition(operator.status("MeshDataset", "absent"), "Healthy")[2]
    spec = {"clusterRef": "other", "source": {"uri": "file:///a"}}
    operator.make("MeshDataset", "orphan", spec)
    operator.look("MeshDataset", "orphan")
    status = operator.status("MeshDataset", "orphan")
    assert (status["phase"], condition(status, "SourceReachable")[:2]) == ("Pending", ("Unknown", "NoMesh"))
    operator.delete("MeshDataset", "orphan")
    operator.look("MeshDataset", "orphan")
    assert operator.ear.heard[-1][0] == "Deleted"
    assert "there is no MeshCluster 'other'" in operator.ear.heard[-1][1]
    assert operator.gone("MeshDataset", "orphan")


def test_what_is_deleted_waits_for_daemons_that_do_not_answer_and_for_no_mesh_that_is_gone(
    operator: Operator,
) -> None:
    kube, namespace, bucket = operator.kube, operator.namespace, bucket_of(operator)
    kube.create(Secret(metadata=ObjectMeta(name="cloud", namespace=namespace), stringData={"region": "x"}))
    source = {"uri": "s3://somewhere/train", "secretRef": {"name": "cloud"}}
    operator.make("MeshDataset", "cloudy", {"clusterRef": "mesh", "source": source})
    operator.look("MeshDataset", "cloudy")
    backed(operator)
    operator.until("MeshDataset", "photos", lambda status: status.get("bucket"))
    operator.make("MeshLoad", "all", {"datasetRef": "photos"})
    operator.make("MeshView", "small", view(bucket, 8))
    operator.until("MeshView", "small", lambda status: status.get("ready"))
    operator.until("MeshLoad", "all", lambda status: status.get("phase") == "Running")
    datasets = (("MeshDataset", "photos"), ("MeshDataset", "cloudy"))
    every = (("MeshLoad", "all"), ("MeshView", "small"), *datasets)
    kube.delete(Secret, "mesh-root", namespace=namespace)
    for kind, name in every:
        operator.delete(kind, name)
        assert operator.look(kind, name) == 5.0
        assert "root's keys is not there yet" in condition(operator.status(kind, name), "Deleted")[2]
    assert not kube.get(Secret, "mesh-origins", namespace=namespace).data
    kube.delete(resource(BY_NAME["MeshCluster"]), "mesh", namespace=namespace)
    for kind, name in every:
        operator.look(kind, name)
        assert operator.gone(kind, name)
    # what the store kept of it is found again, and goes with a dataset that has it
    mesh(kube, namespace)
    keys(kube, namespace, operator.daemon)
    backed(operator)
    operator.until("MeshDataset", "photos", lambda status: status.get("bucket"))
    operator.delete("MeshDataset", "photos")
    operator.look("MeshDataset", "photos")
    assert operator.ask("GET", f"/-/buckets/{bucket}") == 404


def test_keys_of_a_source_are_handed_to_the_daemons(operator: Operator) -> None:
    kube, namespace = operator.kube, operator.namespace
    keys = {"AWS_ACCESS_KEY_ID": "them", "aws_secret_access_key": "secret"}
    kube.create(Secret(metadata=ObjectMeta(name="cloud", namespace=namespace), stringData=keys))
    source = {"uri": "s3://somewhere/train", "secretRef": {"name": "cloud"}}
    operator.make("MeshDataset", "cloudy", {"clusterRef": "mesh", "source": source})
    operator.look("MeshDataset", "cloudy")
    data = kube.get(Secret, "mesh-origins", namespace=namespace).data or {}
    import base64

    assert base64.b64decode(data["cloudy"]) == b"aws_access_key_id=them\naws_secret_access_key=secret\n"
    message = condition(operator.status("MeshDataset", "cloudy"), "SourceReachable")[2]
    assert "there are no credentials 'cloudy'" in message  # until they are mounted
    operator.delete("MeshDataset", "cloudy")
    operator.look("MeshDataset", "cloudy")
    assert not kube.get(Secret, "mesh-origins", namespace=namespace).data


def test_loads_run_in_order_pause_evict_and_go_by_themselves(operator: Operator) -> None:
    backed(operator)
    operator.look("MeshDataset", "photos")
    operator.make(
        "MeshLoad",
        "second",
        {"datasetRef": "photos", "paths": ["val/"], "runAfter": ["first"], "suspend": True},
    )
    operator.make("MeshLoad", "first", {"datasetRef": "photos", "paths": ["train/"]})
    operator.look("MeshLoad", "second")
    assert operator.status("MeshLoad", "second")["phase"] == "Suspended"
    operator.change("MeshLoad", "second", {"spec": {"suspend": False}})
    operator.look("MeshLoad", "second")
    assert condition(operator.status("MeshLoad", "second"), "Complete")[2] == "runAfter: 'first' is not there"
    first = operator.until("MeshLoad", "first", lambda found: found["phase"] == "Succeeded")
    assert (first["objectsDone"], first["bytesDone"], first["bytesTotal"]) == (4, 4 * PHOTO, 4 * PHOTO)
    operator.until("MeshLoad", "second", lambda found: found["phase"] == "Succeeded")
    operator.look("MeshDataset", "photos")
    assert operator.status("MeshDataset", "photos")["cachedBytes"] == 8 * PHOTO
    operator.make(
        "MeshLoad",
        "away",
        {"datasetRef": "photos", "action": "Evict", "paths": ["train/"], "ttlSecondsAfterFinished": 60},
    )
    away = operator.until("MeshLoad", "away", lambda found: found["phase"] == "Succeeded")
    assert (away["objectsDone"], away["bytesDone"]) == (4, 4 * PHOTO)
    operator.look("MeshDataset", "photos")
    assert operator.status("MeshDataset", "photos")["cachedBytes"] == 4 * PHOTO
    operator.look("MeshLoad", "away")
    assert not operator.gone("MeshLoad", "away")
    operator.now = lambda: time.time() + 61
    operator.look("MeshLoad", "away")
    operator.look("MeshLoad", "away")
    assert operator.gone("MeshLoad", "away")


def test_loads_by_schedule_and_what_cannot_be_loaded(operator: Operator) -> None:
    backed(operator)
    operator.look("MeshDataset", "photos")
    operator.make("MeshLoad", "nightly", {"datasetRef": "photos", "policy": "Cron", "schedule": "30 2 * * *"})
    operator.look("MeshLoad", "nightly")
    status = operator.status("MeshLoad", "nightly")
    assert (status["phase"], status["nextRunAt"][11:]) == ("Waiting", "02:30:00Z")
    operator.now = lambda: time.time() + 86400
    done = operator.until("MeshLoad", "nightly", lambda found: found["phase"] == "Succeeded")
    assert done["jobId"].endswith("/1")
    assert done["nextRunAt"] > status["nextRunAt"]
    operator.now = lambda: time.time() + 2 * 86400
    operator.until(
        "MeshLoad", "nightly", lambda found: found["phase"] == "Succeeded" and found["jobId"].endswith("/2")
    )
    operator.now = time.time
    operator.make("MeshLoad", "wrong", {"datasetRef": "photos", "policy": "Cron", "schedule": "99 2 * * *"})
    operator.look("MeshLoad", "wrong")
    assert (
        "minute: '99' is not from 0 to 59" in condition(operator.status("MeshLoad", "wrong"), "Complete")[2]
    )
    s3 = operator.daemon.client()
    lists = f"{bucket_of(operator)}-lists"
    s3.create_bucket(Bucket=lists)
    (operator.source / "wanted.txt").write_text("train/0.bin\ntrain/none.bin\n")
    operator.make("MeshLoad", "some", {"datasetRef": "photos", "manifest": "wanted.txt"})
    failed = operator.until("MeshLoad", "some", lambda found: found["phase"] == "Failed")
    assert failed["failed"][0]["path"].endswith("train/none.bin")
    assert condition(failed, "Complete")[1] == "SomeFailed"


def test_a_view_is_made_replaced_and_removed(operator: Operator) -> None:
    name = bucket_of(operator)
    operator.make("MeshView", "small", view(name, 64))
    operator.look("MeshView", "small")
    status = operator.status("MeshView", "small")
    assert condition(status, "Ready")[:2] == ("False", "NoSuchBucket")
    operator.daemon.client().create_bucket(Bucket=name)
    operator.look("MeshView", "small")
    status = operator.status("MeshView", "small")
    assert (status["ready"], status["address"]) == (True, f"{name}--small")
    assert {each["op"] for each in status["opBuilds"]} == {"decode", "resize", "encode"}
    image = cv2.imencode(".png", np.zeros((80, 80, 3), np.uint8))[1].tobytes()
    operator.daemon.client().put_object(Bucket=name, Key="a.png", Body=image)
    for _ in range(4):
        operator.daemon.client().get_object(Bucket=f"{name}--small", Key="a.png")["Body"].read()
    operator.daemons._metrics.clear()  # told again for half a minute
    operator.until("MeshView", "small", lambda found: found["hitPercent"] == 75)
    operator.change("MeshView", "small", {"spec": view(name, 32)})
    operator.look("MeshView", "small")
    assert operator.ear.heard[-1][0] == "ViewReplaced"
    made = operator.ask("GET", f"/-/views/{name}--small")["view"]
    assert made["ops"][1]["args"]["size"] == 32
    operator.make("MeshView", "other", view(name, 48) | {"name": "small"})
    operator.look("MeshView", "other")  # not this one's
    assert condition(operator.status("MeshView", "other"), "Ready")[:2] == ("False", "ViewExists")
    for each in ("other", "small"):
        operator.delete("MeshView", each)
        operator.look("MeshView", each)
        assert operator.gone("MeshView", each)
    assert operator.ask("GET", f"/-/views/{name}--small") == 404


def test_the_module_of_a_view_is_pushed(operator: Operator) -> None:
    name = bucket_of(operator)
    operator.daemon.client().create_bucket(Bucket=name)
    source = "import shardmesh_op\n"
    spec = view(name, 64) | {"module": {"configMapRef": {"name": "ops"}, "name": "mine"}}
    operator.make("MeshView", "own", spec)
    operator.look("MeshView", "own")
    assert "ConfigMap 'ops' is not there" in condition(operator.status("MeshView", "own"), "Ready")[2]
    metadata = ObjectMeta(name="ops", namespace=operator.namespace)
    operator.kube.create(ConfigMap(metadata=metadata, data={"mine.py": source}))
    operator.look("MeshView", "own")
    assert condition(operator.status("MeshView", "own"), "Ready")[0] == "False"  # no module of ops
    assert "shardmesh_op" in condition(operator.status("MeshView", "own"), "Ready")[2]


def view(bucket: str, size: int) -> dict[str, Any]:
    ops = [
        {"op": "decode"},
        {"op": "resize", "args": {"size": size}},
        {"op": "encode", "args": {"format": "png"}},
    ]
    return {"clusterRef": "mesh", "bucket": bucket, "kind": "transform", "ops": ops}


def killed_at_every_call(
    operator: Operator,
    kind: str,
    make: Callable[[str], None],
    done: Callable[[dict[str, Any]], Any],
    calls: int,
) -> None:
    """Objects side by side: of the nth the operator dies at its nth call; then one that lives goes on."""
    names = {f"k{at}": Calls(at) for at in range(1, calls + 1)}

    def look(name: str) -> bool:
        """Whether it lives."""
        try:
            operator.look(kind, name, names[name])
        except DiedError:
            return False
        return not done(operator.status(kind, name))

    for name in names:
        make(name)
        for _ in range(3):
            if not look(name):
                break
    for name in names:
        operator.until(kind, name, done)
    for name, count in names.items():
        operator.delete(kind, name)
        with suppress(DiedError):
            operator.look(kind, name, count)
        until(lambda name=name: operator.look(kind, name) is None)  # type: ignore[misc]
        assert operator.gone(kind, name)
    assert list(names.values())[-1].made < calls, "there are more calls than were tried"


def test_datasets_converge_wherever_the_operator_dies(operator: Operator) -> None:
    def make(name: str) -> None:
        dataset(
            operator.kube,
            operator.namespace,
            name,
            f"file://{operator.source}",
            bucket=f"{bucket_of(operator)}-{name}",
        )

    killed_at_every_call(operator, "MeshDataset", make, lambda found: found.get("bucket"), 30)
    assert [
        each for each in operator.ask("GET", "/-/buckets")["buckets"] if bucket_of(operator) in each["name"]
    ] == []


def test_views_converge_wherever_the_operator_dies(operator: Operator) -> None:
    bucket = bucket_of(operator)
    operator.daemon.client().create_bucket(Bucket=bucket)

    def make(name: str) -> None:
        operator.make("MeshView", name, view(bucket, 64))

    killed_at_every_call(operator, "MeshView", make, lambda found: found.get("ready"), 24)
    assert operator.ask("GET", f"/-/views?bucket={bucket}")["views"] == []


def test_loads_converge_wherever_the_operator_dies(operator: Operator) -> None:
    backed(operator)
    operator.look("MeshDataset", "photos")

    def make(name: str) -> None:
        operator.make("MeshLoad", name, {"datasetRef": "photos", "paths": [f"train/{name[-1]}"]})

    killed_at_every_call(operator, "MeshLoad", make, lambda found: found.get("phase") == "Succeeded", 29)
