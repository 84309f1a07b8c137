"""Admission of training pods: node affinity to copies of their datasets, endpoint and keys. Pure.

Law: user settings stay, and admitting twice equals admitting once. Required datasets are ANDed; preferred
ones each get full weight. No pod is rejected: unknown datasets are left out. No secret passes through here;
keys come from a Secret created for the pod.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from meshoperator.resources import GROUP

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

LABEL: Final = f"{GROUP}/dataset"  # one name, or several separated by dots (labels allow no commas)
ANNOTATION: Final = f"{GROUP}/datasets"  # a comma-separated list; overrides the label
REQUIRE: Final = f"{GROUP}/require-local"  # "true": run only where a copy is
INJECT: Final = f"{GROUP}/inject"  # all, mesh (no AWS_ variables), none (affinity only)
KEYS: Final = f"{GROUP}/keys"  # "environment": also as variables, which are not renewed
ROLE: Final = f"{GROUP}/role"  # of the mesh: exchanges the pod's own token, instead of keys from a Secret
DONE: Final = f"{GROUP}/admitted"
SECRET: Final = f"{GROUP}/credentials"  # the name of the pod's Secret
HOST, RACK, ZONE = 100, 60, 30
LEVELS: Final = (("host", HOST), ("rack", RACK), ("zone", ZONE))
MOUNT: Final = "/var/run/shardmesh"
VOLUME: Final = "shardmesh-credentials"
TOKEN_MOUNT: Final = f"/var/run/secrets/{GROUP}/serviceaccount"
TOKEN_VOLUME: Final = "shardmesh-token"
_ROLE_NAME: Final = re.compile(r"[A-Za-z0-9][\w.@+-]{0,63}", re.ASCII)
_CUT: Final = 40  # characters of a pod quoted in a message
_KINDS: Final[dict[type, str]] = {str: "text", list: "a list", dict: "an object"}
_OWN_KEYS: Final = frozenset(
    {
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_PROFILE",
        "AWS_CONFIG_FILE",
        "AWS_SHARED_CREDENTIALS_FILE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    }
)
"""A container that sets one of these brings its own keys."""


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """What the webhook knows about a dataset. `mark`: the suffix of its labels on Kubernetes nodes: `host.…`
    (a copy is there), `rack.…` and `zone.…` (one is near). `tls`: clients need the CA in `ca.crt`.
    `audience`: of tokens that its mesh exchanges, valid for `token_seconds`; "" if it exchanges none."""

    name: str
    mark: str
    endpoint: str
    bucket: str
    prefix: str = ""
    near: Literal["Off", "Preferred", "Required"] = "Preferred"
    tls: bool = False
    audience: str = ""
    token_seconds: int = 0

    @property
    def uri(self) -> str:
        """The URI for clients."""
        return f"s3://{self.bucket}/{self.prefix}"


MAX_DATASETS: Final = 100
MAX_ITEMS: Final = 1000
"""Limit on containers, and on entries of each list that a patch repeats. A patch is larger than its pod: a
pod of 3 MB, which the API server accepts, would have a patch of gigabytes."""


class InvalidPodError(ValueError):
    """A pod that no API server would run; the message says what is wrong."""


def label(level: str, mark: str) -> str:
    """Return the label of Kubernetes nodes for a level and a dataset's mark."""
    return f"{level}.{GROUP}/{mark}"


