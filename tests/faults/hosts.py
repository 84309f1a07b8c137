"""A mesh whose hosts can be hurt: network namespaces with disks of their own where the machine allows it, and
processes on loopback where it does not (then nothing happens to networks and disks).

Law: whatever was inflicted is undone by `undo`, and everything is gone after `close`. Faults of
different hosts may be inflicted and undone by several threads at once, those of one host one after the other.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, closing, suppress
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from meshd.control.etcd.gateway import decoded, encoded
from meshd.util.clock import CLOCK_SHIFT_ENV, SystemClock, write_clock_shift
from meshwire.cluster import parse_map
from tests.faults.clients import BUCKET
from tests.faults.networks import Networks, available
from tests.faults.schedules import JUMPS, KINDS, NETWORK
from tests.support.bounded_wait import await_end
from tests.support.daemon_cluster import DaemonCluster

if TYPE_CHECKING:
    import random
    from types import TracebackType

    from meshd.control.etcd.gateway import Gateway
    from meshwire.cluster import ClusterMap
    from tests.faults.schedules import Fault, Kind
    from tests.support.daemons import Daemon

_DISK = "size=1500m"
_RESTORED = 60.0  # seconds for damage to be restored from the other copies
_clock = SystemClock()
_ACCEPTED = 15.0  # seconds for the survivors to take a node for lost
_FLIPS = 64
_MAP = b"/shardmesh/cluster/map"
_STOPPED, _RUNNING = 0.18, 0.02  # seconds, turn by turn, of a slow host


class Hosts:
    """`size` nodes that run, n1 and following; `kinds`: what can happen to them here; `waited`: seconds until
    all was `whole`, so far."""

    def __init__(self, size: int, **options: Any) -> None:
        self._ends = ExitStack()
        self._place = Path(tempfile.mkdtemp(prefix="faults-"))
        self._ends.callback(shutil.rmtree, self._place, ignore_errors=True)
        self.networks = self._ends.enter_context(Networks(size)) if available() else None
        outside = "127.0.0.1" if self.networks is None else self.networks.outside
        audits = {f"n{n}": ("--audit-log", str(self._audit(f"n{n}"))) for n in range(1, size + 1)}
        self.mesh = DaemonCluster(size, self._place / "mesh", etcd_host=outside, own=audits, **options)
        self._ends.callback(self.mesh.close)
        self.names = sorted(self.mesh.nodes)
        for name in self.names:
            write_clock_shift(self._clock(name), 0.0)
            self.mesh[name].env[CLOCK_SHIFT_ENV] = str(self._clock(name))
        self._slow: dict[str, _Slow] = {}
        self.waited = 0.0

    def __repr__(self) -> str:
        return f"<Hosts {self.mesh} over {self.networks}>"

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What can be done here."""
        without = set() if self.networks is not None else {*NETWORK, "full"}
        return tuple(kind for kind in KINDS if kind not in without)

    def told(self, key: str) -> list[str]:
        """What the nodes were asked about a key, in order of time: lines of their audit logs."""
        lines = []
        for name in self.names:
            for line in self._audit(name).read_text().splitlines():
                entry = json.loads(line)
                if entry.get("key") == key:
                    lines.append((entry["time"], f"{name} {line}"))
        return [line for _, line in sorted(lines)]

    def holdings(self, key: str) -> list[str]:
        """What each node has of a key."""
        found = []
        for name in self.names:
            place = str(self.mesh[name].data_dir)
            command = [sys.executable, "-m", "meshd", "inspect", "record", "--data-dir", place, "--json"]
            done = subprocess.run(
                [*command, BUCKET, key], capture_output=True, text=True, check=False, timeout=60
            )
            found.append(f"{name}: {done.stdout}{done.stderr}")
        return found

    def maps(self) -> list[str]:
        """Every version of the cluster map there was, a line each."""
        found: dict[int, str] = {}
        with closing(self.mesh.etcd.gateway()) as gateway:
            key = encoded(_MAP)
            answer = gateway.call("kv/range", {"key": key}, repeatable=True)
            for revision in range(1, int(answer["header"]["revision"]) + 1):
                at = gateway.call("kv/range", {"key": key, "revision": revision}, repeatable=True)
                for entry in at.get("kvs", ()):
                    cluster = parse_map(decoded(entry["value"]))
                    nodes = [f"{n.node_id} {n.state}, complete {n.complete}" for n in cluster.nodes]
                    found[cluster.version] = f"map {cluster.version}, goal {cluster.goal}: {'; '.join(nodes)}"
        return [found[version] for version in sorted(found)]

    def away(self, gateway: Gateway) -> frozenset[tuple[str, int]]:
        """Nodes that are marked away or down in the control store now, each with the version since which."""
        gone = [node for node in self.cluster(gateway).nodes if node.state in ("away", "down")]
        return frozenset((node.node_id, node.turned) for node in gone)

    def cluster(self, gateway: Gateway) -> ClusterMap:
        """The map as the control store has it now."""
        answer = gateway.call("kv/range", {"key": encoded(_MAP)}, repeatable=True)
        return parse_map(decoded(answer["kvs"][0]["value"]))

    def start(self) -> None:
        """Everything up, and everybody in the map."""
        if self.networks is not None:
            for number, name in enumerate(self.names):
                node = self.mesh[name]
                node.namespace = self.networks.namespace(number)
                node.host = self.networks.address(number)
                self._mount(name)
        self.mesh.etcd.__enter__()
        self.mesh.start_all()

    def whole(self, patience: float = 120.0) -> None:
        """Waits until every node is up and has what it should. What cannot be restored any more is for the
        checks to find: it is not waited for."""
        began = _clock.monotonic()
        self.mesh.await_map(lambda cluster: all(node.state == "up" for node in cluster.nodes), patience)
        until = _clock.monotonic() + _RESTORED
        while self._quarantined() and _clock.monotonic() < until:
            threading.Event().wait(0.1)
        self.waited += _clock.monotonic() - began

    def _quarantined(self) -> bool:
        """Whether a node has damage that is not restored yet, or does not say."""
        try:
            status = json.loads(self.mesh[self.names[0]].request("GET", "/-/cluster").body)
            told = [node["scrub"] for node in status["nodes"]]
        except (OSError, HTTPException, ValueError, KeyError):
            return True
        return any(one is None or one["quarantined"] for one in told)

    def inflict(self, fault: Fault, chance: random.Random) -> None:
        """It begins."""
        name = self.names[fault.host]
        node = self.mesh[name]
        match fault.kind:
            case "kill":
                node.kill()
            case "pause":
                node.pause()
            case "slow":
                self._slow[name] = _Slow(node)
            case "restart":
                node.stop()
                node.up()
            case "replace":
                node.kill()
                self._wipe(name)
            case "corrupt":
                corrupt(node.data_dir, chance)
            case "full":
                fill(node.data_dir)
            case "clock":
                write_clock_shift(self._clock(name), chance.choice((-1, 1)) * chance.choice(JUMPS))
            case "partition" | "isolate" | "control":
                self._cut(fault)

    def undo(self, fault: Fault) -> None:
        """It ends."""
        name = self.names[fault.host]
        node = self.mesh[name]
        match fault.kind:
            case "kill" | "replace":
                node.up()
            case "pause":
                node.resume()
            case "slow":
                self._slow.pop(name).end()
            case "full":
                (node.data_dir / "ballast").unlink(missing_ok=True)
            case "partition" | "isolate" | "control":
                self._cut(fault, restore=True)
            case "corrupt":
                self._scrub(name)
            case "clock":
                write_clock_shift(self._clock(name), 0.0)
            case "restart":
                pass

    def _cut(self, fault: Fault, *, restore: bool = False) -> None:
        net, host = self.networks, fault.host
        assert net is not None
        part, cut = (net.unite, net.restore) if restore else (net.part, net.cut)
        if fault.kind != "partition":
            cut(host, net.outside)
        others = {"partition": [fault.other], "isolate": range(len(self.names)), "control": []}[fault.kind]
        for other in others:
            if other != host:
                part(host, other)

    def await_up(self, patience: float = 120.0) -> bool:
        """Whether the control store's map comes to say that every node is up. Returns within milliseconds of
        that."""
        until = _clock.monotonic() + patience
        with closing(self.mesh.etcd.gateway()) as gateway:
            while _clock.monotonic() < until:
                if all(node.state == "up" for node in self.cluster(gateway).nodes):
                    return True
                threading.Event().wait(0.02)
        return False

    def give_up(self, name: str) -> bool:
        """Say of a node that was killed that it is lost, as `mesh cluster lost NODE` does without `--anyway`,
        and take its disk. False, and nothing is taken, if the map says that another node is not up."""
        until = _clock.monotonic() + _ACCEPTED
        with closing(self.mesh.etcd.gateway()) as gateway:
            while _clock.monotonic() < until:
                others = [node for node in self.cluster(gateway).nodes if node.node_id != name]
                if any(node.state != "up" for node in others):
                    return False
                if self._given_up(name):
                    self._wipe(name)
                    return True
        return False

    def _given_up(self, name: str) -> bool:
        """Whether a node that runs takes it."""
        asked = next(other for other in self.names if other != name)
        body = json.dumps({"action": "lost"}).encode()
        try:
            answer = self.mesh[asked].request("POST", f"/-/cluster/nodes/{name}", body)
        except (OSError, HTTPException):
            return False
        return answer.status == 200

    def close(self) -> None:
        """Ends everything."""
        for slow in self._slow.values():
            slow.end()
        self._slow.clear()
        self._ends.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _scrub(self, name: str) -> None:
        """What an operator does who hears of damage."""
        mesh = self.mesh
        words = ["mesh", "cluster", "scrub", name, "--wait"]
        given = {"MESH_ENDPOINT": ",".join(mesh.endpoints.values())}
        given |= {"AWS_ACCESS_KEY_ID": mesh.access_key, "AWS_SECRET_ACCESS_KEY": mesh.secret_key}
        code = f"import sys; from meshsdk.cli import main; sys.argv = {words!r}; main()"
        command = [sys.executable, "-c", code]
        # What is damaged in both copies, or takes too long, stays so; the checks find it.
        try:
            done = subprocess.run(
                command, env=os.environ | given, capture_output=True, text=True, check=False, timeout=120
            )
            if done.returncode:
                print(done.stdout, done.stderr)
        except subprocess.TimeoutExpired as error:
            print(error, error.stdout, error.stderr)

    def _clock(self, name: str) -> Path:
        return self._place / f"{name}.clock"

    def _audit(self, name: str) -> Path:
        return self._place / f"{name}.audit"

    def _mount(self, name: str) -> None:
        """A disk of its own, so that it can be full."""
        place = self.mesh[name].data_dir
        place.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", _DISK, "tmpfs", str(place)], check=True, timeout=20)
        self._ends.callback(subprocess.run, ["umount", "-l", str(place)], check=False, timeout=20)

    def _wipe(self, name: str) -> None:
        for path in self.mesh[name].data_dir.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


