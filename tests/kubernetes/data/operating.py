"""The operator's loops of datasets, loads and views, over one real daemon: passes are made by hand, and the
operator may be killed at every call it makes."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Secret
from lightkube.types import PatchType

from meshoperator.controllers.dataset_controller import DatasetController
from meshoperator.controllers.load_controller import LoadController
from meshoperator.controllers.view_controller import ViewController
from meshoperator.planners.placement_inputs import PlacementBoard
from meshoperator.resources import KINDS, parse
from tests.kubernetes.dying import Calls, DiedError, Dying, Ear
from tests.kubernetes.test_crds_served import BY_NAME, create, resource
from tests.kubernetes.test_webhook import GROUP_VERSION, dataset, until
from tests.support import sampling

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lightkube import Client

    from meshoperator.daemon_client import DaemonClient
    from meshoperator.kube.client import Kube
    from tests.kubernetes.looping import Loop
    from tests.support.daemons import Daemon

STATUSES = {kind.name: kind.status for kind in KINDS}
PHOTO = 100 << 10


@dataclass
class Operator:
    """The loops of one process, over one daemon."""

    kube: Client
    loop: Loop
    daemon: Daemon
    namespace: str
    own: Kube
    daemons: DaemonClient
    source: Path
    now: Callable[[], float] = time.time

    def loops(self, calls: Calls | None = None) -> dict[str, Any]:
        """As after a start: nothing is remembered."""
        own: Any = Dying(self.own, calls) if calls else self.own
        daemons: Any = Dying(self.daemons, calls) if calls else self.daemons
        self.ear = Ear()
        return {
            "MeshDataset": DatasetController(own, daemons, self.ear, self.now, PlacementBoard()),
            "MeshLoad": LoadController(own, daemons, self.ear, self.now),
            "MeshView": ViewController(own, daemons, self.ear, self.now),
        }

    def look(self, kind: str, name: str, calls: Calls | None = None) -> float | None:
        """One pass."""
        found: float | None = self.loop.run(self.loops(calls)[kind].reconcile(self.namespace, name))
        return found

    def status(self, kind: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = (
            self.kube.get(resource(BY_NAME[kind]), name, namespace=self.namespace).status or {}
        )
        parse(STATUSES[kind], found)  # what is written is what the kind says
        return found

    def until(self, kind: str, name: str, true: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """Passes until the status is so."""
        for _ in range(300):
            self.look(kind, name)
            found = self.status(kind, name)
            if true(found):
                return found
            time.sleep(0.1)
        raise AssertionError(found)

    def make(self, kind: str, name: str, spec: dict[str, Any]) -> None:
        document = {"apiVersion": GROUP_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
        create(self.kube, self.namespace, document)

    def change(self, kind: str, name: str, change: dict[str, Any]) -> None:
        self.kube.patch(
            resource(BY_NAME[kind]),
            name,
            change,
            namespace=self.namespace,
            patch_type=PatchType.MERGE,
        )

    def delete(self, kind: str, name: str) -> None:
        self.kube.delete(resource(BY_NAME[kind]), name, namespace=self.namespace)

    def gone(self, kind: str, name: str) -> bool:
        every = self.kube.list(resource(BY_NAME[kind]), namespace=self.namespace)
        return name not in {each.metadata.name for each in every if each.metadata}

    def ask(self, method: str, target: str) -> Any:
        answer = self.daemon.request(method, target)
        return json.loads(answer.body) if answer.status == 200 and answer.body else answer.status


def condition(status: dict[str, Any], kind: str) -> tuple[str, str, str]:
    found = next(each for each in status["conditions"] if each["type"] == kind)
    return found["status"], found["reason"], found["message"]


def keys(kube: Client, namespace: str, daemon: Daemon) -> None:
    """Root's, as the operator makes them."""
    root = {"AWS_ACCESS_KEY_ID": daemon.access_key, "AWS_SECRET_ACCESS_KEY": daemon.secret_key}
    kube.create(Secret(metadata=ObjectMeta(name="mesh-root", namespace=namespace), stringData=root))


def bucket_of(operator: Operator) -> str:
    """Of this test: the daemon is shared."""
    return f"b-{operator.namespace[-12:]}"


def backed(operator: Operator, **more: Any) -> None:
    dataset(
        operator.kube,
        operator.namespace,
        "photos",
        f"file://{operator.source}",
        bucket=bucket_of(operator),
        **more,
    )


def view(bucket: str, size: int) -> dict[str, Any]:
    ops = [
        {"op": "decode"},
        {"op": "resize", "args": {"size": size}},
        {"op": "encode", "args": {"format": "png"}},
    ]
    return {"clusterRef": "mesh", "bucket": bucket, "kind": "transform", "ops": ops}


def killed_at_every_call(
    operator: Operator,
    kind: str,
    make: Callable[[str], None],
    done: Callable[[dict[str, Any]], Any],
    calls: int,
) -> None:
    """Objects side by side: of each the operator dies at another call (in CI, at a third of them); then one
    that lives goes on."""
    tried = [*sampling.points(range(1, calls), 3, sampling.commit()), calls]
    names = {f"k{at}": Calls(at) for at in tried}

    def look(name: str) -> bool:
        """Whether it lives."""
        try:
            operator.look(kind, name, names[name])
        except DiedError:
            return False
        return not done(operator.status(kind, name))

    for name in names:
        make(name)
        for _ in range(3):
            if not look(name):
                break
    for name in names:
        operator.until(kind, name, done)
    for name, count in names.items():
        operator.delete(kind, name)
        with suppress(DiedError):
            operator.look(kind, name, count)
        until(lambda name=name: operator.look(kind, name) is None)  # type: ignore[misc]
        assert operator.gone(kind, name)
    assert list(names.values())[-1].made < calls, "there are more calls than were tried"
