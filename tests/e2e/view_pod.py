"""Runs in a pod: reads every shard of the view `samples--packed`. Prints one line of JSON: how many shards
and samples there are, and how many samples are not what samples_pod.py wrote."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tarfile

import meshsdk as mesh


def main(samples: int) -> None:
    wanted = {f"{number:04}.bin": hashlib.shake_128(b"%d" % number).digest(1024) for number in range(samples)}
    found, shards = dict[str, bytes](), 0
    with mesh.connect(os.environ["MESH_ENDPOINT"]) as client:
        for each in client.list("samples--packed"):
            if not each.key.endswith(".tar"):
                continue
            shards += 1
            with tarfile.open(fileobj=io.BytesIO(bytes(client.get("samples--packed", each.key)))) as packed:
                for member in packed:
                    body = packed.extractfile(member)
                    assert body is not None
                    found[member.name] = body.read()
    wrong = sum(found.get(name) != body for name, body in wanted.items())
    print(json.dumps({"shards": shards, "samples": len(found), "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
