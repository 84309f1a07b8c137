"""Failures of clients that alerts are about: training that starves, ops that end their process, bad samples,
a job that fails, slow readers, more uploads at once than there is room for."""

from __future__ import annotations

import os
import time
from contextlib import closing, suppress
from itertools import count
from typing import TYPE_CHECKING

import meshsdk as mesh
from meshsdk import ops
from meshsdk.admin import jobs, op_catalog
from meshsdk.errors import MeshError

if TYPE_CHECKING:
    from tests.support.s3_raw import Wire

LARGE = 8 << 20
SAMPLES = 24
SLOW_SECONDS = 4.0
SOURCE = b'''
import ctypes
import time
import numpy as np
from meshsdk.userops import BYTES, array, op

@op(input=BYTES, output=array("int64", ()), memory=128 << 20)
def crash(data):
    """Ends its process."""
    ctypes.string_at(0)

@op(input=BYTES, output=array("int64", ()), memory=128 << 20)
def slow(data):
    """Takes its time."""
    time.sleep(0.2)
    return np.int64(len(data))
'''


class ClientFailures:
    """Each method may be called again and again: every epoch has another seed."""

    def __init__(self, client: mesh.Client) -> None:
        """Store the samples, a large object, and the module of ops."""
        self._client, self._seeds = client, count()
        client.create_bucket("samples")
        for number in range(SAMPLES):
            client.put("samples", f"{number:02}.bin", b"1" * (number + 1))
        client.put("samples", "large", os.urandom(LARGE))
        op_catalog.push_module(client.transport, "mine", SOURCE)

    def starve(self) -> None:
        """An epoch of a job with a name, whose op is slow."""
        ds = self._samples("slow")
        with mesh.Loader(ds, 8, output="numpy", report="slow", seed=next(self._seeds)) as loader:
            assert sum(batch.rows for batch in loader) == SAMPLES

    def crash(self) -> None:
        """A batch with an op that ends its process."""
        ds, seed = self._samples("crash"), next(self._seeds)
        with suppress(MeshError):
            mesh.Loader(ds, global_batch=2, seed=seed, on_bad="mask", max_bad=1.0).at(0)

    def read_bad_samples(self) -> None:
        """An epoch over the images of `node_work`, one of which is cut short."""
        ds = mesh.open("s3://photos/train", fields={"image": "jpg"}, client=self._client)
        ds = ds.map(ops.decode("image"), ops.random_crop("image", 16))
        with mesh.Loader(ds, 8, output="numpy", max_bad=1.0, seed=next(self._seeds)) as loader:
            assert sum(batch.rows for batch in loader) == 24

    def fail_job(self) -> None:
        """A job over a folder without objects."""
        document = jobs.shard_job("s3://samples/none/", "s3://samples/made/", count=10)
        job = jobs.start_job(self._client.transport, document)
        assert jobs.wait_for_job(self._client.transport, job.id).state == "failed"

    def _samples(self, op: str) -> mesh.Dataset:
        ds = mesh.open("s3://samples/", fields={"x": "bin"}, client=self._client)
        return ds.map(ops.user(f"mine/{op}", "x"))


def read_late(wire: Wire) -> None:
    """GET the large object, and take its bytes only after seconds; a GET counts until its last byte."""
    with closing(wire.connect(receive_buffer=8192)) as sock:
        sock.sendall(wire.head("GET", "/samples/large"))
        time.sleep(SLOW_SECONDS)
        left = LARGE
        while left > 0 and (data := sock.recv(1 << 20)):
            left -= len(data)


def crowd(wire: Wire, bucket: str) -> None:
    """Begin twenty uploads at once, until one is refused; `wire` keeps the connections."""
    for number in range(20):
        sock = wire.connect()
        try:
            sock.sendall(
                wire.head(
                    "PUT", f"/{bucket}/{number}", headers={"content-length": "10", "expect": "100-continue"}
                )
            )
            sock.recv(1024)
        except OSError:
            return
