"""What routes promise over every history of a mesh that its transitions allow: nothing acknowledged is lost.

The world here is a few slots: who has which write, who goes by which map, who is cut off. A write is
acknowledged by the rule of `meshwire.cluster.routes`; nodes compare as rebalancers do.
"""

from __future__ import annotations

import random
from contextlib import suppress
from typing import TYPE_CHECKING

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from meshwire.cluster import Node, compute_placement, routes
from meshwire.cluster import transitions as turn
from meshwire.cluster.cluster_map import read_and_write_copies

if TYPE_CHECKING:
    from meshwire.cluster import ClusterMap

BUCKET = "bucket"
SLOTS = 8
IDS = ("a", "b", "c", "d")


def member(node_id: str) -> Node:
    return Node(node_id, f"http://{node_id}:1", zone=node_id if node_id < "c" else "z")


class Histories(RuleBasedStateMachine):
    """Maps are numbered; a node knows some version, and learns of newer ones when it is not cut off."""

    @initialize(copies=st.integers(1, 3), nodes=st.integers(1, 3))
    def found(self, copies: int, nodes: int) -> None:
        self.copies = copies
        cluster = turn.bootstrap_map(member("a"), SLOTS)
        for node_id in IDS[1:nodes]:  # before anything was written
            cluster = turn.join_node(cluster, member(node_id))
            for node in cluster.nodes:
                cluster = turn.mark_complete(cluster, node.node_id)
        self.maps, self.version = {cluster.version: cluster}, cluster.version
        self.known = {node_id: self.version for node_id in IDS}
        self.cut: set[str] = set()  # from the control store and from everybody
        self.has: dict[str, dict[int, set[int]]] = {n: {s: set() for s in range(SLOTS)} for n in IDS}
        self.acknowledged: dict[int, set[int]] = {s: set() for s in range(SLOTS)}
        self.began: dict[str, int] = {}
        self.writes = 0

    @property
    def map(self) -> ClusterMap:
        return self.maps[self.version]

    def copies_by(self, cluster: ClusterMap) -> int:
        count = cluster.copies_of_bucket(BUCKET)
        return self.copies if count is None else count.copies

    def relied(self, cluster: ClusterMap) -> int:
        return read_and_write_copies(self.copies_by(cluster))[0]

    def state(self, node_id: str) -> str:
        node = self.map.node(node_id)
        return "absent" if node is None else node.state

    def change(self, after: ClusterMap) -> None:
        if after.version != self.version:
            assert after.version > self.version
            self.maps[after.version], self.version = after, after.version

    # --- the map changes ----------------------------------------------------------------------------

    @rule(node_id=st.sampled_from(IDS))
    def come(self, node_id: str) -> None:
        if node_id in self.cut or self.state(node_id) not in ("absent", "away", "down"):
            return
        self.known[node_id] = self.version
        self.change(turn.join_node(self.map, member(node_id)))
        self.began.pop(node_id, None)

    @rule(node_id=st.sampled_from(IDS))
    def be_missed(self, node_id: str) -> None:
        if self.state(node_id) != "absent":
            self.change(turn.mark_node_away(self.map, node_id))

    @rule(node_ids=st.permutations(IDS), count=st.integers(2, 4))
    def be_missed_together(self, node_ids: list[str], count: int) -> None:
        there = [node_id for node_id in node_ids[:count] if self.state(node_id) != "absent"]
        self.change(turn.mark_nodes_away(self.map, there))

    @rule(node_id=st.sampled_from(IDS))
    def be_given_up(self, node_id: str) -> None:
        if self.state(node_id) == "away" and turn.can_lose_node(self.map, node_id, self.relied(self.map)):
            self.change(turn.mark_node_down(self.map, node_id))

    @rule(node_id=st.sampled_from(IDS))
    def be_drained(self, node_id: str) -> None:
        with suppress(turn.TransitionError):
            self.change(turn.drain_node(self.map, node_id))

    @rule(node_id=st.sampled_from(IDS))
    def stay(self, node_id: str) -> None:
        with suppress(turn.TransitionError):
            self.change(turn.cancel_drain(self.map, node_id))

    @rule(node_id=st.sampled_from(IDS), weight=st.integers(1, 5))
    def be_reweighed(self, node_id: str, weight: int) -> None:
        with suppress(turn.TransitionError):
            self.change(turn.set_node_weight(self.map, node_id, weight))

    @rule(wanted=st.integers(1, 4))
    def be_recounted(self, wanted: int) -> None:
        with suppress(turn.TransitionError):
            self.change(turn.set_bucket_copies(self.map, BUCKET, 1, self.copies_by(self.map), wanted))

    @rule(node_id=st.sampled_from(IDS))
    def leave(self, node_id: str) -> None:
        with suppress(turn.TransitionError):
            self.change(turn.remove_node(self.map, node_id))
            self.has[node_id] = {s: set() for s in range(SLOTS)}  # its disk is used for something else

    # --- who knows what -----------------------------------------------------------------------------

    @rule(node_id=st.sampled_from(IDS))
    def learn(self, node_id: str) -> None:
        if node_id not in self.cut:
            self.known[node_id] = self.version

    @rule(node_id=st.sampled_from(IDS))
    def be_cut_off(self, node_id: str) -> None:
        self.cut ^= {node_id}

    # --- comparing ----------------------------------------------------------------------------------

    @rule(node_id=st.sampled_from(IDS))
    def begin_comparing(self, node_id: str) -> None:
        if node_id not in self.cut and self.map.must_sync(node_id):
            self.known[node_id] = self.version
            self.began[node_id] = self.version

    @precondition(lambda self: self.began)
    @rule(data=st.data())
    def compare(self, data: st.DataObject) -> None:
        self.take_all(data.draw(st.sampled_from(sorted(self.began))))

    def take_all(self, node_id: str) -> None:
        """Take what the readers have, of every slot: from those who go by this map, or a newer one."""
        version = self.began.pop(node_id)
        if node_id in self.cut:
            return
        cluster = self.maps[version]
        for slot in range(SLOTS):
            route = routes(cluster, self.copies_by(cluster)).route_of_slot(slot)
            if node_id not in {node.node_id for node in route.write_set}:
                continue
            sources = [node.node_id for node in route.read_set if node.node_id != node_id]
            if not sources and route.read_set:
                continue  # it is the only one that is sure to have everything
            if not route.read_set and self._anybody(cluster, slot):
                return  # who has it does not answer
            able = [source for source in sources if source not in self.cut]
            if sources and not able:
                return
            if able:
                self.known[able[0]] = max(self.known[able[0]], version)
                self.has[node_id][slot] |= self.has[able[0]][slot]
        with suppress(turn.TransitionError):
            self.change(turn.mark_complete(self.map, node_id, version))

    def _anybody(self, cluster: ClusterMap, slot: int) -> bool:
        """Whether some owner that is not given up may have it."""
        owners = compute_placement(cluster, self.relied(cluster), "present").owners_of_slot(slot)
        return any(node.state not in ("down", "joining") for node in owners)

    # --- writing ------------------------------------------------------------------------------------

    @rule(node_id=st.sampled_from(IDS), slot=st.integers(0, SLOTS - 1))
    def write(self, node_id: str, slot: int) -> None:
        """A decider by the map it knows: it commits, tells the writers, and answers when all have it."""
        cluster = self.maps[self.known[node_id]]
        route = routes(cluster, self.copies_by(cluster)).route_of_slot(slot)
        if route.primary is None or route.primary.node_id != node_id:
            return
        self.writes += 1
        self.has[node_id][slot].add(self.writes)
        for writer in route.write_set:
            if writer.node_id == node_id:
                continue
            reached = not ({node_id, writer.node_id} & self.cut)
            if not reached or self.known[writer.node_id] > cluster.version:
                return  # never acknowledged
            self.known[writer.node_id] = max(self.known[writer.node_id], cluster.version)
            self.has[writer.node_id][slot].add(self.writes)
        self.acknowledged[slot].add(self.writes)

    # --- the promises -------------------------------------------------------------------------------

    @invariant()
    def one_decider_and_it_reads_and_writes(self) -> None:
        for slot in range(SLOTS):
            route = routes(self.map, self.copies_by(self.map)).route_of_slot(slot)
            if route.primary is not None:
                assert route.primary == route.read_set[0]
                assert route.primary in route.write_set
            assert len(set(route.write_set)) == len(route.write_set)

    @invariant()
    def what_was_acknowledged_is_at_every_reader(self) -> None:
        for slot in range(SLOTS):
            for reader in routes(self.map, self.copies_by(self.map)).route_of_slot(slot).read_set:
                missing = self.acknowledged[slot] - self.has[reader.node_id][slot]
                assert not missing, f"{reader.node_id} lacks {missing} of slot {slot} by {self.map.nodes}"


