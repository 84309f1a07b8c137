"""The loader side: each contender in a process of its own over the same photographs, round by round.

Law: server and client on the same two cores; uint8 batches [256, 3, 224, 224] of a random crop and a flip;
two workers for each peer, as many as cores. Each process runs two passes; meshsdk's also repeats the first
(the same plan again). Before the rounds everyone runs once uncounted: byte code is compiled, and memory
touched for the first time, which costs a virtual machine a fault of its host.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bench import photo_dataset
from bench.interleave import turns
from bench.results import Figure
from bench.timing import Pass
from tests.support import interpreters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from bench.rows import Scale
    from bench.servers import Server

TCP = "meshsdk over TCP"
OURS = ("meshsdk", TCP)
"""The first takes frames over as shared memory, the node being on the loader's host."""
SEEDS = 1000
"""Apart, so that neither finds what the other had prepared."""
PEERS = ("s3torchconnector", "webdataset", "streaming", "litdata", "grain")
ROWS = {"loaders": "seaweedfs", "loaders-meshd": "meshd"}
"""The server that the peers of a row read from; meshsdk reads from meshd in all of them."""
TIMEOUT_S = 600
TRIES = 5


@dataclass(frozen=True, slots=True)
class Turn:
    """One loader against one server."""

    loader: str
    server: Server

    @property
    def name(self) -> str:
        """`<loader> from <server>`."""
        return f"{self.loader} from {self.server.name}"


def argv_of(turn: Turn, scale: Scale, cache: Path, root: Path, number: int) -> list[str]:
    """The command of one process, in tests a forked one where it is ours; `cache`: where a peer may keep what
    it has fetched."""
    if turn.loader in OURS:
        module = "bench.meshsdk_contender"
        argv = [interpreters.python(), "-m", module, turn.server.endpoint, photo_dataset.BUCKET]
        argv += ["--tcp"] if turn.loader == TCP else []
        return [*argv, "--batch", str(scale.batch), "--seed", str(number + SEEDS * OURS.index(turn.loader))]
    argv = [
        str(photo_dataset.peers_python(root)),
        "-m",
        "bench.peers",
        turn.loader,
        turn.server.endpoint,
        photo_dataset.BUCKET,
    ]
    return [*argv, "--batch", str(scale.batch), "--cache", str(cache)]


def metrics_of(imported: Pass, passes: Sequence[Pass]) -> dict[str, float]:
    """Per pass: samples a second, seconds to the first batch, client CPU seconds a 1000 samples. The first
    has the import in it; `imported_rate` is the first's without.
    """
    first = passes[0]
    found = {"import_s": imported.seconds, "imported_rate": first.samples / first.seconds}
    whole = replace(
        first,
        seconds=imported.seconds + first.seconds,
        first_s=imported.seconds + first.first_s,
        cpu_s=imported.cpu_s + first.cpu_s,
    )
    for one in (whole, *passes[1:]):
        found[f"{one.name}_rate"] = one.samples / one.seconds
        found[f"{one.name}_wait"] = one.first_s
        found[f"{one.name}_cpu"] = 1000 * one.cpu_s / one.samples
    return found


def read(turn: Turn, scale: Scale, root: Path, number: int) -> Figure:
    """Run one process; a failure is kept as the figure's problem."""
    try:
        done = subprocess.run(
            argv_of(turn, scale, root / "peer-cache", root, number),
            cwd=photo_dataset.ROOT,
            env=photo_dataset.environment(turn.server),
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return Figure(turn.name, number, {}, f"no end within {TIMEOUT_S} s")
    lines = [json.loads(line[2:]) for line in done.stdout.splitlines() if line.startswith("@ ")]
    imported, *passes = tuple(Pass(**line) for line in lines) or (None,)
    metrics = metrics_of(imported, passes) if imported and passes else {}
    return Figure(turn.name, number, metrics, _problem(done, passes, scale))


def read_repeatedly(turn: Turn, scale: Scale, root: Path, number: int) -> Figure:
    """Up to `TRIES` processes until one does not fail; `repeats` says how many failed before it.

    mosaicml-streaming at times reads a shard that is still being written, from any server.
    """
    repeats, figure = 0, read(turn, scale, root, number)
    while figure.problem and repeats + 1 < TRIES:
        repeats, figure = repeats + 1, read(turn, scale, root, number)
    return replace(figure, metrics={**figure.metrics, "repeats": repeats})


def _problem(done: subprocess.CompletedProcess[str], passes: Sequence[Pass], scale: Scale) -> str:
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["no output"]
        return f"exit code {done.returncode}: {last[0][:300]}"
    short = [one for one in passes if one.samples != scale.photographs]
    return f"{short[0].samples} samples instead of {scale.photographs}" if short else ""


def measure(
    loaders: Sequence[Turn], rounds: int, scale: Scale, root: Path, say: Callable[[str], None]
) -> Iterator[Figure]:
    """Each of them in its turn; one that fails `TRIES` times is given up."""
    named = {turn.name: turn for turn in loaders}
    if scale.warmed:
        for turn in loaders:
            say(f"loaders: {turn.name}, once uncounted")
            read(turn, scale, root, rounds)
    failed: set[str] = set()
    for number, name in turns("loaders", named, rounds, say):
        if name in failed:
            continue
        figure = read_repeatedly(named[name], scale, root, number)
        if figure.problem:
            failed.add(name)
        yield figure
