"""How the Kubernetes API is reached: from within a pod by its ServiceAccount, from elsewhere by a kubeconfig.

Law: what proves who we are is read anew whenever it is used (tokens in pods are replaced every hour), and
never logged. Whatever is missing is a ControlError that says what.
"""

from __future__ import annotations

import ssl
import tempfile
from base64 import b64decode
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from meshd.control.interface import ControlError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_POD: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class ApiServer:
    """`path`: before every path, where the server is behind another. `tls`: None for plain HTTP."""

    host: str
    port: int
    path: str = ""
    tls: ssl.SSLContext | None = None
    token: Callable[[], str] = field(default=lambda: "", repr=False)


def server(environ: Mapping[str, str]) -> ApiServer:
    """Where this process's API server is: the pod's own, else what KUBECONFIG names. Raises ControlError."""
    if "KUBERNETES_SERVICE_HOST" in environ:
        return _of_pod(environ)
    path = Path(environ.get("KUBECONFIG") or Path.home() / ".kube" / "config")
    if not path.exists():
        raise ControlError(
            f"no Kubernetes API: this is no pod (KUBERNETES_SERVICE_HOST is not set), and there is no {path}"
        )
    return of_kubeconfig(path)


def own_namespace() -> str:
    """The pod's. Raises ControlError outside of one."""
    try:
        return (_POD / "namespace").read_text().strip()
    except OSError:
        raise ControlError("name the namespace: kubernetes://NAMESPACE/NAME (this is no pod)") from None


def _of_pod(environ: Mapping[str, str]) -> ApiServer:
    token = _POD / "token"
    if not token.exists():
        raise ControlError(f"{token} is missing: the pod needs a token of its ServiceAccount")
    host = environ["KUBERNETES_SERVICE_HOST"].strip("[]")
    tls = ssl.create_default_context(cafile=str(_POD / "ca.crt"))
    return ApiServer(host, int(environ.get("KUBERNETES_SERVICE_PORT", "443")), tls=tls, token=_reading(token))


def of_kubeconfig(path: Path) -> ApiServer:
    """The server of a file's current context. Raises ControlError."""
    import yaml  # pods have no such file

    try:
        document = yaml.safe_load(path.read_text())
        context = _named(document, "contexts", document["current-context"])["context"]
        cluster = _named(document, "clusters", context["cluster"])["cluster"]
        user = _named(document, "users", context["user"])["user"]
        parts = urlsplit(cluster["server"])
        tls = _tls(cluster, user, path.parent) if parts.scheme == "https" else None
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise ControlError(
            f"the kubeconfig {path} cannot be used: {type(error).__name__}: {error}"
        ) from error
    if "exec" in user or "auth-provider" in user:
        raise ControlError(
            f"the kubeconfig {path} runs a program to log in; use one with a token or certificate"
        )
    port = parts.port or (443 if tls else 80)
    return ApiServer(parts.hostname or "", port, parts.path.rstrip("/"), tls, _token(user, path.parent))


def _named(document: Any, what: str, name: str) -> Any:
    found = next((each for each in document[what] if each["name"] == name), None)
    if found is None:
        raise ValueError(f"no {name!r} among the {what}")
    return found


def _token(user: Mapping[str, str], base: Path) -> Callable[[], str]:
    if "tokenFile" in user:
        return _reading(base / user["tokenFile"])
    token = user.get("token", "")
    return lambda: token


def _reading(path: Path) -> Callable[[], str]:
    return lambda: path.read_text().strip()


def _tls(cluster: Mapping[str, Any], user: Mapping[str, str], base: Path) -> ssl.SSLContext:
    if cluster.get("insecure-skip-tls-verify"):
        tls = ssl.create_default_context()
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    elif "certificate-authority-data" in cluster:
        data = b64decode(cluster["certificate-authority-data"]).decode()
        tls = ssl.create_default_context(cadata=data)
    else:
        file = cluster.get("certificate-authority")
        tls = ssl.create_default_context(cafile=str(base / file) if file else None)
    if "client-certificate-data" in user:
        pair = b64decode(user["client-certificate-data"]) + b"\n" + b64decode(user["client-key-data"])
        with tempfile.NamedTemporaryFile() as both:  # ssl reads pairs from files only
            both.write(pair)
            both.flush()
            tls.load_cert_chain(both.name)
    elif "client-certificate" in user:
        tls.load_cert_chain(base / user["client-certificate"], base / user["client-key"])
    return tls