TestHistories = Histories.TestCase
TestHistories.settings = settings(deadline=None, max_examples=40, stateful_step_count=60)


def check(history: Histories) -> None:
    history.one_decider_and_it_reads_and_writes()
    history.what_was_acknowledged_is_at_every_reader()


@pytest.mark.parametrize("gone", ["a", "b"])
@pytest.mark.parametrize("recounted_first", [True, False])
def test_fewer_copies_are_not_read_at_a_node_that_lacks_what_it_missed(
    gone: str, recounted_first: bool
) -> None:
    """One of two owners is away while the other takes a write alone; one copy is wanted meanwhile."""
    history = Histories()
    history.found(copies=2, nodes=2)
    other = "b" if gone == "a" else "a"
    history.be_missed(gone)
    history.learn(other)
    if recounted_first:
        history.be_recounted(1)
    for slot in range(SLOTS):
        history.write(other, slot)
    if not recounted_first:
        history.be_recounted(1)
    history.come(gone)
    for slot in range(SLOTS):
        history.write(other, slot)  # by the map before
    check(history)
    assert all(history.acknowledged.values())
    assert history.relied(history.map) == 2
    for node_id in (gone, other):
        history.begin_comparing(node_id)
        history.take_all(node_id)
    check(history)
    assert history.copies_by(history.map) == 1


