"""Scenes of an Ingress controller in front of the mesh: the example for it, used by clients outside."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import ssl
import subprocess
import sys
import time
from base64 import b64encode
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import TYPE_CHECKING, Any
from unittest import mock
from urllib.parse import urlsplit

import yaml
from botocore.config import Config
from botocore.exceptions import ClientError
from lightkube.resources.core_v1 import Secret
from lightkube.resources.networking_v1 import Ingress, IngressClass
from lightkube.types import PatchType

import meshsdk as mesh
from meshsdk import ops
from tests.e2e.cluster_client import EndToEndError
from tests.e2e.scaling_scenes import kubectl
from tests.e2e.stage import MESH_PODS
from tests.kubernetes.control_plane import ROOT
from tests.kubernetes.helm_binary import helm
from tests.support.boto_sessions import boto_session
from tests.support.certificates import Authority
from tests.support.multipart_clients import by_boto3

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.stage import Stage

EXAMPLES = {
    "nginx.org/ingress-controller": "values-ingress-nginxinc.yaml",
    "k8s.io/ingress-nginx": "values-ingress.yaml",
}
"""Controller of an IngressClass → the example for it."""
MIB = 1 << 20
LARGE, PARTS = 1024 * MIB, 64 * MIB
GROWTH = 32 * MIB
"""Memory that the controller's processes may need for bodies of a gigabyte."""
BUCKET = "ingress"
KEYS = ("a//b/../c", "%2F", "ü ä+&=?#", "trailing/")
MEMORY = "grep -h VmHWM /proc/[0-9]*/status"
FILES = "a client request body is buffered|an upstream response is buffered"


@dataclass(frozen=True)
class Front:
    """The controller as clients outside see it."""

    stage: Stage
    host: str
    authority: Path

    def s3(self, *, style: str = "path", attempts: int | None = None, port: int | None = None) -> Any:
        """Return root's boto3 client; `attempts`: instead of its default retries."""
        access, secret = self.stage.root_keys().values()
        retries = {} if attempts is None else {"retries": {"total_max_attempts": attempts}}
        return boto_session().client(
            "s3",
            endpoint_url=f"https://{self.host}" + (f":{port}" if port else ""),
            aws_access_key_id=access,
            aws_secret_access_key=secret,
            region_name="us-east-1",
            verify=str(self.authority),
            config=Config(s3={"addressing_style": style}, signature_version="s3v4", **retries),
        )

    @contextmanager
    def connection(self) -> Iterator[socket.socket]:
        """Connect by https."""
        context = ssl.create_default_context(cafile=self.authority)
        address = (self.stage.options.ingress_address, 443)
        with (
            closing(socket.create_connection(address, timeout=20)) as plain,
            closing(context.wrap_socket(plain, server_hostname=self.host)) as sock,
        ):
            yield sock


def through_ingress(stage: Stage, epoch: str) -> None:
    """Reach the mesh by an Ingress, as the documentation's example makes it."""
    classes = {each.metadata.name: each.spec.controller for each in stage.cluster.kube.list(IngressClass)}
    name = stage.options.ingress_class
    example = EXAMPLES.get(classes.get(name, ""))
    if example is None:
        print(f"no IngressClass {name} of a controller with an example: there are {classes}", file=sys.stderr)
        stage.figures.append(("an Ingress", "no controller with an example here, not tried"))
        return
    with ingress(stage, example) as front:
        small_requests(front)
        large_bodies(front)
        epoch_of_sdk(front, epoch)
        lose_daemon(front)
        buckets_in_host_names(front)
        front.s3().delete_bucket(Bucket=BUCKET)


