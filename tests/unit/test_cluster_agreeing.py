"""Nodes of a mesh that were told other things than the others."""

from __future__ import annotations

import asyncio

from meshd.cluster.agreeing import other_domains, tell_domains
from meshd.control.memory import MemoryControl
from meshd.kit.clock import ManualClock
from meshwire.cluster import Node, transitions


def test_who_has_other_domains_than_most_is_named() -> None:
    async def run() -> None:
        control = MemoryControl(ManualClock())
        cluster = transitions.founded(Node("n1", "http://h:1"))
        for name in ("n2", "n3"):
            cluster = transitions.joined(cluster, Node(name, "http://h:2"))
        assert other_domains(control, cluster) == {}
        for name in ("n1", "n2", "n3", "gone"):
            await tell_domains(control, name, ("s3.b", "s3.a"))
        await tell_domains(control, "gone", ())
        assert other_domains(control, cluster) == {}
        await tell_domains(control, "n2", ("s3.a",))
        found = other_domains(control, cluster)
        assert set(found) == {"n2"}
        assert "--domain s3.a --domain s3.b: give all nodes the same" in found["n2"]

    asyncio.run(run())
