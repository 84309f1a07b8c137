"""MeshDataset: its loop against a real API server and a real daemon; killed at every call it makes."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Secret

from tests.kubernetes.data.operating import (
    PHOTO,
    backed,
    bucket_of,
    condition,
    keys,
    killed_at_every_call,
    view,
)
from tests.kubernetes.test_crds_served import BY_NAME, resource
from tests.kubernetes.test_webhook import dataset, mesh

if TYPE_CHECKING:
    from typing import Any

    from tests.kubernetes.data.operating import (
        Operator,
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
    heard = set[str]()

    def read_often() -> None:
        """The first few may come before the copy is in the cache."""
        for _ in range(10):
            client.get_object(Bucket=bucket_of(operator), Key="val/3.bin")["Body"].read()

    def read(found: dict[str, Any]) -> bool:
        heard.update(reason for reason, _ in operator.ear.heard)  # on a busy machine it is idle by now
        if (found.get("hitPercent") or 0) > 50:
            return True
        read_often()
        return False

    def gone(found: dict[str, Any]) -> bool:
        heard.update(reason for reason, _ in operator.ear.heard)
        return bool(found["cachedBytes"] == 0) and "Idle" in heard

    read_often()
    operator.until("MeshDataset", "photos", read)
    operator.until("MeshDataset", "photos", gone)
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
    assert "MeshCluster 'other' does not exist" in operator.ear.heard[-1][1]
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
        assert "root's keys does not exist yet" in condition(operator.status(kind, name), "Deleted")[2]
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

    assert base64.b64decode(data["cloudy"]) == b"aws_access_key_id=them\naws_secret_access_key=secret\n"
    message = condition(operator.status("MeshDataset", "cloudy"), "SourceReachable")[2]
    assert "waiting for daemons to receive the keys of source.secretRef" in message  # until they are mounted
    operator.delete("MeshDataset", "cloudy")
    operator.look("MeshDataset", "cloudy")
    assert not kube.get(Secret, "mesh-origins", namespace=namespace).data


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
