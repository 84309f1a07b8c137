"""Runs in a pod: writes the samples of a dataset. Prints one line of JSON."""

from __future__ import annotations

import hashlib
import json
import os
import sys

import meshsdk as mesh


def main(samples: int) -> None:
    with mesh.connect(os.environ["MESH_ENDPOINT"]) as client:
        client.create_bucket("samples")
        for number in range(samples):
            client.put("samples", f"{number:04}.bin", hashlib.shake_128(b"%d" % number).digest(1024))
    print(json.dumps({"written": samples}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
