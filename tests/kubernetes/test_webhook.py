"""Training pods: the webhook asked by a real API server, placed by the real scheduler; their keys, made by a
real daemon and used with boto3 and the SDK."""

from __future__ import annotations

import base64
import json
import shutil
import ssl
import time
import urllib.request
import uuid
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.exceptions import ClientError
from lightkube import ApiError
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.admissionregistration_v1 import MutatingWebhookConfiguration
from lightkube.resources.core_v1 import Node, Pod, Secret, ServiceAccount

import meshsdk
from meshoperator.controllers.daemon_machines import DaemonMachines
from meshoperator.controllers.pod_credentials import DatasetCatalog, PodCredentials
from meshoperator.daemon_client import DaemonClient
from meshoperator.kube.client import Kube
from meshoperator.planners.dataset_model import dataset_mark
from meshoperator.planners.pod_admission import DONE, LABEL, LEVELS, REQUIRE, SECRET, label
from meshoperator.settings import OperatorSettings
from meshoperator.webhook import Webhook
from tests.kubernetes.looping import Loop, client
from tests.kubernetes.test_chart import documents
from tests.kubernetes.test_crds_served import create
from tests.support.certificates import Authority
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from lightkube import Client

GROUP_VERSION = "shardmesh.io/v1alpha1"
POOL = {
    "name": "s",
    "replicas": 1,
    "roles": ["store"],
    "tiers": [{"name": "d", "hostPath": "/d", "class": "nvme"}],
}


def until(true: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = true()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError("never")


def mesh(kube: Client, namespace: str, name: str = "mesh") -> None:
    spec = {"image": "i:1", "nodePools": [POOL]}
    create(
        kube,
        namespace,
        {"apiVersion": GROUP_VERSION, "kind": "MeshCluster", "metadata": {"name": name}, "spec": spec},
    )


def dataset(kube: Client, namespace: str, name: str, uri: str, **more: Any) -> None:
    spec = {"clusterRef": "mesh", "source": {"uri": uri}} | more
    document = {"apiVersion": GROUP_VERSION, "kind": "MeshDataset", "metadata": {"name": name}, "spec": spec}
    create(kube, namespace, document)


def node(name: str, labels: dict[str, str]) -> Any:
    return Node.from_dict(
        {
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}},
            "status": {
                "capacity": {"cpu": "8", "memory": "32Gi", "pods": "20"},
                "allocatable": {"cpu": "8", "memory": "32Gi", "pods": "20"},
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }
    )


def pod(name: str, pool: str, datasets: str, annotations: dict[str, str] | None = None) -> Any:
    return Pod.from_dict(
        {
            "metadata": {"name": name, "labels": {LABEL: datasets}, "annotations": annotations or {}},
            "spec": {
                "nodeSelector": {"pool": pool},
                "tolerations": [{"operator": "Exists"}],
                "containers": [{"name": "train", "image": "i:1", "env": [{"name": "MINE", "value": "1"}]}],
            },
        }
    )


@contextmanager
def serving(kubeconfig: Path, folder: Path) -> Iterator[tuple[Loop, Webhook, Kube]]:
    with Loop() as loop:
        api = loop.run(client(kubeconfig))
        kube = Kube(api)
        hook = Webhook(
            DatasetCatalog(kube, OperatorSettings()),
            DaemonMachines(kube, OperatorSettings()),
            folder,
            "127.0.0.1",
            0,
            look=0.1,
        )
        loop.run(hook.__aenter__())
        try:
            yield loop, hook, kube
        finally:
            loop.run(hook.__aexit__())
            loop.run(api.close())


@pytest.fixture
def certificate(tmp_path: Path) -> Authority:
    authority = Authority(tmp_path / "authority")
    folder = tmp_path / "tls"
    folder.mkdir()
    install(authority, folder)
    return authority


def install(authority: Authority, folder: Path, stem: str = "server") -> None:
    pair = authority.issue(stem)
    shutil.copy(pair.key, folder / "tls.key")
    shutil.copy(pair.cert, folder / "tls.crt")


@contextmanager
def registered(
    kube: Client, namespace: str, authority: Authority, port: int, which: str = "pods"
) -> Iterator[None]:
    bundle = base64.b64encode(authority.cert.read_bytes()).decode()
    name = f"test-{uuid.uuid4().hex[:8]}"
    (found,) = (each for each in documents("default") if each["kind"] == "MutatingWebhookConfiguration")
    (hook,) = (each for each in found["webhooks"] if each["name"] == f"{which}.shardmesh.io")
    document = found | {"metadata": {"name": name}, "webhooks": [dict(hook)]}
    # as the chart has it, but for its address (there is no network of Services here) and other tests' pods
    document["webhooks"][0] |= {
        "clientConfig": {"url": f"https://127.0.0.1:{port}/{which}", "caBundle": bundle},
        "namespaceSelector": {"matchLabels": {"mesh-test": namespace}},
    }
    from lightkube.resources.core_v1 import Namespace

    kube.patch(Namespace, namespace, {"metadata": {"labels": {"mesh-test": namespace}}})
    webhook: Any = MutatingWebhookConfiguration.from_dict(document)
    kube.create(webhook)
    try:
        yield
    finally:
        kube.delete(MutatingWebhookConfiguration, name)


