"""Runs in a pod: writes the samples of a dataset, or with `read` as second argument reads them. Prints one
line of JSON: how many were written, or are as they were written."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import meshsdk as mesh


def body(number: int) -> bytes:
    return hashlib.shake_128(b"%d" % number).digest(1024)


def main(samples: int, *, reads: bool) -> None:
    if authority := os.environ.get("E2E_AUTHORITY"):
        Path("/tmp/authority.pem").write_text(authority)
        os.environ["MESH_CA_BUNDLE"] = "/tmp/authority.pem"
    with mesh.connect(os.environ["MESH_ENDPOINT"]) as client:
        if reads:
            read = [bytes(client.get("samples", f"{number:04}.bin")) for number in range(samples)]
            assert read == [body(number) for number in range(samples)], "wrong bytes"
            print(json.dumps({"read": len(read)}), flush=True)
            return
        client.create_bucket("samples")
        for number in range(samples):
            client.put("samples", f"{number:04}.bin", body(number))
    print(json.dumps({"written": samples}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), reads=sys.argv[2:] == ["read"])
