"""A short schedule over real nodes, and the plan of faults."""

from __future__ import annotations

import pytest

from tests.linearizability.faults import KINDS, NETWORK, plan
from tests.linearizability.running import run
from tests.support.required import require_etcd

require_etcd()


@pytest.mark.timeout(400)
def test_no_history_under_faults_violates_the_promises() -> None:
    outcome = run(1, 12, clients=8)
    shown = [f"{history.why()}\n{history.shrink().timeline()}" for history in outcome.wrong]
    assert shown == [], "\n".join([str(outcome), *shown])
    assert outcome.operations > 500, outcome


def test_a_plan_is_a_function_of_its_seed() -> None:
    assert plan(7, 3, 100) == plan(7, 3, 100) != plan(8, 3, 100)
    kinds = {fault.kind for seed in range(20) for step in plan(seed, 3, 100) for fault in step.faults}
    assert kinds == set(KINDS)


def test_faults_of_a_step_have_hosts_of_their_own_one_network_and_one_etcd() -> None:
    for step in (step for seed in range(20) for step in plan(seed, 3, 500)):
        hosts = [fault.host for fault in step.faults]
        assert len(set(hosts)) == len(hosts), step
        assert all(fault.host != fault.other for fault in step.faults), step
        assert sum(fault.kind in NETWORK for fault in step.faults) <= 1, step
        assert sum("etcd" in fault.kind or fault.kind == "restart" for fault in step.faults) <= 1, step
