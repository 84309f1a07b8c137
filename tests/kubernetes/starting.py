"""How the tests' kubelet starts a pod: its mounts, environment and arguments, as they are on this machine.

Law: what a pod names and is not there yet is NotYetError; the kubelet tries again.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from base64 import b64decode
from typing import TYPE_CHECKING, Any

from lightkube import ApiError
from lightkube.models.authentication_v1 import TokenRequestSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ConfigMap, Secret, ServiceAccountToken

from tests.support.earlier_release import code_path
from tests.support.fork_server import launch
from tests.support.interpreters import launch_python

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.kubernetes.running import Running


PROGRAMS = {
    "meshd": [sys.executable, "-m", "meshd"],
    "operator": [sys.executable, "-m", "meshoperator"],
    "i": ["sleep", "600"],  # a training pod
}
_FIELDS = {
    "metadata.name": lambda pod: pod["metadata"]["name"],
    "metadata.namespace": lambda pod: pod["metadata"]["namespace"],
    "metadata.uid": lambda pod: pod["metadata"]["uid"],
    "spec.nodeName": lambda pod: pod["spec"]["nodeName"],
}


class NotYetError(Exception):
    """Something that a pod names is not there yet."""


class NoImageError(Exception):
    """Nobody has such an image."""


class Starting:
    """`place`: where pods and volumes lie; `nodes`: the disks of machines, by name; `checkouts`: by tag of an
    image, whose program it is, where it is not this checkout's."""

    def __init__(
        self,
        client: Any,
        kubeconfig: Path,
        place: Path,
        namespace: str,
        nodes: Mapping[str, Path],
        checkouts: Mapping[str, Path],
    ) -> None:
        self._client, self._config, self._place = client, kubeconfig, place
        self._namespace, self._nodes, self._checkouts = namespace, nodes, checkouts

    def start(self, running: Running) -> None:
        """Start its process. Raises NotYetError, NoImageError."""
        pod = running.document
        (container,) = pod["spec"]["containers"]
        image, _, tag = str(container["image"]).rpartition("/")[2].partition("@")[0].partition(":")
        if image not in PROGRAMS:
            raise NoImageError(container["image"])
        for mount in container.get("volumeMounts") or ():
            running.mounts[mount["mountPath"]] = self._mounted(running, mount)
        for volume in pod["spec"].get("volumes") or ():
            self._localize(running, volume)
        variables = {each["name"]: self._value(pod, each) for each in container.get("env") or ()}
        own = {name: self._here(running, value) for name, value in variables.items() if value is not None}
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith(("MESHD_", "MESH_", "KUBERNETES_"))
        }
        code = {"PYTHONPATH": code_path(self._checkouts[tag])} if tag in self._checkouts else {}
        account = {"KUBECONFIG": str(self._kubeconfig(running)), "HOSTNAME": running.name}
        environment = inherited | code | account | own
        arguments = [self._here(running, _expanded(each, variables)) for each in container.get("args") or ()]
        with (running.place / "log").open("ab") as log:
            if image == "meshd" and not code:
                running.process = launch(arguments, environment, log, stdout=log, folder=running.place)
                return
            if image == "operator" and not code:
                running.process = launch_python(
                    ["-m", "meshoperator", *arguments], environment, log, running.place
                )
                return
            program = PROGRAMS[image]
            if arguments[:1] == ["run"]:  # an earlier operator, which kopf starts
                program = [sys.executable, "-m", "kopf"]
            running.process = subprocess.Popen(
                [*program, *arguments], env=environment, stdout=log, stderr=log, cwd=running.place
            )

    def _value(self, pod: Mapping[str, Any], variable: Mapping[str, Any]) -> str | None:
        source = variable.get("valueFrom") or {}
        if "fieldRef" in source:
            return str(_FIELDS[source["fieldRef"]["fieldPath"]](pod))
        if "secretKeyRef" in source:
            wanted = source["secretKeyRef"]
            return self._read(Secret, wanted["name"])[wanted["key"]].decode()
        return str(variable.get("value") or "")

    def _here(self, running: Running, text: str) -> str:
        """Paths, addresses and names of the pod as they are on this machine."""
        for path in sorted(running.mounts, key=len, reverse=True):
            if text == path or text.startswith(path + "/"):
                return str(running.mounts[path]) + text[len(path) :]
        name = re.escape(running.name) + rf"\.[a-z0-9-]+\.{self._namespace}\.svc"
        text = text.replace("0.0.0.0", running.address).replace("[::]", running.address)
        return re.sub(name, running.address, text)

    def _mounted(self, running: Running, mount: Mapping[str, Any]) -> Path:
        pod = running.document
        volume = next(each for each in pod["spec"]["volumes"] if each["name"] == mount["name"])
        below = mount.get("subPath") or _expanded(mount.get("subPathExpr") or "", {"POD_NAME": running.name})
        if "hostPath" in volume:
            found: Path = (
                self._nodes[pod["spec"]["nodeName"]] / volume["hostPath"]["path"].lstrip("/") / below
            )
        elif "persistentVolumeClaim" in volume:
            found = self._place / "volumes" / volume["persistentVolumeClaim"]["claimName"] / below
        else:
            found = running.place / mount["name"] / below
        found.mkdir(parents=True, exist_ok=True)
        files: dict[str, bytes] = {}
        if "configMap" in volume:
            files = self._read(ConfigMap, volume["configMap"]["name"])
        elif "secret" in volume:
            try:
                files = self._read(Secret, volume["secret"]["secretName"])
            except NotYetError:
                if not volume["secret"].get("optional"):
                    raise
        for name, content in files.items():
            (found / name).write_bytes(content.replace(b"0.0.0.0", running.address.encode()))
        return found

    def _localize(self, running: Running, volume: Mapping[str, Any]) -> None:
        """Settings name files of other mounts: as they are on this machine."""
        if "configMap" in volume:
            paths = "|".join(map(re.escape, sorted(running.mounts, key=len, reverse=True)))
            for file in (running.place / volume["name"]).iterdir():
                text = file.read_text()
                file.write_text(re.sub(f"(?<= )({paths})(?=/)", lambda m: str(running.mounts[m[1]]), text))

    def _read(self, kind: Any, name: str) -> dict[str, bytes]:
        try:
            found = self._client.get(kind, name)
        except ApiError as error:
            if error.status.code == 404:
                raise NotYetError(name) from None
            raise
        if kind is Secret:
            return {key: b64decode(value) for key, value in (found.data or {}).items()}
        return {key: value.encode() for key, value in (found.data or {}).items()}

    def _kubeconfig(self, running: Running) -> Path:
        """With the rights of the pod's ServiceAccount, and no others."""
        account = running.document["spec"].get("serviceAccountName") or "default"
        wanted = ServiceAccountToken(
            metadata=ObjectMeta(), spec=TokenRequestSpec(audiences=[], expirationSeconds=3600)
        )
        try:
            token = str(self._client.create(wanted, account).status.token)
        except ApiError as error:
            if error.status.code == 404:
                raise NotYetError(account) from None
            raise
        document = json.loads(self._config.read_text())
        document["users"][0]["user"] = {"token": token}
        document["contexts"][0]["context"]["namespace"] = self._namespace
        path = running.place / "kubeconfig"
        path.write_text(json.dumps(document))
        return path


def _expanded(text: str, variables: Mapping[str, str | None]) -> str:
    return re.sub(r"\$\(([A-Z_]+)\)", lambda found: variables.get(found[1]) or found[0], text)
