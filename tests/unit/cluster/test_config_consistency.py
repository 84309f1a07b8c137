"""Nodes of a mesh that were told other things than the others."""

from __future__ import annotations

import asyncio

from meshd.cluster.peer_checks import domain_mismatches, publish_domains
from meshwire.cluster import Node, transitions
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl


def test_who_has_other_domains_than_most_is_named() -> None:
    async def run() -> None:
        control = MemoryControl(ManualClock())
        cluster = transitions.bootstrap_map(Node("n1", "http://h:1"))
        for name in ("n2", "n3"):
            cluster = transitions.join_node(cluster, Node(name, "http://h:2"))
        assert domain_mismatches(control, cluster) == {}
        for name in ("n1", "n2", "n3", "gone"):
            await publish_domains(control, name, ("s3.b", "s3.a"))
        await publish_domains(control, "gone", ())
        assert domain_mismatches(control, cluster) == {}
        await publish_domains(control, "n2", ("s3.a",))
        found = domain_mismatches(control, cluster)
        assert set(found) == {"n2"}
        assert "--domain s3.a --domain s3.b: use the same ones" in found["n2"]

    asyncio.run(run())
