"""Writes that begin while a node is the only one of its mesh, and end when it is not any more."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tests.support.daemon_cluster import DaemonCluster
from tests.support.required import require_etcd
from tests.support.s3_raw import Wire, read_answer

if TYPE_CHECKING:
    import socket

require_etcd()

BODY = b"z" * 200_000
KEYS = [f"key-{number}" for number in range(24)]


def begin(wire: Wire, target: str) -> socket.socket:
    """All of an upload but its last byte."""
    sock = wire.connect()
    sock.sendall(wire.head("PUT", target, headers={"content-length": str(len(BODY))}) + BODY[:-1])
    return sock


def test_an_upload_outlasts_the_time_when_its_node_was_alone() -> None:
    """What was acknowledged is where the map says it is, and on as many nodes."""
    with DaemonCluster.start(1) as mesh:
        s3 = mesh["n1"].client()
        s3.create_bucket(Bucket="bkt")
        upload = s3.create_multipart_upload(Bucket="bkt", Key="parts")["UploadId"]
        part = f"/bkt/parts?partNumber=1&uploadId={upload}"
        with contextlib.closing(Wire(mesh["n1"].endpoint, mesh.access_key, mesh.secret_key)) as wire:
            begun = [begin(wire, target) for target in (part, *(f"/bkt/{key}" for key in KEYS))]
            mesh.await_metric("n1", "meshd_http_connections", len(begun))
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(mesh.add, ("n2", "n3")))
            mesh.await_map(
                lambda cluster: (
                    len(cluster.nodes) == 3
                    and not cluster.is_rebalancing
                    and all(node.state == "up" for node in cluster.nodes)
                )
            )
            answers = []
            for sock in begun:
                sock.sendall(BODY[-1:])
                answers.append(read_answer(sock, "PUT"))
        assert {answer.status for answer in answers} == {200}
        other = mesh["n2"].client()
        done = {"Parts": [{"PartNumber": 1, "ETag": answers[0].headers["etag"]}]}
        other.complete_multipart_upload(Bucket="bkt", Key="parts", UploadId=upload, MultipartUpload=done)
        mesh.kill("n1")
        for key in ("parts", *KEYS):
            assert other.get_object(Bucket="bkt", Key=key)["Body"].read() == BODY
        for each in (s3, other):
            each.close()
