"""Hostile pods and connections against the webhook, as it serves a real API server: what is no pod is left as
it is, within bounds, and honest pods are answered meanwhile."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import os
import socket
import ssl
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from meshoperator.controllers.daemon_machines import DaemonMachines
from meshoperator.controllers.pod_credentials import DatasetCatalog
from meshoperator.kube.client import Kube
from meshoperator.planners.pod_admission import ANNOTATION, DONE, INJECT, LABEL, REQUIRE
from meshoperator.settings import OperatorSettings
from meshoperator.webhook import Webhook
from tests.kubernetes.looping import Loop, client
from tests.kubernetes.test_webhook import certificate, dataset, mesh

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lightkube import Client

    from tests.support.certificates import Authority

__all__ = ["certificate"]
IDLE = 2.0
MANY = 700_000
AFFINITY = "requiredDuringSchedulingIgnoredDuringExecution"


class Hook:
    """A webhook that serves, and a client of it."""

    def __init__(self, port: int, authority: Authority) -> None:
        self.port = port
        self.context = ssl.create_default_context(cafile=str(authority.cert))

    def post(self, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPSConnection("localhost", self.port, timeout=60, context=self.context)
        with closing(connection):
            connection.request("POST", "/pods", body, headers or {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def review(self, namespace: str, pod: Any, **more: Any) -> dict[str, Any]:
        request = {"uid": "u-1", "namespace": namespace, "object": pod} | more
        status, body = self.post(json.dumps({"request": request}).encode())
        assert status == 200, body
        response = json.loads(body)["response"]
        assert (response["uid"], response["allowed"]) == ("u-1", True)
        return dict(response)

    def connect(self) -> ssl.SSLSocket:
        raw = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        return self.context.wrap_socket(raw, server_hostname="localhost")


@contextmanager
def served(kubeconfig: Path, folder: Path, authority: Authority) -> Iterator[Hook]:
    with Loop() as loop:
        api = loop.run(client(kubeconfig))
        asked = Kube(api)
        catalogue, machines = (
            DatasetCatalog(asked, OperatorSettings()),
            DaemonMachines(asked, OperatorSettings()),
        )
        hook = Webhook(catalogue, machines, folder, "127.0.0.1", 0, idle=IDLE)
        loop.run(hook.__aenter__())
        try:
            yield Hook(hook.port, authority)
        finally:
            loop.run(hook.__aexit__())
            loop.run(api.close())


@pytest.fixture
def hook(
    kubeconfig: Path, kube: Client, namespace: str, certificate: Authority, tmp_path: Path
) -> Iterator[Hook]:
    mesh(kube, namespace)
    dataset(kube, namespace, "photos", "s3://photos/train")
    with served(kubeconfig, tmp_path / "tls", certificate) as found:
        yield found


def pod(annotations: Any = None, **spec: Any) -> dict[str, Any]:
    metadata = {"labels": {LABEL: "photos"}, "annotations": annotations or {}}
    return {"metadata": metadata, "spec": {"containers": [{"name": "train"}]} | spec}


def patch_of(response: dict[str, Any]) -> list[dict[str, Any]]:
    return list(json.loads(base64.b64decode(response["patch"]))) if "patch" in response else []


ODD: dict[str, Any] = {
    "nothing": None,
    "a-number": 5,
    "a-list": [],
    "metadata-text": {"metadata": "x"},
    "labels-list": {"metadata": {"labels": [LABEL]}},
    "label-number": {"metadata": {"labels": {LABEL: 5}}},
    "annotation-object": {"metadata": {"labels": {LABEL: ""}, "annotations": {ANNOTATION: {"a": "b"}}}},
    "require-list": pod({REQUIRE: ["true"], INJECT: 1}),
    "spec-text": {**pod(), "spec": "x"},
    "containers-object": pod(containers={"0": {}}),
    "containers-numbers": pod(containers=[1, None, "x"]),
    "containers-deep": pod(containers=[[[[]]]]),
    "env-object": pod(containers=[{"env": {"name": "A"}}]),
    "env-names": pod(containers=[{"env": [{"name": {}}]}]),
    "mounts-numbers": pod(containers=[{"volumeMounts": [{"mountPath": 5}]}]),
    "mounts-text": pod(containers=[{"volumeMounts": "x"}]),
    "volumes-text": pod(volumes=["x"]),
    "volumes-names": pod(volumes=[{"name": []}]),
    "affinity-list": pod(affinity=[]),
    "affinity-number": pod(affinity=7),
    "affinity-node": pod(affinity={"nodeAffinity": "x"}),
    "affinity-required": pod({REQUIRE: "true"}, affinity={"nodeAffinity": {AFFINITY: []}}),
    "affinity-terms": pod(
        {REQUIRE: "true"}, affinity={"nodeAffinity": {AFFINITY: {"nodeSelectorTerms": {"a": 1}}}}
    ),
    "affinity-expressions": pod(
        {REQUIRE: "true"},
        affinity={"nodeAffinity": {AFFINITY: {"nodeSelectorTerms": [{"matchExpressions": "x"}]}}},
    ),
    "many-containers": pod(containers=[{}] * MANY),
    "many-variables": pod(containers=[{"env": [{}] * MANY}]),
    "many-volumes": pod(volumes=[{}] * MANY),
    "many-terms": pod(
        {REQUIRE: "true"}, affinity={"nodeAffinity": {AFFINITY: {"nodeSelectorTerms": [{}] * MANY}}}
    ),
    "many-datasets": {"metadata": {"labels": {LABEL: ".".join(map(str, range(MANY // 2)))}}},
}


def test_pods_of_every_odd_shape_go_as_they_are(
    hook: Hook, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    process = psutil.Process()
    before, peak = process.memory_info().rss, 0
    for name, odd in ODD.items():
        cpu = sum(os.times()[:2])
        response = hook.review(namespace, odd)
        peak = max(peak, process.memory_info().rss)
        spent = sum(os.times()[:2]) - cpu
        print(f"{name}: {spent:.2f} s CPU, {(peak - before) >> 20} MiB, {response.get('warnings')}")
        assert not patch_of(response), name
        (warning,) = response["warnings"]
        assert "the pod is left unchanged: " in warning, name
        assert len(warning) <= 250
        assert spent < 10, name
    assert peak - before < 500 << 20
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.exc_info]
    assert patch_of(hook.review(namespace, pod()))  # an honest one is still served


def test_large_and_strange_but_sound_pods_are_patched(hook: Hook, namespace: str) -> None:
    sound = pod({"note": "\U0001f4a5‮ü" * 30_000})
    operations = patch_of(hook.review(namespace, sound, dryRun=True))
    assert operations[0]["value"]["note"] == sound["metadata"]["annotations"]["note"]
    assert DONE in operations[0]["value"]
    half = pod(containers=[{"name": "a", "env": None, "volumeMounts": None, "envFrom": None}], volumes=None)
    half["spec"]["affinity"] = {"nodeAffinity": None, "podAffinity": {"x": 1}}
    paths = [operation["path"] for operation in patch_of(hook.review(namespace, half))]
    assert paths[:3] == ["/metadata/annotations", "/spec/affinity", "/spec/volumes"]
    missing = pod()
    missing["metadata"]["labels"][LABEL] = "../../secrets.\ud800.photos"
    response = hook.review(namespace, missing)
    assert patch_of(response)
    assert len(response["warnings"]) == 5 - 2  # the texts between the dots that are no datasets' names


BODIES: dict[str, bytes] = {
    "empty": b"",
    "text": b"hello",
    "null": b"null",
    "list": b"[]",
    "no-request": b"{}",
    "request-text": b'{"request": "uid"}',
    "no-uid": b'{"request": {}}',
    "uid-number": b'{"request": {"uid": 5}}',
    "uid-lines": b'{"request": {"uid": "a\\r\\nb"}}',
    "uid-surrogate": b'{"request": {"uid": "\\ud800"}}',
    "uid-long": b'{"request": {"uid": "%s"}}' % (b"u" * 100_000),
    "deep": b"[" * 1_000_000,
    "deep-objects": b'{"a":' * 400_000,
    "digits": b'{"request": {"uid": %s}}' % (b"9" * 1_000_000),
    "utf-7": "{}".encode("utf-16"),
    "not-utf-8": b'{"request": {"uid": "\xff"}}',
    "zeros-in-gzip": gzip.compress(bytes(64 << 20)),
}


@pytest.mark.parametrize("charset", ["", "; charset=none-such"])
def test_what_is_no_review_is_a_bad_request(
    hook: Hook, charset: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name, body in BODIES.items():
        headers = {"content-type": f"application/json{charset}"}
        headers |= {"content-encoding": "gzip"} if "gzip" in name else {}
        assert hook.post(body, headers)[0] == 400, name
    assert hook.post(b" " * (5 << 20))[0] == 413
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.exc_info]


def test_connections_that_say_nothing_end_and_honest_ones_are_served(hook: Hook, namespace: str) -> None:
    """Without a TLS handshake, with half of one, with half a head, with half a body, after an answer."""
    plain = [socket.create_connection(("127.0.0.1", hook.port), timeout=60) for _ in range(20)]
    plain[0].sendall(b"\x16\x03\x01")
    slow = [hook.connect() for _ in range(20)]
    for each in slow[5:]:
        each.sendall(b"POST /pods HTTP/1.1\r\nhost: x\r\n")
    for each in slow[10:]:
        each.sendall(b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{")
    assert patch_of(hook.review(namespace, pod()))
    try:
        for waiting in (*plain, *slow):
            _ends(waiting)
    finally:
        for waiting in (*plain, *slow):
            waiting.close()
    assert patch_of(hook.review(namespace, pod()))


def _ends(connection: socket.socket) -> None:
    """Raises TimeoutError where the other end never ends it."""
    deadline = time.monotonic() + 30 * IDLE
    connection.settimeout(30 * IDLE)
    while time.monotonic() < deadline:
        try:
            if not connection.recv(1 << 16):
                return
        except ConnectionError:
            return
    raise TimeoutError
