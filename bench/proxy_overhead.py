"""The row of the mesh: GET through a node that does not hold the object, beside the node that does.

Law: one mesh of two nodes with one worker each, one copy of every object, all on the holder; the same load
goes to either. Invariant: they take turns (`bench.interleave`). The rate is shown with the CPU time of each
node per request: here both nodes and the client share the cores that each has for itself in a mesh.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from bench import fill_and_check
from bench.interleave import turns
from bench.load_generator import Load, available, run
from bench.presigned_requests import Account, Request
from bench.processes import cpu_seconds
from bench.results import Figure
from bench.rows import KIB, MIB
from meshd.errors import MeshdError
from meshd.process import local_etcd
from tests.support.daemon_cluster import DaemonCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bench.results import RowResult
    from bench.rows import Scale

NAME: Final = "passing"
TITLE: Final = "GET through another node"
LEAST: Final = 0.6
COSTS: Final = ("passing_us", "holding_us")
TEXT: Final = """\
Two nodes of one worker each, with one copy of every object. The same GETs go to the node that holds the
object, and to the other node, which forwards them. Here both nodes and the client share the cores: *by
processor time* is the ratio to expect if each node has its own core, that is, the holder's time for an answer
divided by the time of whichever node spends more on a forwarded one."""
_BUCKET: Final = "passing"
_WARM = 1
_SECONDS = 2


@dataclass(frozen=True, slots=True)
class Size:
    """A row of the table: bytes of the objects, how many of them, over how many connections."""

    title: str
    size: int
    keys: int
    connections: int

    @property
    def direct(self) -> str:
        return f"{self.title}, asked of the holder"

    @property
    def passed(self) -> str:
        return f"{self.title}, asked of another"


def sizes(scale: Scale) -> tuple[Size, ...]:
    large = scale.large_bytes
    return (
        Size("10 KiB × 16", 10 * KIB, 64, 16),
        Size("1 MiB × 8", MIB, 16, 8),
        Size(f"{large // MIB} MiB × 4", large, 4, 4),
    )


def missing() -> str:
    """Why it cannot be measured here; empty when it can."""
    if not available():
        return "wrk is not installed: `apt-get install wrk`"
    try:
        local_etcd.find_etcd()
    except MeshdError as error:
        return str(error)
    return ""


def measure(scale: Scale, scratch: Path, say: Callable[[str], None]) -> Iterator[Figure]:
    """All sizes, each on both nodes in turn."""
    say(f"{NAME}: starting a mesh")
    with DaemonCluster.start(2, args=("--copies", "1")) as mesh:
        s3 = mesh["n1"].client()
        s3.create_bucket(Bucket=_BUCKET)
        ways = dict[str, tuple[str, Load, Size]]()
        for size in sizes(scale):
            load = _filled(mesh, s3, size, min(scale.seconds, _SECONDS))
            ways |= {size.direct: ("n2", load, size), size.passed: ("n1", load, size)}
        s3.close()
        for node, load, size in ways.values():
            _read(mesh, node, replace(load, seconds=_WARM), size, scratch)
        for number, contender in turns(NAME, ways, scale.rounds, say):
            metrics, problem = _read(mesh, *ways[contender], scratch)
            yield Figure(contender, number, metrics, problem)


def _filled(mesh: DaemonCluster, s3: Any, size: Size, seconds: int) -> Load:
    """Puts objects of the size where only the holder has them; what asks for them."""
    keys = [
        mesh.key_with_primary("n2", _BUCKET, f"{size.size}-{number}", copies=1) for number in range(size.keys)
    ]
    body = fill_and_check.pattern(size.size)
    for key in keys:
        s3.put_object(Bucket=_BUCKET, Key=key, Body=body)
    requests = tuple(Request("GET", f"/{_BUCKET}/{key}") for key in keys)
    return Load(requests, size.connections, seconds)


def _read(
    mesh: DaemonCluster, node: str, load: Load, size: Size, scratch: Path
) -> tuple[dict[str, float], str]:
    before = {name: cpu_seconds(mesh[name].pid) for name in ("n1", "n2")}
    account = Account(mesh.access_key, mesh.secret_key)
    reading = run(load, mesh[node].endpoint.removeprefix("http://"), account, scratch)
    problem = f"{reading.errors} of {reading.requests} requests failed" if reading.errors else ""
    if reading.bytes < reading.requests * size.size:
        problem = problem or "answers shorter than the objects"
    number = max(reading.requests, 1)
    spent = {name: 1e6 * (cpu_seconds(mesh[name].pid) - before[name]) / number for name in before}
    metrics = {"rate": reading.rate, "gigabytes": reading.rate * size.size / 1e9, "p50_ms": reading.p50_ms}
    return metrics | {"passing_us": spent["n1"], "holding_us": spent["n2"]}, problem


def ratio(result: RowResult, size: Size) -> float | None:
    """Rates on this machine, where both nodes and the client share the cores."""
    return result.ratio(size.passed, size.direct, "rate")


def apart(result: RowResult, size: Size) -> float | None:
    """What the ratio comes to where every node has a core of its own: the holder's cost of an answer over
    that of whichever node does more for one that is passed on."""
    alone = result.value(size.direct, "holding_us")
    passing, holding = (result.value(size.passed, metric) for metric in COSTS)
    return alone / max(passing, holding) if alone and passing and holding else None
