"""The chart's README, made of values.yaml and values.schema.json; run as a program it writes it.

make reference
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

CHART = Path(__file__).resolve().parents[2] / "helm" / "shardmesh"
PAGE = CHART / "README.md"
_HEAD = """# The chart

```
helm install mesh helm/shardmesh --namespace mesh --create-namespace
```

installs the operator. Images are not published: build them from the repository's root, push them to a
registry of yours, and say where they are.

```
docker build -f docker/operator.Dockerfile -t REGISTRY/operator:0.1.0 .     # --set operator.image.repository
docker build -f docker/meshd.Dockerfile -t REGISTRY/meshd:0.1.0 .           # `image` of a MeshCluster
```

With `--set cluster.create=true` and a `cluster.spec` ([an example](../examples/meshcluster.yaml),
[every field](../../docs/resources.md)) it makes a mesh, too. What it prints says how to go on;
[docs/kubernetes.md](../../docs/kubernetes.md) tells the rest, and what to do on a bad night. Secrets are
named, never given as values.

## Upgrades and removal

1. Helm neither changes nor deletes what lies in `crds/`. Before `helm upgrade`:
   `kubectl apply --server-side --force-conflicts -f crds/`. Fields are only added within `v1alpha1`.
2. `helm upgrade` replaces the operator's pod (`Recreate`: seconds without one, which daemons do not notice).
   Then the operator rolls a new daemon image out, one pod of a settled mesh at a time; `update.paused` in the
   MeshCluster holds that back. `kubectl wait meshcluster/mesh --for=condition=Settled` says when it is over.
3. To go back: `helm rollback`. Definitions stay as they are; older operators pass over new fields.
4. `helm test RELEASE` writes, reads and removes an object.

After `helm uninstall` the definitions, the MeshCluster and all data are still there; deleting the definitions
deletes every mesh that was made with them. The webhook's generated certificate is kept over upgrades, for ten
years; delete its Secret and upgrade for a new one. The operator reads it again without a restart.

## Security

Every pod fits Kubernetes' Pod Security Standard `restricted`, except daemons with a tier on a `hostPath`:
their namespace has to allow `privileged`. There an init container runs as root, with the capabilities
`CHOWN` and `FOWNER` alone, and gives the daemon (user 65532) the directories that the kubelet created for it;
it changes nothing in them. With `volumeClaim` tiers it may be `restricted`. The operator's
rights are what it uses, verb by verb (a test compares); in `cluster` scope they include Secrets of every
namespace, since training pods get their keys as Secrets there.

## Scopes

`cluster` (the default) gives the operator a ClusterRole: meshes in every namespace, labels of nodes read for
placement and written for affinity. `namespaced` gives it Roles in `watchNamespaces` only, and one for its
Lease if it runs in another namespace: no labels of nodes, so copies are not placed by zone and rack, and
training pods are not drawn to them.

## Values

"""


def page() -> str:
    """What the README should be."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    rows = ["| value | default | |", "|---|---|---|", *_rows("", schema, schema, values)]
    return _HEAD + "\n".join(rows) + "\n"


def _rows(path: str, node: dict[str, Any], root: dict[str, Any], value: Any) -> Iterator[str]:
    for name, each in node["properties"].items():
        found = {**root["definitions"][each["$ref"].rsplit("/", 1)[1]], **each} if "$ref" in each else each
        full, inner = f"{path}{name}", (value or {}).get(name)
        if "properties" in found:
            yield from _rows(f"{full}.", found, root, inner)
        elif name != "global":
            choices = " · ".join(f"`{choice}`" for choice in found.get("enum", ()))
            default = "" if inner in ("", None, [], {}) else f"`{json.dumps(inner)}`"
            words = " ".join(filter(None, (found.get("description", ""), choices)))
            yield f"| `{full}` | {default} | {words} |"


if __name__ == "__main__":
    PAGE.write_text(page())