@contextmanager
def ingress(stage: Stage, example: str) -> Iterator[Front]:
    """Apply the example's Ingress, as the chart makes it, with a certificate; yield once it answers."""
    values = yaml.safe_load((ROOT / "helm" / "examples" / example).read_text())["ingress"]
    values["className"] = stage.options.ingress_class
    host, address = values["host"], stage.options.ingress_address
    with stage.step(f"an Ingress by {example}, until the mesh answers through it"):
        authority = Authority(stage.place / "ingress")
        certificate = authority.issue(names=(host, f"*.{host}"))
        create_secret(stage, values["tlsSecretName"], certificate.cert, certificate.key)
        document = ingress_of_chart(stage, values)
        stage.cluster.kube.create(Ingress.from_dict(document))
        front = Front(stage, host, authority.cert)
        with resolved(host, address):
            s3 = front.s3(attempts=1)
            stage.cluster.until(lambda: answers(s3), f"https://{host} at {address} answers", 60)
            s3.create_bucket(Bucket=BUCKET)
    with resolved(host, address):
        yield front
    stage.cluster.kube.delete(Ingress, document["metadata"]["name"])
    stage.cluster.kube.delete(Secret, values["tlsSecretName"])


def answers(s3: Any) -> bool:
    """Return whether root's request is answered."""
    try:
        s3.list_buckets()
    except Exception:  # the controller's own certificate, its own 404 …
        return False
    return True


