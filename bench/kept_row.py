"""The row of samples that are decoded once: later epochs with everything kept, with a part, and with nothing.

Law: one node of its own for each round, whose photographs are in memory; each way has a process of its own,
and its epochs follow each other. A way that keeps reads what no way before it has kept results of: all of the
loose photographs, a part of those in tars. Those that keep nothing run before them.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Final

from bench import photo_dataset
from bench.loader_timing import TIMEOUT_S
from bench.processes import Children, cpu_seconds
from bench.results import Figure
from bench.servers import SERVERS, new_account
from bench.tables import BARS_HEAD, number, table, verdict
from bench.timing import Pass
from meshsdk.admin.cluster_admin import scrape
from meshsdk.client.settings import parse_endpoint
from tests.support.interpreters import python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from bench.photo_dataset import Album
    from bench.results import RowResult
    from bench.rows import Scale
    from bench.servers import Server

NAME: Final = "kept"
PART: Final = 0.3
"""The share of the decoded bytes for which the last way has room."""
COUNTED: Final = "meshd_decoded_cache_bytes"


@dataclass(frozen=True, slots=True)
class Way:
    """What a loader reads, and whether the node may keep `all` of it decoded, a `part`, or `nothing`."""

    name: str
    layout: str
    keeps: str


NOTHING: Final = Way("loose photographs, nothing kept", "raw", "nothing")
ALL: Final = Way("loose photographs, all kept", "raw", "all")
TARS: Final = Way("photographs in tars, nothing kept", "tar", "nothing")
SOME: Final = Way("photographs in tars, room for 30 %", "tar", "part")
WAYS: Final = (NOTHING, ALL, TARS, SOME)
FIRST_BAR, OWN_BAR, PART_BAR = 0.97, 2.5, 1.25
TEXT: Final = """The photographs of the loaders' rows, from memory, on a node that has kept nothing yet.
Each way is one process with three epochs, each with new crops of every sample: the first, in which decoded
images are kept where they may be, and two later ones, whose mean is shown. CPU is that of the node. *Room for
30 %* is `cache=` of that share of the bytes which all of them took."""
COMMAND: Final = """<!-- not run: takes minutes -->
```bash
make bench ARGS="--only kept"
```"""
HEAD: Final = ("", "first epoch, samples/s", "later", "node's CPU s a 1,000, first", "later", "MB kept")


def title(scale: Scale) -> str:
    """What is asked for."""
    return f"Decoded once, {scale.photographs:,} photographs"


def kept_bytes(server: Server) -> int:
    """What the node keeps of decoded samples now."""
    return int(scrape(parse_endpoint(server.endpoint)).sum_of(COUNTED))


def run_way(way: Way, server: Server, scale: Scale, round: int, room: int) -> Figure:
    """The epochs of one way; `room`: the bytes of a part."""
    cache = {"nothing": "off", "all": "auto", "part": str(room)}[way.keeps]
    argv = [python(), "-m", "bench.kept_reader", server.endpoint, photo_dataset.BUCKET, cache]
    argv += ["--batch", str(scale.batch), "--layout", way.layout]
    before, pid, spent, passes = kept_bytes(server), server.child.process.pid, list[float](), list[Pass]()
    with subprocess.Popen(
        argv,
        cwd=photo_dataset.ROOT,
        env=photo_dataset.environment(server),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout is not None
        cpu = cpu_seconds(pid)
        for line in job.stdout:
            if line.startswith("@ "):
                passes.append(Pass(**json.loads(line[2:])))
                cpu, begun = cpu_seconds(pid), cpu
                spent.append(1000 * (cpu - begun) / max(1, passes[-1].samples))
        assert job.stderr is not None
        errors = job.stderr.read()
        job.wait(TIMEOUT_S)
    wanted = scale.photographs
    if job.returncode or len(passes) < 2 or any(each.samples != wanted for each in passes):
        said = [line for line in errors.splitlines() if line.strip()][-1:] or ["samples are missing"]
        return Figure(way.name, round, {}, f"ended with {job.returncode}: {said[0]}"[:300])
    first, *later = (each.samples / each.seconds for each in passes)
    return Figure(
        way.name,
        round,
        {
            "rate": first,
            "later_rate": fmean(later),
            "cpu": spent[0],
            "later_cpu": fmean(spent[1:]),
            "kept": kept_bytes(server) - before,
        },
    )


def measure(album: Album, scale: Scale, root: Path, say: Callable[[str], None]) -> Iterator[Figure]:
    """A node a round, filled; then all ways, one after the other."""
    for round in range(scale.loader_rounds):
        with Children(root / "logs") as children:
            server = SERVERS["meshd"].start(children, root / "run" / f"{NAME}-{round}", new_account())
            photo_dataset.upload(server, album, say, ())
            room = 0
            for way in WAYS:
                say(f"{NAME}: {way.name}")
                figure = run_way(way, server, scale, round, room)
                if way is ALL:
                    room = max(1, int(PART * figure.metrics.get("kept", 0)))
                yield figure


def bars(result: RowResult) -> list[list[str]]:
    """What the project asks of itself, and whether it holds."""

    def ratio(over: tuple[Way, str], under: tuple[Way, str]) -> float | None:
        above, below = (result.value(way.name, metric) for way, metric in (over, under))
        return above / below if above and below else None

    part, first = ratio((SOME, "later_rate"), (TARS, "later_rate")), ratio((ALL, "rate"), (NOTHING, "rate"))
    own = ratio((ALL, "later_rate"), (NOTHING, "rate"))
    kept = ratio((SOME, "kept"), (ALL, "kept"))
    return [
        ["all kept: a later epoch ÷ a first with nothing kept", number(own, 2, "×"), verdict(own, OWN_BAR)],
        ["room for 30 %: a later epoch ÷ with nothing kept", number(part, 2, "×"), verdict(part, PART_BAR)],
        ["bytes kept with room for 30 % ÷ all", number(kept, 2, "×"), ""],
        [
            "the first epoch, in which all is kept ÷ with nothing kept",
            number(first, 2, "×"),
            verdict(first, FIRST_BAR),
        ],
    ]


def section(rows: Mapping[str, RowResult]) -> list[str]:
    """The row's part of the report."""
    result = rows.get(NAME)
    if result is None:
        return []
    lines = []
    for name in result.contenders():
        if problem := result.problem(name):
            lines.append([name, f"failed: {problem}".replace("|", "/"), *([""] * (len(HEAD) - 2))])
            continue
        rates = [number(result.value(name, each), 0) for each in ("rate", "later_rate")]
        costs = [number(result.value(name, each)) for each in ("cpu", "later_cpu")]
        kept = result.value(name, "kept")
        lines.append([name, *rates, *costs, number(None if kept is None else kept / 1e6, 0)])
    return [f"## {result.title}", TEXT, table(HEAD, lines), table(BARS_HEAD, bars(result)), COMMAND]
