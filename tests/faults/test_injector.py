"""Faults of several hosts overlap where they may, those of one host never."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, cast

from tests.faults.injector import Injector
from tests.faults.schedules import AIMED, Fault, loss, schedule

if TYPE_CHECKING:
    import random

    from tests.faults.hosts import Hosts

LONG = 0.3


class Recorder:
    """Stands for hosts: writes down what is done to which."""

    def __init__(self) -> None:
        self.names, self.events, self.hurt, self.most = ["n1", "n2", "n3"], list[str](), set[int](), 0
        self._lock = threading.Lock()

    def inflict(self, fault: Fault, _: random.Random) -> None:
        with self._lock:
            assert fault.host not in self.hurt
            self.hurt.add(fault.host)
            self.most = max(self.most, len(self.hurt))
            self.events.append(f"{fault.kind} {fault.host}")

    def undo(self, fault: Fault) -> None:
        with self._lock:
            self.hurt.remove(fault.host)
            self.events.append(f"end {fault.host}")

    def whole(self) -> None:
        assert not self.hurt
        self.events.append("whole")


def inflicted(*faults: Fault) -> Recorder:
    recorder = Recorder()
    with Injector(cast("Hosts", recorder), 1) as injector:
        for fault in faults:
            injector.inflict(fault)
        injector.finish()
        assert injector.injected == len(faults)
    assert not recorder.hurt
    return recorder


def pause(host: int, *, settled: bool = False) -> Fault:
    return Fault("pause", host, (host + 1) % 3, 0.0, LONG, settled)


def test_faults_of_different_hosts_overlap() -> None:
    assert inflicted(pause(0), pause(1), pause(2)).most == 3


def test_a_host_has_one_fault_at_a_time() -> None:
    recorder = inflicted(pause(0), pause(0), Fault("partition", 1, 0, 0.0, LONG, settled=False), pause(0))
    assert recorder.events[:4] == ["pause 0", "end 0", "pause 0", "end 0"]
    assert recorder.events[4:] == ["partition 1", "end 1", "pause 0", "end 0"]


def test_a_settled_fault_is_alone_on_a_whole_mesh() -> None:
    recorder = inflicted(pause(0), pause(1, settled=True), pause(2))
    assert recorder.events == ["pause 0", "end 0", "whole", "pause 1", "end 1", "pause 2", "end 2"]
    assert recorder.most == 1


def test_a_schedule_and_its_loss_are_functions_of_the_seed() -> None:
    assert schedule(7, 3, 9) == schedule(7, 3, 9) != schedule(8, 3, 9)
    losses = [loss(seed, 3) for seed in range(200)]
    assert losses == [loss(seed, 3) for seed in range(200)]
    assert {found.fault.kind for found in losses} == set(AIMED)
    assert all(found.victim != found.fault.host for found in losses)
    assert {found.first for found in losses} == {True, False}
    assert all(found.fault.seconds <= 1 for found in losses if found.first)
    assert {found.fault.kind for found in (loss(seed, 3, ("kill", "full")) for seed in range(9))} == {"kill"}