WALKS = [*range(600), 22_119, 23_996]
"""The last two passed a node that had returned in the meantime, in an earlier version."""


def test_histories_in_which_nodes_leave_together_lose_nothing() -> None:
    """Random walks, most of whose steps lose or bring back nodes, or write to every slot."""
    for seed in WALKS:
        _walk(random.Random(seed))


def _walk(chance: random.Random) -> None:
    history, count = Histories(), chance.choice([2, 3])
    history.found(copies=chance.choice([2, 2, 3]), nodes=count)
    ids = IDS[:count]
    for _ in range(40):
        kind, node_id = chance.random(), chance.choice(ids)
        if kind < 0.12:
            together = chance.sample(ids, count)
            history.be_missed_together([*together, *IDS[count:]], chance.randint(2, count))
        elif kind < 0.22:
            history.be_missed(node_id)
        elif kind < 0.42:
            history.come(node_id)
        elif kind < 0.58:
            history.learn(node_id)
        elif kind < 0.63:
            history.be_cut_off(node_id)
        elif kind < 0.75:
            history.begin_comparing(node_id)
            if node_id in history.began and chance.random() < 0.8:
                history.take_all(node_id)
        elif kind < 0.78:
            history.be_given_up(node_id)
        elif kind < 0.80:
            history.be_drained(node_id)
        elif kind < 0.82:
            history.stay(node_id)
        else:
            for slot in range(SLOTS):
                history.write(node_id, slot)
        check(history)


@pytest.mark.parametrize("first", ["a", "b"])
def test_nodes_that_leave_together_need_not_wait_for_each_other(first: str) -> None:
    """Neither accepted a write without the other, so each serves alone; what it then accepts it alone has."""
    history = Histories()
    history.found(copies=2, nodes=2)
    second = "b" if first == "a" else "a"
    for slot in range(SLOTS):
        history.write("a", slot)
        history.write("b", slot)
    history.be_missed_together(["a", "b", "c", "d"], 2)
    history.come(first)
    history.learn(first)
    check(history)
    for slot in range(SLOTS):
        assert routes(history.map, 2).route_of_slot(slot).primary == history.map.node(first)
        history.write(first, slot)
    assert all(len(found) == 2 for found in history.acknowledged.values())
    history.be_missed(first)
    history.come(second)
    check(history)
    for slot in range(SLOTS):
        assert routes(history.map, 2).route_of_slot(slot).primary is None
    history.come(first)
    for node_id in (first, second):
        history.begin_comparing(node_id)
        history.take_all(node_id)
    check(history)
    assert {node.state for node in history.map.nodes} == {"up"}


def test_the_last_of_three_is_not_passed_by_those_that_left_with_it() -> None:
    """`c` goes on alone after `a` and `b`, which left together."""
    history = Histories()
    history.found(copies=3, nodes=3)
    history.be_missed_together(["a", "b", "c", "d"], 2)
    history.learn("c")
    for slot in range(SLOTS):
        history.write("c", slot)
    assert all(history.acknowledged.values())
    history.be_missed("c")
    for node_id in ("b", "a"):
        history.come(node_id)
        check(history)
        assert routes(history.map, 3).route_of_slot(0).primary is None
    history.come("c")
    check(history)
    assert routes(history.map, 3).route_of_slot(0).primary == history.map.node("c")