def account(kube: Client, namespace: str) -> None:
    """Pods are refused before their account is there."""

    def there() -> bool:
        try:
            kube.get(ServiceAccount, "default", namespace=namespace)
        except ApiError:
            return False
        return True

    until(there)


def host_of(kube: Client, name: str, namespace: str) -> str:
    def found() -> str:
        spec = kube.get(Pod, name, namespace=namespace).spec
        return (spec.nodeName or "") if spec else ""

    return str(until(found))


@pytest.fixture
def hosts(kube: Client, namespace: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Six hosts of a pool of their own: `photos` lies on b, near c; `words` on b and d."""
    pool = uuid.uuid4().hex[:8]
    photos, words = dataset_mark(namespace, "photos"), dataset_mark(namespace, "words")
    levels = {level: (label(level, photos), label(level, words)) for level, _ in LEVELS}
    placed = {
        "a": {},
        "b": {levels["host"][0]: "", levels["rack"][0]: "", levels["host"][1]: "", levels["zone"][0]: ""},
        "c": {levels["rack"][0]: "", levels["zone"][0]: ""},
        "d": {levels["host"][1]: ""},
        "e": {levels["zone"][0]: ""},
    }
    names = {short: f"{pool}-{short}" for short in placed}
    for short, labels in placed.items():
        kube.create(node(names[short], {"pool": pool, **labels}))
        kube.patch(Node, names[short], {"spec": {"taints": None}})
    try:
        yield pool, names
    finally:
        for name in names.values():
            kube.delete(Node, name)


def test_the_scheduler_places_pods_by_it(
    kubeconfig: Path,
    kube: Client,
    namespace: str,
    hosts: tuple[str, dict[str, str]],
    certificate: Authority,
    tmp_path: Path,
) -> None:
    pool, names = hosts
    mesh(kube, namespace)
    dataset(kube, namespace, "photos", "s3://photos/train")
    dataset(kube, namespace, "words", "mesh://texts/words")
    account(kube, namespace)
    with (
        serving(kubeconfig, tmp_path / "tls") as (_, hook, _),
        registered(kube, namespace, certificate, hook.port),
    ):

        def admitted(name: str) -> bool:
            """The API server hears of a new webhook a moment later."""
            with suppress(ApiError):
                kube.delete(Pod, name, namespace=namespace, grace_period=0)
            made = kube.create(pod(name, "nowhere", "photos"), namespace=namespace)
            return DONE in (made.metadata.annotations or {}) if made.metadata else False

        until(lambda: admitted(f"probe-{uuid.uuid4().hex[:6]}"))
        for number in range(3):
            kube.create(pod(f"near-{number}", pool, "photos"), namespace=namespace)
            assert host_of(kube, f"near-{number}", namespace) == names["b"]
        kube.patch(Node, names["b"], {"spec": {"unschedulable": True}})
        kube.create(pod("rack", pool, "photos"), namespace=namespace)  # its host takes nobody: the same rack
        both = pod("both", pool, "photos.words", {REQUIRE: "true"})  # only where both are: nowhere now
        both.spec.tolerations = []
        kube.create(both, namespace=namespace)
        kube.patch(Node, names["b"], {"spec": {"unschedulable": None}})
        assert host_of(kube, "both", namespace) == names["b"]
        made = kube.get(Pod, "near-0", namespace=namespace)
        assert made.spec is not None
        environment = {each.name: each.value for each in made.spec.containers[0].env or ()}
        assert environment["MINE"] == "1"
        assert environment["MESH_ENDPOINT"] == f"http://mesh-s3.{namespace}.svc:9000"
        assert environment["MESH_DATASET_URIS"] == "s3://photos/"


def test_it_fails_open_reloads_its_certificate_and_is_probed(
    kubeconfig: Path, kube: Client, namespace: str, certificate: Authority, tmp_path: Path
) -> None:
    context = ssl.create_default_context(cafile=str(certificate.cert))

    def serial(port: int) -> str:
        return ssl.get_server_certificate(("127.0.0.1", port))

    with serving(kubeconfig, tmp_path / "tls") as (_, hook, _):
        with urllib.request.urlopen(f"https://localhost:{hook.port}/healthz", context=context) as answer:
            assert answer.status == 200
        before = serial(hook.port)
        install(certificate, tmp_path / "tls", "second")
        until(lambda: serial(hook.port) != before)
        port = hook.port

        def review(request: dict[str, Any]) -> dict[str, Any]:
            body = json.dumps({"request": request}).encode()
            asked = urllib.request.Request(
                f"https://localhost:{port}/pods", body, {"content-type": "application/json"}
            )
            with urllib.request.urlopen(asked, context=context) as answer:
                found: dict[str, Any] = json.loads(answer.read())["response"]
                return found

        strange = review({"uid": "u", "namespace": namespace, "object": {"metadata": {"labels": 3}}})
        assert strange["allowed"] is True
        assert "is left unchanged" in strange["warnings"][0]
    account(kube, namespace)
    with registered(kube, namespace, certificate, port):  # nobody is there any more
        made = kube.create(pod("alone", "nowhere", "photos"), namespace=namespace)
        assert made.metadata is not None
        assert DONE not in (made.metadata.annotations or {})


def test_a_pod_has_keys_for_its_dataset_alone(
    kubeconfig: Path, kube: Client, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh(kube, namespace)
    dataset(kube, namespace, "words", "mesh://texts/words")
    account(kube, namespace)
    made = pod("train", "nowhere", "words", {SECRET: "shardmesh-abc"})
    uid = kube.create(made, namespace=namespace).metadata.uid
    now = [time.time()]
    with Daemon.start() as daemon, Loop() as loop:
        s3 = daemon.client()
        s3.create_bucket(Bucket="texts")
        s3.put_object(Bucket="texts", Key="words/1", Body=b"one")
        s3.put_object(Bucket="texts", Key="secrets/1", Body=b"no")
        root = {"AWS_ACCESS_KEY_ID": daemon.access_key, "AWS_SECRET_ACCESS_KEY": daemon.secret_key}
        kube.create(Secret(metadata=ObjectMeta(name="mesh-root", namespace=namespace), stringData=root))
        api = loop.run(client(kubeconfig))
        own = Kube(api)
        daemons = DaemonClient(own, time.time, lambda _: daemon.endpoint)
        keys = PodCredentials(own, daemons, DatasetCatalog(own, OperatorSettings()), lambda: now[0])
        try:
            assert loop.run(keys.renew_all(namespace)) == 0
            first = kube.get(Secret, "shardmesh-abc", namespace=namespace)
            assert first.metadata is not None
            owners = first.metadata.ownerReferences or []
            assert [(owner.kind, owner.uid) for owner in owners] == [("Pod", uid)]
            assert loop.run(keys.renew_all(namespace)) == 0  # nothing to do
            again = kube.get(Secret, "shardmesh-abc", namespace=namespace)
            assert again.data == first.data
            now[0] += 7 * 3600
            assert loop.run(keys.renew_all(namespace)) == 0
            renewed = kube.get(Secret, "shardmesh-abc", namespace=namespace)
            assert renewed.data != first.data
        finally:
            loop.run(daemons.aclose())
            loop.run(api.close())
        folder = tmp_path / "pod"
        folder.mkdir()
        for name, value in (renewed.data or {}).items():
            text = base64.b64decode(value).decode().replace("/var/run/shardmesh", str(folder))
            (folder / name).write_text(text)
        monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
        monkeypatch.setenv("MESH_CREDENTIALS_FILE", str(folder / "credentials.json"))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        theirs = boto3.session.Session().client("s3", endpoint_url=daemon.endpoint)
        assert theirs.get_object(Bucket="texts", Key="words/1")["Body"].read() == b"one"
        assert theirs.list_objects_v2(Bucket="texts", Prefix="words/")["KeyCount"] == 1
        calls: list[Callable[[], Any]] = [
            lambda: theirs.get_object(Bucket="texts", Key="secrets/1"),
            lambda: theirs.list_objects_v2(Bucket="texts"),
            lambda: theirs.put_object(Bucket="texts", Key="words/2", Body=b""),
            lambda: theirs.create_bucket(Bucket="mine"),
        ]
        for refused in calls:
            with pytest.raises(ClientError, match="AccessDenied"):
                refused()
        with meshsdk.connect(daemon.endpoint) as mine:
            assert mine.settings.access_key.startswith("MSTS")


def test_a_secret_of_somebody_else_is_not_touched(kubeconfig: Path, kube: Client, namespace: str) -> None:
    mesh(kube, namespace)
    dataset(kube, namespace, "words", "mesh://texts")
    account(kube, namespace)
    kube.create(Secret(metadata=ObjectMeta(name="database", namespace=namespace), stringData={"a": "b"}))
    kube.create(pod("thief", "nowhere", "words", {SECRET: "database"}), namespace=namespace)
    with Loop() as loop:
        api = loop.run(client(kubeconfig))
        own = Kube(api)
        daemons = DaemonClient(own, time.time)
        try:
            keys = PodCredentials(own, daemons, DatasetCatalog(own, OperatorSettings()), time.time)
            assert loop.run(keys.renew_all(namespace)) == 0
        finally:
            loop.run(daemons.aclose())
            loop.run(api.close())
    data = kube.get(Secret, "database", namespace=namespace).data
    assert data == {"a": base64.b64encode(b"b").decode()}