def requested_datasets(pod: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the datasets that a pod requests."""
    metadata = pod.get("metadata") or {}
    annotation = (metadata.get("annotations") or {}).get(ANNOTATION)
    names = (
        annotation.split(",") if annotation else ((metadata.get("labels") or {}).get(LABEL) or "").split(".")
    )
    return tuple(dict.fromkeys(name.strip() for name in names if name.strip()))


def checked_pod(pod: object) -> Mapping[str, Any]:
    """Return the pod. Raises InvalidPodError unless every part that is read has Kubernetes' types and bounded
    size."""
    if pod is None:
        raise InvalidPodError("the request contains no pod")
    found = _object(pod, "the pod")
    metadata = _object(found.get("metadata"), "metadata")
    for name in ("labels", "annotations"):
        for key, value in _object(metadata.get(name), f"metadata.{name}").items():
            _check(value, str, f"metadata.{name}[{key[:_CUT]!r}]")
    spec = _object(found.get("spec"), "spec")
    for volume in _objects(spec, "volumes", "spec"):
        _check(volume.get("name"), str, "the name of a volume")
    for kind in ("initContainers", "containers"):
        for container in _objects(spec, kind, "spec"):
            _check_container(container, f"spec.{kind}[]")
    node = _object(_object(spec.get("affinity"), "affinity").get("nodeAffinity"), "affinity.nodeAffinity")
    if len(requested_datasets(found)) > MAX_DATASETS:
        raise InvalidPodError(
            f"it requests {len(requested_datasets(found))} datasets; the limit is {MAX_DATASETS}"
        )
    _objects(node, "preferredDuringSchedulingIgnoredDuringExecution", "affinity.nodeAffinity")
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    required = _object(node.get(key), f"affinity.nodeAffinity.{key}")
    for term in _objects(required, "nodeSelectorTerms", key):
        _objects(term, "matchExpressions", "nodeSelectorTerms[]")
    return found


def _check_container(container: Mapping[str, Any], path: str) -> None:
    _objects(container, "envFrom", path)
    for variable in _objects(container, "env", path):
        _check(variable.get("name"), str, f"the name of a variable of {path}")
    for mount in _objects(container, "volumeMounts", path):
        _check(mount.get("mountPath"), str, f"the path of a mount of {path}")


def _objects(parent: Mapping[str, Any], name: str, path: str) -> Sequence[Mapping[str, Any]]:
    found = parent.get(name)
    _check(found, list, f"{path}.{name}")
    if found and len(found) > MAX_ITEMS:
        raise InvalidPodError(f"{path}.{name} has {len(found)} entries; the limit is {MAX_ITEMS}")
    return [_object(each, f"an entry of {path}.{name}") for each in found or ()]


def _object(found: object, path: str) -> Mapping[str, Any]:
    _check(found, dict, path)
    return found or {}  # type: ignore[return-value]  # checked above


def _check(found: object, kind: type, path: str) -> None:
    if found is not None and not isinstance(found, kind):
        raise InvalidPodError(f"{path} is {str(found)[:_CUT]!r}; expected {_KINDS[kind]}")


@dataclass(frozen=True, slots=True)
class Admitted:
    """A JSON patch (RFC 6902), empty if there is nothing to change, and warnings for the user."""

    operations: tuple[dict[str, Any], ...] = ()
    warnings: tuple[str, ...] = ()


def admit(pod: Mapping[str, Any], known: Mapping[str, DatasetInfo], token: str) -> Admitted:
    """Return the changes to a pod. `token` identifies this admission; the name of the pod's Secret contains
    it."""
    annotations = (pod.get("metadata") or {}).get("annotations") or {}
    if DONE in annotations:
        return Admitted()
    names = requested_datasets(pod)
    warnings = [
        f"shardmesh: no MeshDataset {name!r} is available in this namespace"
        for name in names
        if name not in known
    ]
    datasets = [known[name] for name in names if name in known]
    if not datasets:
        return Admitted((), tuple(warnings))
    if len({each.endpoint for each in datasets}) > 1:
        warnings.append("shardmesh: the datasets are in several meshes; the pod gets no endpoint and no keys")
    role = annotations.get(ROLE, "")
    if role:
        problem = _role_problem(role, datasets[0], annotations.get(INJECT, "all"))
        if problem:
            warnings.append(f"shardmesh: {problem}; the pod gets keys for its datasets instead")
            role = ""
    patching = _PatchBuilder(pod, datasets, token, role)
    return Admitted(patching.run(one_mesh=len({each.endpoint for each in datasets}) == 1), tuple(warnings))


def _role_problem(role: str, dataset: DatasetInfo, inject: str) -> str:
    """Return why a pod cannot assume a role of its mesh; "" if it may try."""
    if _ROLE_NAME.fullmatch(role) is None:
        return f"the annotation {ROLE} is not the name of a role"
    if not dataset.audience:
        return "the MeshCluster does not exchange tokens (spec.auth.webIdentity)"
    if inject == "mesh":
        return f"the role needs AWS_ variables, which {INJECT}: mesh forbids"
    if dataset.tls:
        return "with TLS, pods get the mesh's certificate with their keys only"
    return ""


class _PatchBuilder:
    """Builds the patch of one pod. `role`: the role whose keys the pod gets for its token; "": keys from a
    Secret."""

    def __init__(
        self, pod: Mapping[str, Any], datasets: Sequence[DatasetInfo], token: str, role: str
    ) -> None:
        self._spec: Mapping[str, Any] = pod.get("spec") or {}
        self._metadata: Mapping[str, Any] = pod.get("metadata") or {}
        self._annotations: Mapping[str, str] = self._metadata.get("annotations") or {}
        self._datasets, self._secret, self._role = datasets, f"shardmesh-{token}", role
        self._mount_name, self._mount = (TOKEN_VOLUME, TOKEN_MOUNT) if role else (VOLUME, MOUNT)

    def run(self, *, one_mesh: bool) -> tuple[dict[str, Any], ...]:
        added = {DONE: ",".join(each.name for each in self._datasets)}
        operations: list[dict[str, Any]] = []
        affinity = self._affinity()
        if affinity is not None:
            operations.append({"op": "add", "path": "/spec/affinity", "value": affinity})
        if one_mesh and self._annotations.get(INJECT, "all") in ("all", "mesh"):
            if not self._role:
                added[SECRET] = self._secret
            operations += self._volume()
            for kind in ("initContainers", "containers"):
                for place, container in enumerate(self._spec.get(kind) or ()):
                    operations += self._container(f"/spec/{kind}/{place}", container)
        annotations = {**self._annotations, **added}
        return ({"op": "add", "path": "/metadata/annotations", "value": annotations}, *operations)

    # --- where it runs ------------------------------------------------------------------------------------

    def _affinity(self) -> dict[str, Any] | None:
        """Return the pod's affinity merged with ours, or None if there is nothing to add."""
        drawn = [each for each in self._datasets if each.near != "Off"]
        if not drawn:
            return None
        affinity: Mapping[str, Any] = self._spec.get("affinity") or {}
        node = dict(affinity.get("nodeAffinity") or {})
        force = self._annotations.get(REQUIRE) == "true"
        needed = [_has(label("host", each.mark)) for each in drawn if force or each.near == "Required"]
        if needed:
            # terms are ORed, expressions within a term ANDed: so ours go into every term
            key = "requiredDuringSchedulingIgnoredDuringExecution"
            terms = (node.get(key) or {}).get("nodeSelectorTerms") or [{}]
            node[key] = {
                "nodeSelectorTerms": [
                    {**term, "matchExpressions": [*(term.get("matchExpressions") or []), *needed]}
                    for term in terms
                ]
            }
        preferred = [
            {"weight": weight, "preference": {"matchExpressions": [_has(label(level, each.mark))]}}
            for each in drawn
            for level, weight in LEVELS
        ]
        key = "preferredDuringSchedulingIgnoredDuringExecution"
        node[key] = [*(node.get(key) or []), *preferred]
        return {**affinity, "nodeAffinity": node}

    # --- what it gets -------------------------------------------------------------------------------------

    def _volume(self) -> list[dict[str, Any]]:
        volumes = [each for each in self._spec.get("volumes") or () if each.get("name") != self._mount_name]
        own: dict[str, Any] = {"name": self._mount_name}
        if self._role:
            first = self._datasets[0]
            lifetime = {"audience": first.audience, "expirationSeconds": first.token_seconds}
            own["projected"] = {"sources": [{"serviceAccountToken": {**lifetime, "path": "token"}}]}
        else:
            own["secret"] = {"secretName": self._secret, "defaultMode": 0o444}
        return [{"op": "add", "path": "/spec/volumes", "value": [*volumes, own]}]

    def _container(self, path: str, container: Mapping[str, Any]) -> list[dict[str, Any]]:
        mounts = list(container.get("volumeMounts") or ())
        found = []
        if not any(each.get("mountPath", "").rstrip("/") == self._mount for each in mounts):
            mount = {"name": self._mount_name, "mountPath": self._mount, "readOnly": True}
            found.append({"op": "add", "path": f"{path}/volumeMounts", "value": [*mounts, mount]})
        added = self._environment(container)
        if added:
            value = [*(container.get("env") or ()), *added]
            found.append({"op": "add", "path": f"{path}/env", "value": value})
        return found

    def _environment(self, container: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the variables that the container does not set itself."""
        present = {each.get("name") for each in container.get("env") or ()}
        first = self._datasets[0]
        values: dict[str, Any] = {
            "MESH_DATASETS": ",".join(each.name for each in self._datasets),
            "MESH_DATASET_URIS": ",".join(each.uri for each in self._datasets),
            "MESH_ENDPOINT": first.endpoint,
        }
        # `env` overrides `envFrom`, whose content is unknown here: keys that may come from there must stay
        foreign = bool(container.get("envFrom")) or self._annotations.get(INJECT) == "mesh"
        own_keys = bool(present & _OWN_KEYS)
        if self._role:
            values |= self._role_environment(first.endpoint, own_keys=own_keys)
            return [{"name": name, "value": value} for name, value in values.items() if name not in present]
        if not own_keys:
            values["MESH_CREDENTIALS_FILE"] = f"{MOUNT}/credentials.json"
        if first.tls:
            values["MESH_CA_BUNDLE"] = f"{MOUNT}/ca.crt"
        if not foreign:
            values["AWS_ENDPOINT_URL_S3"] = first.endpoint
            if not own_keys:
                values["AWS_CONFIG_FILE"] = f"{MOUNT}/config"
            if first.tls:
                values["AWS_CA_BUNDLE"] = f"{MOUNT}/ca.crt"
        found = [{"name": name, "value": value} for name, value in values.items() if name not in present]
        if not foreign and not own_keys and self._annotations.get(KEYS) == "environment":
            found += [_from(key, self._secret) for key in KEY_NAMES if key not in present]
        return found

    def _role_environment(self, endpoint: str, *, own_keys: bool) -> dict[str, str]:
        """Return the variables with which a pod exchanges its token: its annotation asks for them, whatever
        `envFrom` brings."""
        found = {"AWS_ENDPOINT_URL_S3": endpoint}
        if not own_keys:
            found |= {
                "AWS_ENDPOINT_URL_STS": endpoint,
                "AWS_ROLE_ARN": f"arn:aws:iam:::role/{self._role}",
                "AWS_WEB_IDENTITY_TOKEN_FILE": f"{TOKEN_MOUNT}/token",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
        return found


KEY_NAMES: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def credentials_policy(datasets: Iterable[DatasetInfo]) -> dict[str, Any]:
    """Return the policy of a pod's keys: read its datasets, and the views of buckets that are whole
    datasets."""
    statements: list[dict[str, Any]] = []
    for each in datasets:
        objects = [f"arn:aws:s3:::{each.bucket}/{each.prefix}*"]
        listing: dict[str, Any] = {
            "Effect": "Allow",
            "Action": "s3:ListBucket",
            "Resource": [f"arn:aws:s3:::{each.bucket}"],
        }
        if each.prefix:
            listing["Condition"] = {"StringLike": {"s3:prefix": f"{each.prefix}*"}}
        else:
            objects.append(f"arn:aws:s3:::{each.bucket}--*/*")
            listing["Resource"].append(f"arn:aws:s3:::{each.bucket}--*")
        statements += [{"Effect": "Allow", "Action": "s3:GetObject", "Resource": objects}, listing]
    return {"Version": "2012-10-17", "Statement": statements}


def _has(key: str) -> dict[str, Any]:
    return {"key": key, "operator": "Exists"}


def _from(key: str, secret: str) -> dict[str, Any]:
    return {"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
