"""One trace from a training loop's wait to the reads of disks, over a mesh of three nodes, as OTLP has it."""

from __future__ import annotations

import os
import subprocess
import urllib.request
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.faults.epochs import BUCKET, connect, fill
from tests.support.daemon_cluster import DaemonCluster
from tests.support.interpreters import python
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.otlp_receiver import Received

require_etcd()

TRAINING = """
import meshsdk as mesh
from meshsdk import ops
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)

ds = mesh.open("s3://training/train", fields={"image": "png"})
tracer = trace.get_tracer("training")
ds = ds.map(ops.decode("image"), ops.resize("image", (32, 32)))
for batch in mesh.Loader(ds, 12, rows_from="one", output="numpy"):
    with tracer.start_as_current_span("step"):
        pass
provider.shutdown()
"""
STAGES = {
    "wait", "request batch", "GET /-/plans/", "frame", "assemble", "locate", "peer objects/read",
    "POST /-/peer/objects/read", "queue", "render", "op decode+resize", "seal", "send",
}  # fmt: skip


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as found:
        yield found


@pytest.fixture(scope="module")
def mesh(collector: OtlpReceiver) -> Iterator[DaemonCluster]:
    # Nodes begin no traces of their own: what is recorded, clients wanted.
    flags = ("--copies", "1", "--trace-endpoint", collector.endpoint, "--trace-ratio", "0")
    with DaemonCluster.start(3, args=flags) as three:
        with connect(list(three.endpoints.values()), (three.access_key, three.secret_key)) as client:
            fill(client, 24)
        yield three


def parts(spans: list[Received], parent: Received) -> list[Received]:
    """The spans below one of them, at any depth."""
    own = [span for span in spans if span.parent == parent.span]
    return own + [each for span in own for each in parts(spans, span)]


def test_a_batch_is_one_trace_from_the_wait_to_the_disks_of_other_nodes(
    mesh: DaemonCluster, collector: OtlpReceiver
) -> None:
    env = os.environ | {
        "MESH_ENDPOINT": ",".join(mesh.endpoints.values()),
        "AWS_ACCESS_KEY_ID": mesh.access_key,
        "AWS_SECRET_ACCESS_KEY": mesh.secret_key,
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
        "OTEL_SERVICE_NAME": "training",
    }
    subprocess.run([python(), "-c", TRAINING], env=env, check=True, timeout=60)
    found = collector.await_spans(lambda spans: all(map(partial(is_complete, spans), range(2))))
    for root in [span for span in found if span.name == "batch"]:
        below = parts(found, root)
        assert {span.trace for span in below} == {root.trace}
        assert {span.resource["service.name"] for span in below} == {"training", "meshd"}
        assert all(root.started - 0.01 <= span.started <= span.ended for span in below)
        for span in below:  # a busy node may record that it has sent the batch after the program has it
            late = 0.01 if span.resource["service.name"] == "training" else 1.0
            assert span.started <= root.ended + 0.01, span.name
            assert span.ended <= root.ended + late, span.name
        (waited,) = [span for span in below if span.name == "wait"]
        assert waited.resource["service.name"] == "training"
        reads = [span for span in below if span.name == "memory read"]  # of what other nodes sent
        assert sum(span.attributes["shardmesh.bytes"] for span in reads) > 0


def is_complete(spans: list[Received], step: int) -> bool:
    """Whether everything has come of a batch: of the program, the node that it asked, and other nodes."""
    for root in [span for span in spans if span.attributes.get("shardmesh.step") == step]:
        if root.name == "batch":
            below = parts(spans, root)
            disks = {span.node for span in below if span.name == "disk read"}
            return len(disks) > 1 and {span.name for span in below} >= STAGES
    return False


def test_a_forwarded_request_keeps_its_trace_and_no_secret_or_key_is_told(
    mesh: DaemonCluster, collector: OtlpReceiver
) -> None:
    key = mesh.key_with_primary("n2", BUCKET, "private", copies=1)
    mesh["n2"].client().put_object(Bucket=BUCKET, Key=key, Body=b"data")
    trace, caller = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    presigned = mesh["n1"].client().generate_presigned_url("get_object", {"Bucket": BUCKET, "Key": key})
    for sampled in ("00", "01"):
        headers = {"traceparent": f"00-{trace}-{caller}-{sampled}", "tracestate": "vendor=1"}
        with urllib.request.urlopen(urllib.request.Request(presigned, headers=headers), timeout=60) as answer:
            assert answer.read() == b"data"
    found = collector.await_spans(
        lambda spans: len({s.node for s in spans if s.trace == trace and s.name == "GetObject"}) == 2
    )
    told = [span for span in found if span.trace == trace]
    (first,) = [span for span in told if span.parent == caller]
    assert first.node == "n1"
    assert [span.node for span in parts(told, first) if span.name == "GetObject"] == ["n2"]
    assert (
        len([span for span in told if span.name == "GetObject"]) == 2
    )  # the one that was not sampled is not
    everything = b"".join(collector.bodies).lower()
    for secret in (mesh.secret_key, mesh.access_key, "signature", "private"):
        assert secret.lower().encode() not in everything