def ingress_of_chart(stage: Stage, values: dict[str, Any]) -> dict[str, Any]:
    """Return the Ingress that the chart makes of these values."""
    mesh_of_chart = {"create": True, "name": "mesh", "spec": {"nodePools": [stage.pool()]}}
    given = {"ingress": values, "cluster": mesh_of_chart}
    where = ["--namespace", stage.cluster.namespace, "--values", "-"]
    where += ["--show-only", "templates/cluster.yaml", "--kube-version", "1.30"]
    done = subprocess.run(
        [helm(), "template", "mesh", str(ROOT / "helm" / "shardmesh"), *where],
        input=yaml.safe_dump(given),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if done.returncode != 0:
        raise EndToEndError(done.stderr)
    (found,) = (each for each in yaml.safe_load_all(done.stdout) if each["kind"] == "Ingress")
    found["metadata"]["namespace"] = stage.cluster.namespace
    return dict(found)


def create_secret(stage: Stage, name: str, certificate: Path, key: Path) -> None:
    """Create a Secret of type kubernetes.io/tls."""
    files = {"tls.crt": certificate, "tls.key": key}
    data = {file: b64encode(path.read_bytes()).decode() for file, path in files.items()}
    metadata = {"name": name, "namespace": stage.cluster.namespace}
    stage.cluster.kube.create(
        Secret.from_dict({"metadata": metadata, "type": "kubernetes.io/tls", "data": data})
    )


@contextmanager
def resolved(host: str, address: str) -> Iterator[None]:
    """Resolve a name and all names below it to this address, in this process."""
    real = socket.getaddrinfo

    def resolve(name: Any, *more: Any, **options: Any) -> Any:
        known = isinstance(name, str) and (name == host or name.endswith(f".{host}"))
        return real(address if known else name, *more, **options)

    with mock.patch("socket.getaddrinfo", resolve):
        yield


def small_requests(front: Front) -> None:
    """Signatures over the host's name and the path; ranges, HEAD, Expect, by https; http leads there."""
    with front.stage.step("boto3 by the Ingress: unusual keys, HEAD, ranges, metadata, Expect") as told:
        s3, body = front.s3(attempts=1), os.urandom(MIB)
        for key in KEYS:
            s3.put_object(Bucket=BUCKET, Key=key, Body=key.encode())
            if s3.get_object(Bucket=BUCKET, Key=key)["Body"].read() != key.encode():
                raise EndToEndError(f"other bytes of {key!r}")
            s3.delete_object(Bucket=BUCKET, Key=key)
        s3.put_object(Bucket=BUCKET, Key="small", Body=body, Metadata={"taken-by": "me"})
        head = s3.head_object(Bucket=BUCKET, Key="small")
        part = s3.get_object(Bucket=BUCKET, Key="small", Range="bytes=1000-1999")
        if head["ContentLength"] != MIB or head["Metadata"] != {"taken-by": "me"}:
            raise EndToEndError(f"HEAD: {head}")
        if part["Body"].read() != body[1000:2000] or part["ContentRange"] != f"bytes 1000-1999/{MIB}":
            raise EndToEndError(f"a range: {part}")
        told["metadata with an underscore"] = underscore(s3)
        told["Expect: 100-continue"] = expecting(front, s3)
        told["another port in Host"] = other_port(front)
        told["http"] = http_status(front)
        s3.delete_object(Bucket=BUCKET, Key="small")


def underscore(s3: Any) -> str:
    """Return what becomes of a request that has a signed header with an underscore in its name."""
    try:
        s3.put_object(Bucket=BUCKET, Key="small", Body=b"x" * MIB, Metadata={"taken_by": "me"})
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    return "accepted"


def expecting(front: Front, s3: Any) -> str:
    """PUT by hand, with the body sent after `100 Continue` only, then with a wrong signature; return the
    status lines."""
    where = {"Bucket": BUCKET, "Key": "expected"}
    url = urlsplit(s3.generate_presigned_url("put_object", Params=where))
    lines = put_by_hand(front, f"{url.path}?{url.query}")
    if [line.split()[1] for line in lines] != ["100", "200"]:
        raise EndToEndError(f"Expect: 100-continue: {lines}")
    s3.delete_object(**where)
    refused = put_by_hand(front, f"{url.path}x?{url.query}")
    return f"{', '.join(lines)}; with a wrong signature: {', '.join(refused)}"


def put_by_hand(front: Front, target: str) -> list[str]:
    """Send the head of a PUT, and once it is answered its body; return the lines of status."""
    with front.connection() as sock:
        head = f"PUT {target} HTTP/1.1\r\nHost: {front.host}\r\nContent-Length: {MIB}\r\n"
        sock.sendall(f"{head}Expect: 100-continue\r\nConnection: close\r\n\r\n".encode())
        lines = [sock.recv(4096).decode().partition("\r\n")[0]]
        if lines[0].split()[1] == "100":
            with suppress(OSError):  # refused before all of it is there
                sock.sendall(bytes(MIB))
            lines.append(sock.recv(4096).decode().partition("\r\n")[0])
    return lines


def other_port(front: Front) -> str:
    """Return the status of a request signed for another port than 443, as where a port is forwarded."""
    s3 = front.s3(port=8443)
    url = urlsplit(s3.generate_presigned_url("head_object", Params={"Bucket": BUCKET, "Key": "small"}))
    with front.connection() as sock:
        head = f"HEAD {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n\r\n"
        sock.sendall(head.encode())
        return sock.recv(4096).decode().partition("\r\n")[0]


def http_status(front: Front) -> str:
    """Return the status of a request without TLS."""
    with closing(socket.create_connection((front.stage.options.ingress_address, 80), timeout=20)) as sock:
        sock.sendall(f"GET / HTTP/1.1\r\nHost: {front.host}\r\nConnection: close\r\n\r\n".encode())
        return sock.recv(4096).decode().partition("\r\n")[0]


def large_bodies(front: Front) -> None:
    """A gigabyte in one PUT and one GET, and files in parts; the controller keeps none of it."""
    stage, s3 = front.stage, front.s3(attempts=1)
    source, target = stage.place / "gigabyte", stage.place / "again"
    with source.open("wb") as file:
        for _ in range(LARGE // (16 * MIB)):
            file.write(os.urandom(16 * MIB))
    before, files = memory(stage), buffered(stage)
    with (
        stage.step(f"boto3 by the Ingress: one PUT of {LARGE // MIB} MiB") as told,
        source.open("rb") as file,
    ):
        s3.put_object(Bucket=BUCKET, Key="large", Body=file)
        told["controller has had"] = of_controller(before, memory(stage))
        stage.tell_load(told)
    with stage.step(f"boto3 by the Ingress: one GET of {LARGE // MIB} MiB") as told:
        seen = hashlib.sha256()
        for chunk in s3.get_object(Bucket=BUCKET, Key="large")["Body"].iter_chunks(MIB):
            seen.update(chunk)
        with source.open("rb") as file:
            if seen.digest() != hashlib.file_digest(file, "sha256").digest():
                raise EndToEndError("other bytes")
        told["controller has had"] = of_controller(before, memory(stage))
        stage.tell_load(told)
    with stage.step(f"boto3 by the Ingress: {PARTS // MIB} MiB in parts of 8 MiB, there and back") as told:
        os.truncate(source, PARTS)
        by_boto3(s3, BUCKET, "parts", source, target)
        told["controller has had"] = of_controller(before, memory(stage))
        told["bodies it wrote to files"] = "not known"
        if files is not None and (now := buffered(stage)) is not None:
            told["bodies it wrote to files"] = now - files
        stage.tell_load(told)
    for key in ("large", "parts"):
        s3.delete_object(Bucket=BUCKET, Key=key)
    target.unlink()
    if told["bodies it wrote to files"] not in (0, "not known") or grown(before, memory(stage)) > GROWTH:
        raise EndToEndError(f"the controller did not stream: {told}")
    if told["bodies it wrote to files"] == 0:
        without_streaming(front, source)
    source.unlink()


def without_streaming(front: Front, source: Path) -> None:
    """Without the example's lines about buffering, the controller writes a body to a file, and says so."""
    stage, s3, before = front.stage, front.s3(), buffered(front.stage)
    annotations = stage.cluster.kube.get(Ingress, "mesh-s3").metadata.annotations
    others = {name: None for name in annotations if "buffering" in name or "snippet" in name}

    def annotate(change: dict[str, Any]) -> None:
        document = {"metadata": {"annotations": change}}
        stage.cluster.kube.patch(Ingress, "mesh-s3", document, patch_type=PatchType.MERGE)

    def is_buffered() -> bool:
        with source.open("rb") as file:
            s3.put_object(Bucket=BUCKET, Key="buffered", Body=file)
        return buffered(stage) != before

    with stage.step(f"without the lines about buffering, a PUT of {PARTS // MIB} MiB: it is buffered"):
        annotate(others)
        stage.cluster.until(is_buffered, "a body is buffered", 60)
        annotate(annotations)
        s3.delete_object(Bucket=BUCKET, Key="buffered")


def in_controller(stage: Stage, what: str) -> list[str]:
    """Return what kubectl prints for each pod of the controller, [] if its pods are not told."""
    if not stage.options.ingress_pods:
        return []
    namespace, _, label = stage.options.ingress_pods.partition("/")
    pods = kubectl(stage, f"get pods -n {namespace} -l {label} -o name").split()
    return [kubectl(stage, what.format(pod=f"-n {namespace} {pod}")) for pod in pods]


def memory(stage: Stage) -> int:
    """Return the most bytes of memory that each process of the controller has had, in sum; 0: not known."""
    texts = in_controller(stage, f"exec {{pod}} -- sh -c '{MEMORY}'")
    return sum(int(kilobytes) << 10 for text in texts for kilobytes in re.findall(r"(\d+) kB", text))


def grown(before: int, after: int) -> int:
    """Return by how many bytes the controller has grown."""
    return after - before


def of_controller(before: int, after: int) -> str:
    """Return words for the controller's memory."""
    return f"{before / MIB:.0f} MiB, then {after / MIB:.0f} MiB at most" if before else "not known"


def buffered(stage: Stage) -> int | None:
    """Return how many bodies the controller says it wrote to files (nginx warns of it); None: not known."""
    logs = in_controller(stage, "logs {pod} --since=10h")
    return sum(len(re.findall(FILES, text)) for text in logs) if logs else None


def epoch_of_sdk(front: Front, epoch: str) -> None:
    """An epoch by the SDK outside, of the samples that a training pod has read: the same bytes."""
    access, secret = front.stage.root_keys().values()
    with front.stage.step("an epoch by the SDK outside, by the Ingress") as told:
        seen, began = hashlib.sha256(), time.monotonic()
        client = mesh.connect(
            f"https://{front.host}", access_key=access, secret_key=secret, ca_cert=str(front.authority)
        )
        with client:
            dataset = mesh.open("s3://samples/", fields={"x": "bin"}, client=client)
            dataset = dataset.map(ops.frombuffer("x", "uint8", shape=[1024]))
            with mesh.Loader(dataset, 20, seed=3, output="numpy") as loader:
                for batch in loader:
                    if seen.digest() == hashlib.sha256().digest():
                        told["first batch"] = f"{time.monotonic() - began:.2f} s"
                    seen.update(batch["x"].tobytes())
        told["equal"] = seen.hexdigest() == epoch
        front.stage.tell_load(told)
    if seen.hexdigest() != epoch:
        raise EndToEndError("the epoch outside had other batches")


def lose_daemon(front: Front) -> None:
    """A daemon's pod is deleted with its grace while clients write and read by the Ingress."""
    stage, ended = front.stage, Event()
    counts, failures = {"with retries": 0, "without": 0}, {"with retries": [], "without": list[str]()}

    def use(name: str, s3: Any) -> None:
        number = 0
        while not ended.is_set():
            number += 1
            body = b"%d" % number * 2000
            try:
                s3.put_object(Bucket=BUCKET, Key=name, Body=body)
                if s3.get_object(Bucket=BUCKET, Key=name)["Body"].read() != body:
                    failures[name].append("other bytes")
            except Exception as error:  # whatever a user would see is a failure
                failures[name].append(repr(error)[:200])
            counts[name] += 2
            time.sleep(0.02)

    with stage.step("a daemon's pod is deleted (with grace) under clients of the Ingress") as told:
        clients = {"with retries": front.s3(), "without": front.s3(attempts=1)}
        threads = [Thread(target=use, args=each, daemon=True) for each in clients.items()]
        for each in threads:
            each.start()
        time.sleep(3)
        pod = stage.cluster.ready_pods(MESH_PODS)[0].metadata.name
        kubectl(stage, f"delete pod -n {stage.cluster.namespace} {pod} --wait")
        stage.until_settled()
        time.sleep(3)
        ended.set()
        for each in threads:
            each.join(120)
        for name, count in counts.items():
            told[f"requests {name}"] = f"{count}, failed {len(failures[name])}"
        told["first failures"] = failures["without"][:2] or "none"
        stage.tell_load(told)
        for name in counts:
            front.s3().delete_object(Bucket=BUCKET, Key=name)
    if failures["with retries"]:
        raise EndToEndError(f"clients of the Ingress: {failures['with retries'][:5]}")


def buckets_in_host_names(front: Front) -> None:
    """`s3.domains` and an Ingress for the names below the host's: buckets in the host's name."""
    stage = front.stage
    with stage.step("boto3 by an Ingress of *.HOST, with buckets in host names (`s3.domains`)") as told:
        stage.cluster.change(s3={"domains": [front.host]})
        found = stage.cluster.kube.get(Ingress, "mesh-s3").to_dict()
        wild = {name: found["spec"][name] for name in ("ingressClassName", "rules", "tls")}
        wild["rules"][0]["host"] = wild["tls"][0]["hosts"][0] = f"*.{front.host}"
        kept = {"namespace": stage.cluster.namespace, "annotations": found["metadata"]["annotations"]}
        document = {"metadata": {"name": "mesh-s3-buckets", **kept}, "spec": wild}
        stage.cluster.kube.create(Ingress.from_dict(document))
        stage.until_settled()
        s3 = front.s3(style="virtual", attempts=1)

        def stored() -> bool:
            try:
                s3.put_object(Bucket=BUCKET, Key="in/host", Body=b"x")
            except Exception:  # the controller follows with a delay
                return False
            return True

        stage.cluster.until(stored, "a bucket in the host's name", 30)
        if s3.get_object(Bucket=BUCKET, Key="in/host")["Body"].read() != b"x":
            raise EndToEndError("other bytes by a bucket in the host's name")
        s3.delete_object(Bucket=BUCKET, Key="in/host")
        stage.cluster.kube.delete(Ingress, "mesh-s3-buckets")
        stage.cluster.change(s3={"domains": None})
        stage.until_settled()
        stage.tell_load(told)
