"""Runs in the operator's image: imports all of it, then starts its command (the arguments) without a cluster.

Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.e2e.image_contents import identity, import_everything, load_libraries, started, until_answered

HEALTH = "127.0.0.1:8080"


def kubeconfig(server: str) -> str:
    """Return a configuration for an API server, as JSON, which is YAML."""
    document = {
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "none"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "mesh"}}],
        "current-context": "c",
    }
    return json.dumps(document)


def main() -> None:
    found = {
        "identity": identity(),
        "modules": import_everything(["meshoperator"]),
        "libraries": load_libraries(),
    }
    with tempfile.TemporaryDirectory() as place:
        config = Path(place) / "kubeconfig"
        config.write_text(kubeconfig("http://127.0.0.1:1"))
        with started(sys.argv[1:], {"KUBECONFIG": str(config), "MESH_OPERATOR_HEALTH": HEALTH}):
            found["health"] = json.loads(until_answered(f"http://{HEALTH}/healthz"))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
