"""One of two processes of JAX: URL ADDRESS NUMBER. Prints the numbers of its part of each batch, once JAX has
put the parts together."""

from __future__ import annotations

import json
import sys

import jax
import numpy as np

import meshsdk as mesh
from meshsdk import ops


def main() -> None:
    url, address, number = sys.argv[1:]
    jax.distributed.initialize(address, num_processes=2, process_id=int(number))
    dataset = mesh.open(url, fields={"n": "cls"}).map(ops.int_label("n"))
    devices = jax.make_mesh((jax.device_count(),), ("data",))
    rows = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec("data"))
    seen = []
    with mesh.Loader(dataset, 4, seed=3, output="numpy") as loader:
        for batch in loader:
            numbers = jax.make_array_from_process_local_data(rows, batch["n"].astype(np.int32))
            assert numbers.shape == (4,)
            seen.append(np.concatenate([part.data for part in numbers.addressable_shards]).tolist())
    sys.stdout.write(json.dumps(seen) + "\n")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
