"""A mesh that loses power as a whole: three daemons and their etcd, each on a forgetful file system.

In the end one of them never returns. What was acknowledged is at every node that is left.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any, Final

from botocore.exceptions import BotoCoreError, ClientError

from meshd.control.control_api import ControlError
from tests.powercuts.history import SYNC_SECONDS, Report, as_after_a_boot, oldest_kept
from tests.powercuts.readiness import is_late, start_seconds
from tests.powercuts.scene import FILE_SYSTEM
from tests.powercuts.traffic import DAMAGED
from tests.support.daemon_cluster import DaemonCluster
from tests.support.daemons import DaemonFailedError
from tests.support.fuse_mount import mounted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.powercuts.traffic import Traffic
    from tests.support.daemons import Daemon

NODES: Final = ("n1", "n2", "n3")
_CLIENTS: Final = 6
PATIENCE: Final = 90.0
_TRIES: Final = 60
_EARLY: Final = 0.3
"""Of the lives, in which nodes are compared before they have compared themselves."""
_BUSY: Final = ("SlowDown", "(503)", ": 503 ", "onnect")
"""In what is said by a mesh that has just started, or by a node that ends."""


class ManyNodesScene:
    """Several nodes through any number of cuts: what writers do to them, and what is found at each node."""

    def __init__(self, place: Path, seed: int, traffic: Sequence[Traffic], *, relaxed: bool) -> None:
        self.report, self._place = Report(), place
        self._chance, self._relaxed = random.Random(seed), relaxed
        self._traffic, self._cut_at = traffic, 0.0
        self._logs: dict[str, str] = {}

    def cut(self, seconds: float) -> None:
        """Start all, compare what is there, write for so long, and cut the power of all at once."""
        raise NotImplementedError

    def finish(self) -> None:
        """Start once more and compare."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends what still runs."""
        raise NotImplementedError

    def _kill(self) -> None:
        """All processes that have lost power."""
        raise NotImplementedError

    def keep(self, folder: Path) -> str:
        """Keep what is on the disks after a life in which something was wrong, and the logs; return where."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._place / "source", folder, ignore=shutil.ignore_patterns("*.sock"))
        for name, said in self._logs.items():
            (folder / f"{name}.log").write_text(said)
        (folder / "found.txt").write_text(str(self.report))
        return f"kept in {folder}"

    def _judge_start(self, took: float) -> None:
        """Of the daemons, since the control store answers. These scenes have few objects."""
        self.report.slowest = max(self.report.slowest, took)
        if is_late(took, 0):
            self.report.add(f"ready after {took:.1f} s")

    def _count(self) -> None:
        self.report.cuts += 1
        self.report.acknowledged = sum(traffic.acknowledged for traffic in self._traffic)
        self.report.interrupted = sum(traffic.interrupted for traffic in self._traffic)

    # --- writers

    def _prepare(self, node: Daemon) -> None:
        with closing(node.client()) as client:
            for traffic in self._traffic:
                traffic.prepare(node, client)

    def _write(self, nodes: Sequence[Daemon], seconds: float) -> None:
        ended = threading.Event()
        writers = [
            threading.Thread(
                target=self._writer,
                args=(nodes[number % len(nodes)], number, self._chance.randrange(1 << 31), ended),
            )
            for number in range(_CLIENTS)
        ]
        for writer in writers:
            writer.start()
        try:
            self._disturb(seconds)
            self._stop(nodes)
            self._cut_at = time.monotonic()
            for traffic in self._traffic:
                traffic.cut_off()
        finally:
            self._kill()
            ended.set()
            for writer in writers:
                writer.join(120)

    def _stop(self, nodes: Sequence[Daemon]) -> None:
        """None of them answers any more; the power fails."""
        for node in nodes:
            node.pause()

    def _disturb(self, seconds: float) -> None:
        """What happens while writers write, for so long."""
        time.sleep(seconds)

    def _writer(self, node: Daemon, number: int, seed: int, ended: threading.Event) -> None:
        chance = random.Random(seed)
        with closing(node.client()) as client:
            while not ended.is_set():
                try:
                    chance.choice(self._traffic).change(node, client, number, chance)
                except (ClientError, BotoCoreError, OSError):
                    if not ended.is_set():
                        time.sleep(0.02)

    # --- what is found

    def _compare(self, nodes: Sequence[Daemon]) -> None:
        since = oldest_kept(self._cut_at, relaxed=self._relaxed)
        for node in nodes:
            with closing(node.client()) as client:
                for traffic in self._traffic:
                    for name, history in sorted(traffic.histories.items()):
                        value = _found(traffic, node, client, name)
                        if not traffic.allows(name, value, since):
                            told = "; ".join(each.told(self._cut_at) for each in history.attempts)
                            self.report.add(f"{name} at {node.endpoint}: found {value}, after {told}")
        for traffic in self._traffic:
            for name in traffic.histories:
                traffic.after_cut(name, since)

    def _agree(self, nodes: Sequence[Daemon], *, settle: bool = False) -> None:
        """What was in doubt is decided once the nodes have compared: all show the same. With `settle`, it is
        what writers go on from."""
        for traffic in self._traffic:
            for name in sorted(traffic.histories) if traffic.compared or not settle else ():
                found = {}
                for node in nodes:
                    with closing(node.client()) as client:
                        found[node.endpoint] = _found(traffic, node, client, name)
                value = next(iter(found.values()))
                if len(set(found.values())) == 1:
                    if settle and not str(value).startswith(DAMAGED):
                        traffic.settle(name, value)
                else:
                    self.report.add(f"{name}: the nodes have compared and differ: {found}")


class MeshScene(ManyNodesScene):
    """A mesh through any number of cuts. `options` are of the nodes' file systems; that of etcd keeps names
    as ext4 does. `args`: more flags of the daemons."""

    states: tuple[str, ...] = ("up",)
    """Of nodes whose data is compared."""

    def __init__(
        self,
        place: Path,
        seed: int,
        *,
        traffic: Sequence[Traffic],
        relaxed: bool = False,
        options: Sequence[str] = (),
        args: Sequence[str] = (),
    ) -> None:
        super().__init__(place, seed, traffic, relaxed=relaxed)
        self._options = options
        self._mounts: dict[str, ExitStack] = {}
        self._disks: dict[str, int] = {}  # process ids of the file systems
        for name in (*NODES, "etcd"):
            for folder in ("source", "mesh"):
                shutil.rmtree(place / folder / name, ignore_errors=True)
                (place / folder / name).mkdir(parents=True)
        durability = ["--durability", "relaxed", "--sync-interval", str(SYNC_SECONDS)] if relaxed else []
        env = {"MESHD_SEGMENT_SIZE": "1MiB"}
        self._mesh = DaemonCluster(3, place / "mesh", args=[*durability, *args], env=env, etcd_syncs=True)

    def close(self) -> None:
        self._mesh.close()

    def cut(self, seconds: float) -> None:
        self._live(NODES, seconds)
        self._count()

    def finish(self) -> None:
        """Start without one of them, which never returns, and compare; then it is given up."""
        self._options = ()
        gone = self._chance.choice(NODES)
        self._live([name for name in NODES if name != gone], 0.0)

    def _live(self, names: Sequence[str], seconds: float) -> None:
        try:
            for name in (*names, "etcd"):
                self._power_on(name)
            self._start(names)
            nodes = [self._mesh[name] for name in names]
            if self._chance.random() < _EARLY or not seconds:
                self._compare(nodes)
            if seconds:
                self._await_decided(nodes)
                self._prepare(nodes[0])
                self._write(nodes, seconds)
            elif len(names) < len(NODES) and not self.report.wrong:
                self._give_up(*set(NODES) - set(names))
                self._compare(nodes)
                self._agree(nodes)
            elif not seconds and not self.report.wrong:
                self._rest()
        except (DaemonFailedError, AssertionError) as error:
            self.report.add(str(error).rstrip().rpartition("\n")[2])
        except ControlError as error:
            log = (self._place / "mesh" / "etcd" / "m0.log").read_text(errors="replace")
            self.report.add(f"{error}\n{log[-2000:]}")
        finally:
            self._kill()
            for name in list(self._mounts):
                self._power_off(name)

    def _await_decided(self, nodes: Sequence[Daemon]) -> None:
        """Every node has compared with the others, since all have started; what was in doubt is decided."""
        for name in NODES:
            self._mesh.await_value(name, "meshd_rebalance_uncompared_nodes", 0, PATIENCE)
        self._compare(nodes)
        if not self.report.wrong:
            self._agree(nodes, settle=True)

    def _rest(self) -> None:
        """In a life without writers, with all nodes."""

    def _power_on(self, name: str) -> None:
        """The disk of a node, or of etcd, is there."""
        options = ["--seed", str(self._chance.randrange(1 << 31))]
        options += ["--journal"] if name == "etcd" else self._options
        source, mount = self._place / "source" / name, self._place / "mesh" / name
        self._mounts[name] = ExitStack()
        served = mounted(source, mount, *options, module=FILE_SYSTEM)
        self._disks[name] = self._mounts[name].enter_context(served)

    def _power_off(self, name: str) -> None:
        """Its disk forgets what was not synced. The processes have ended."""
        self._mounts.pop(name).close()
        as_after_a_boot(self._place / "source" / name)

    def _start(self, names: Sequence[str]) -> None:
        self._mesh.etcd.__enter__()
        began = time.monotonic()
        self._mesh._together(names)
        wall, nodes = time.monotonic() - began, [self._mesh[name] for name in names]
        if self._cut_at:  # from the moment when etcd answers
            took = start_seconds(wall, [self._disks[name] for name in names], nodes)
            self._judge_start(took)
        self._mesh.await_map(
            lambda cluster: (
                all(
                    node.state in (self.states if node.node_id in names else ("away",))
                    for node in cluster.nodes
                )
                and len(cluster.nodes) == len(NODES)
            ),
            PATIENCE,
        )

    def _kill(self) -> None:
        for name, node in self._mesh.nodes.items():
            node.kill()
            self._logs[name] = node.output()  # the file of it loses power, too
        self._mesh.etcd.__exit__()

    def _give_up(self, name: str) -> None:
        """As `mesh cluster lost` does without `--anyway`: the others have all that it had."""
        self._mesh._change(name, "lost")
        self._mesh.await_map(lambda cluster: not cluster.is_rebalancing, PATIENCE)


def _found(traffic: Traffic, node: Daemon, client: Any, name: str) -> Any:
    """What a node says of a name; a mesh that has just started may refuse for some seconds."""
    for _ in range(_TRIES):
        value: Any = None
        try:
            value = traffic.find(node, client, name)
        except (ClientError, BotoCoreError, OSError) as error:
            value = f"damaged: {error}"
        if not any(busy in str(value) for busy in _BUSY):
            return value
        time.sleep(0.5)
    return value