class _Slow:
    """A node that gets a tenth of the time, in short turns, until `end`."""

    def __init__(self, node: Daemon) -> None:
        self._node, self._over = node, threading.Event()
        self._thread = threading.Thread(target=self._run, name="slow")
        self._thread.start()

    def end(self) -> None:
        """As fast as it can again."""
        self._over.set()
        await_end(self._thread)

    def _run(self) -> None:
        while not self._over.is_set():
            with suppress(OSError):  # a process may end meanwhile
                self._node.pause()
            self._over.wait(_STOPPED)
            with suppress(OSError):
                self._node.resume()
            self._over.wait(_RUNNING)


def corrupt(place: Path, chance: random.Random) -> int:
    """Turns over bytes of a segment, anywhere; how many files there were to choose from. What is removed
    meanwhile, because it was written over, is left out."""
    segments = [path for path in sorted(place.rglob("*.tar")) if _size(path) > 1 << 16]
    left = list(segments)
    while left:
        path = chance.choice(left)
        left.remove(path)
        with suppress(FileNotFoundError), path.open("r+b") as file:
            _turn_over(file, chance)
            break
    return len(segments)


def _size(path: Path) -> int:
    """0 for what is not there any more."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _turn_over(file: BinaryIO, chance: random.Random) -> None:
    size = os.fstat(file.fileno()).st_size
    for _ in range(_FLIPS):
        file.seek(chance.randrange(size))
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0xFF]))


def fill(place: Path) -> None:
    """Leaves no room; the clients may have left none before."""
    with suppress(OSError), (place / "ballast").open("wb") as file:
        while True:
            file.write(bytes(4 << 20))
            file.flush()
