"""A mesh that loses power while data moves between its nodes or is repaired, and one whose nodes lose power
one after the other during a drain.

In the end all data is in place again; then a node never returns, as in every mesh scene.
"""

from __future__ import annotations

import json
import shutil
import time
from typing import TYPE_CHECKING, Any, Final

from tests.faults.hosts import corrupt
from tests.powercuts.history import SLACK, SYNC_SECONDS
from tests.powercuts.mesh_scene import NODES, PATIENCE, MeshScene

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshwire.cluster import ClusterMap
    from tests.support.daemons import Daemon

_SET_BACK: Final = "the index is back at its last checkpoint"
_COMPARED: Final = "compared with the other owners"
_STEP: Final = 0.1


class MovementScene(MeshScene):
    """A drain, another weight, an emptied disk or damage in each life in which those before have ended; the
    power of all is cut in the middle."""

    states = ("up", "draining", "joining", "returning")
    _damaged = ""
    """The node with damage that may not be repaired yet."""

    def finish(self) -> None:
        """Let data come to rest, then go on with one node less."""
        self._options = ()
        self._live(NODES, 0.0)
        super().finish()

    def _start(self, names: Any) -> None:
        super()._start(names)
        if self._damaged:  # before anything is compared: reads of large objects do not verify
            self._scrub(self._damaged)
            _await(lambda: self._is_repaired(self._damaged), "the damage is not repaired")
            self._damaged = ""

    def _await_decided(self, nodes: Sequence[Daemon]) -> None:
        self._compare(nodes)  # while data moves, something is in doubt in every life

    def _rest(self) -> None:
        self._cancel_drains()
        self._mesh.await_map(_is_whole, PATIENCE)
        self._await_compared()
        time.sleep(2.0)  # relaxed stores keep what is that old
        self._compare([self._mesh[name] for name in NODES])

    # --- what happens to the nodes

    def _disturb(self, seconds: float) -> None:
        time.sleep(self._chance.uniform(0.1, 0.5) * seconds)
        name = self._chance.choice(NODES)
        act = self._chance.choice((self._drain, self._reweigh, self._empty, self._damage))
        if _is_whole(self._mesh.map_of()) and all(map(self._has_compared, NODES)):
            act(name)
        elif self._chance.random() < 0.4:
            self._cancel_drains()
        time.sleep(self._chance.uniform(0.1, 1.0) * seconds)
        self.report.moving += not _is_whole(self._mesh.map_of()) or bool(self._damaged)

    def _drain(self, name: str) -> None:
        self._mesh._change(name, "drain")

    def _cancel_drains(self) -> None:
        for node in self._mesh.map_of().nodes:
            if node.leaving:
                self._mesh._change(node.node_id, "undrain")

    def _reweigh(self, name: str) -> None:
        self._mesh._change(name, "reweigh", weight=self._chance.choice((1, 2, 4)))

    def _empty(self, name: str) -> None:
        """Its disk is replaced by an empty one."""
        node = self._mesh[name]
        node.kill()
        self._power_off(name)
        for each in (self._place / "source" / name).iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        self._power_on(name)
        node.up(PATIENCE)

    def _damage(self, name: str) -> None:
        """Bytes of it change, and it is told to look for that."""
        self._damaged = name
        corrupt(self._mesh[name].data_dir, self._chance)
        self._scrub(name)
        if self._relaxed:  # what is damaged here is on the disks of the others, then
            time.sleep(SYNC_SECONDS + SLACK)

    def _scrub(self, name: str) -> None:
        self._scrubbed = self._ask(name, "POST", f"/-/cluster/nodes/{name}", {"action": "scrub"})["asked"]

    _scrubbed = 0

    # --- what they say

    def _is_repaired(self, name: str) -> bool:
        scrub = self._row(name)["scrub"]
        return bool(
            scrub and scrub["asked"] >= self._scrubbed and not scrub["running"] and not scrub["quarantined"]
        )

    def _has_compared(self, name: str) -> bool:
        """Whether a node that went back to a checkpoint has what it lost from the others."""
        if not self._relaxed:  # only its cache went back
            return True
        output = self._mesh[name].output()
        return output.rfind(_COMPARED) >= output.rfind(_SET_BACK)

    def _await_compared(self) -> None:
        _await(lambda: all(map(self._has_compared, NODES)), "a node has not compared")

    def _row(self, name: str) -> dict[str, Any]:
        rows = self._ask(name, "GET", "/-/cluster")["nodes"]
        found: dict[str, Any] = next(row for row in rows if row["id"] == name)
        return found

    def _ask(self, name: str, method: str, target: str, document: Any = None) -> Any:
        body = b"" if document is None else json.dumps(document).encode()
        answer = self._mesh[name].request(method, target, body)
        assert answer.status == 200, answer.body
        return json.loads(answer.body)


class RollingScene(MovementScene):
    """A node is drained while the power of each node, and of etcd, is cut, one after the other."""

    def _disturb(self, seconds: float) -> None:
        if _is_whole(self._mesh.map_of()):
            self._drain(self._chance.choice(NODES))
        else:
            self._cancel_drains()
        for name in self._chance.sample((*NODES, "etcd"), len(NODES) + 1):
            time.sleep(self._chance.uniform(0.1, 0.5) * seconds)
            self.report.moving += not _is_whole(self._mesh.map_of())
            self._cut_one(name)
            self.report.cuts += 1

    def _cut_one(self, name: str) -> None:
        """The others go on. The next one is not cut before this one has all data again."""
        if name == "etcd":
            self._mesh.etcd.__exit__()
            self._power_off(name)
            self._power_on(name)
            self._mesh.etcd.__enter__()
        else:
            node = self._mesh[name]
            node.pause()
            node.kill()
            self._power_off(name)
            self._power_on(name)
            node.up(PATIENCE)
        self._mesh.await_map(
            lambda cluster: all(node.state in ("up", "draining") for node in cluster.nodes), PATIENCE
        )
        self._await_compared()


def _is_whole(cluster: ClusterMap) -> bool:
    return not cluster.is_rebalancing and all(node.state == "up" for node in cluster.nodes)


def _await(true: Callable[[], bool], otherwise: str) -> None:
    until = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < until, otherwise
        time.sleep(_STEP)
