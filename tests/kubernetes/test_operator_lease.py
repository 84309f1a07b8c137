"""The operator's Lease on a real API server: it is deleted with the leader's pod, and outlives another's."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from lightkube import ApiError, AsyncClient, KubeConfig
from lightkube.models.core_v1 import Container, PodSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import Pod

from meshoperator.kube.client import Kube
from meshoperator.kube.leader_election import LeaderElection
from meshoperator.manager import now_stamp
from tests.support.bounded_wait import await_true

if TYPE_CHECKING:
    from pathlib import Path

    from lightkube import Client


def test_the_lease_goes_with_the_last_leaders_pod(kube: Client, kubeconfig: Path, namespace: str) -> None:
    pods = {name: create_pod(kube, namespace, name) for name in ("one", "other")}

    async def act(name: str, *, release: bool) -> bool:
        client = AsyncClient(config=KubeConfig.from_file(kubeconfig).get())
        election = LeaderElection(
            *(Kube(client), namespace, "op", name),
            stamp=now_stamp,
            monotonic=time.monotonic,
            pod=(name, pods[name]),
        )
        try:
            leads = await election.renew_or_acquire()
            if release:
                await election.release()
        finally:
            await client.close()
        return leads

    assert asyncio.run(act("one", release=True))
    assert asyncio.run(act("other", release=False)), "it was given back"
    owners = kube.get(Lease, "op", namespace=namespace).to_dict()["metadata"]["ownerReferences"]
    assert [owner["uid"] for owner in owners] == [pods["other"]]
    kube.delete(Pod, "one", namespace=namespace, grace_period=0)
    await_true(lambda: not exists(kube, Pod, "one", namespace))
    time.sleep(3)  # what is deleted with a pod is deleted within a second
    assert exists(kube, Lease, "op", namespace)
    kube.delete(Pod, "other", namespace=namespace, grace_period=0)
    await_true(lambda: not exists(kube, Lease, "op", namespace))


def create_pod(kube: Client, namespace: str, name: str) -> str:
    """Create a pod that no node runs; return its uid."""
    pod = Pod(
        metadata=ObjectMeta(name=name, namespace=namespace),
        spec=PodSpec(containers=[Container(name="c", image="none")], nodeSelector={"there": "is-none"}),
    )
    return str(kube.create(pod).to_dict()["metadata"]["uid"])


def exists(kube: Client, kind: type[Pod | Lease], name: str, namespace: str) -> bool:
    """Whether an object is there."""
    try:
        kube.get(kind, name, namespace=namespace)
    except ApiError as error:
        if error.status.code == 404:
            return False
        raise
    return True
