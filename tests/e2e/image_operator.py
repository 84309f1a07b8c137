"""Runs in the operator's image: imports all of it, then starts its command (the arguments) without a cluster.

Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e.image_contents import identity, import_everything, load_libraries, started, until_answered

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def start_operator(command: Sequence[str], health: str) -> Any:
    """Start the command without a cluster, and return what its health endpoint answers at this address."""
    with tempfile.TemporaryDirectory() as place:
        config = Path(place) / "kubeconfig"
        config.write_text(kubeconfig("http://127.0.0.1:1"))
        with started(command, {"KUBECONFIG": str(config), "MESH_OPERATOR_HEALTH": health}):
            return json.loads(until_answered(f"http://{health}/healthz"))


def main() -> None:
    found = {
        "identity": identity(),
        "modules": import_everything(["meshoperator"]),
        "libraries": load_libraries(),
        "health": start_operator(sys.argv[1:], HEALTH),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
