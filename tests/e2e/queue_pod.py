"""Runs in a pod: jobs whose op is slow ask for more rows than a node may build, until the pod ends."""

from __future__ import annotations

import io
import tarfile
import threading

import meshsdk as mesh
from meshsdk import ops
from meshsdk.admin import op_catalog
from meshsdk.errors import MeshError

SAMPLES = 20_000
ROWS = 8192
JOBS = 24  # of 8,192 rows each, over the daemons: a daemon builds 32,768 at once
SOURCE = b'''
import time
import numpy as np
from meshsdk.userops import BYTES, array, op

@op(input=BYTES, output=array("int64", ()), memory=128 << 20)
def slow(data):
    """Takes its time."""
    time.sleep(0.05)
    return np.int64(len(data))
'''


def archive() -> bytes:
    """Return a tar of all samples."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for number in range(SAMPLES):
            info = tarfile.TarInfo(f"{number:06}.bin")
            info.size = 1
            tar.addfile(info, io.BytesIO(b"1"))
    return file.getvalue()


def ask(client: mesh.Client, seed: int) -> None:
    """Ask for a batch again and again; the node refuses some."""
    ds = mesh.open("s3://queue/", fields={"x": "bin"}, client=client).map(ops.user("queue/slow", "x"))
    while True:
        try:
            mesh.Loader(ds, global_batch=ROWS, seed=seed).at(0)
        except MeshError as error:
            print(f"job {seed}: {error}"[:500], flush=True)


def main() -> None:
    with mesh.connect() as client:
        client.create_bucket("queue")
        client.put("queue", "samples.tar", archive())
        op_catalog.push_module(client.transport, "queue", SOURCE)
        for seed in range(1, JOBS):
            threading.Thread(target=ask, args=(client, seed), daemon=True).start()
        ask(client, 0)


if __name__ == "__main__":
    main()
