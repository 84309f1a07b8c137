"""`python -m bench.raw_reader NAME ENDPOINT FOLDER PID`: passes over raw samples, one for each line on stdin.

Law: the first sample of each batch is looked at. PID: the server, whose CPU time is measured, too.
`write NAME FOLDER LINES` writes the shards of a peer.
"""

from __future__ import annotations

import os
import sys
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.peers.raw_loaders import LOADERS, WRITERS
from bench.peers.raw_rows import BATCH, BUCKET, OURS, WIDTH
from bench.timing import answer_rounds, time_pass

if TYPE_CHECKING:
    from collections.abc import Iterable

_EPOCHS = count()


def ours(endpoint: str) -> Iterable[Any]:
    """Lines of text files; every round is another epoch of one job."""
    import meshsdk as mesh

    with mesh.connect(endpoint) as client:
        lines = mesh.open(f"s3://{BUCKET}/txt", fields={"text": "txt"}, kind="lines", client=client)
        with mesh.Loader(lines, BATCH, seed=7, tail="drop", shuffle=True) as loader:
            loader.set_epoch(next(_EPOCHS))
            yield from loader


def look(batch: Any) -> int:
    """How many samples it has."""
    if isinstance(batch, list | tuple):
        rows = batch[0] if isinstance(batch[0], list) else batch  # WebDataset has a list of each field
        first: Any = rows[0]
        first = first["text"] if isinstance(first, dict) else first
        size = len(rows)
    else:
        first, size = bytes(batch["text"][0].numpy()), batch.rows
    text = first.encode() if isinstance(first, str) else bytes(first)
    if size != BATCH or len(text) != WIDTH or not text.isdigit():
        raise SystemExit(f"no batch of raw samples: {size} of {text[:80]!r}")
    return size


def server_cpu(pid: int) -> float:
    """User and system seconds of a process and its descendants; by `/proc`, as peers have no psutil."""
    place = Path("/proc", str(pid))
    fields = (place / "stat").read_text().rpartition(")")[2].split()
    used = int(fields[11]) + int(fields[12])
    children = [
        int(child) for task in (place / "task").iterdir() for child in (task / "children").read_text().split()
    ]
    return used / os.sysconf("SC_CLK_TCK") + sum(map(server_cpu, children))


def main() -> None:
    """Write, or warm up and take a round for each line."""
    if sys.argv[1] == "write":
        folder = Path(sys.argv[3])
        folder.mkdir(parents=True, exist_ok=True)
        WRITERS[sys.argv[2]](folder, int(sys.argv[4]))
        return
    name, endpoint, place, pid = sys.argv[1:5]

    def epoch() -> Iterable[Any]:
        return ours(endpoint) if name == OURS else LOADERS[name](endpoint, place)

    time_pass("warm up", epoch, look)

    def measure() -> dict[str, float]:
        before = server_cpu(int(pid))
        done = time_pass("round", epoch, look)
        return {
            "rate": done.samples / done.seconds,
            "client_us": 1e6 * done.cpu_s / done.samples,
            "server_us": 1e6 * (server_cpu(int(pid)) - before) / done.samples,
        }

    answer_rounds(measure)
    os._exit(0)  # workers that wait for a batch nobody takes


if __name__ == "__main__":
    main()
