"""Two equalities: a job that resumes sees what it would have seen, and world size changes nothing.

Law: hashes are of the bytes that reached this process; nothing is compared by name or count alone.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import meshsdk as mesh
from meshdemo.datasets import SEED, connect, digest, training_digits
from meshdemo.screen import check, fact, progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshdemo.daemon import Daemon
    from meshdemo.scale import Scale

EPOCH = 1
WORLDS = (1, 2, 3)


def short(digests: Sequence[str]) -> str:
    """Return one short hash of several hashes."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def rank_loaders(daemon: Daemon, scale: Scale, world: int) -> list[mesh.Loader]:
    """Return the loaders of all ranks of a job, each with its own client, at the beginning of the epoch."""
    made = []
    for rank in range(world):
        data = training_digits(connect(daemon))
        loader = mesh.Loader(data, scale.batch, seed=SEED, shuffle="global", rank=rank, world=world)
        loader.seek(EPOCH)
        made.append(loader)
    return made


def global_digests(loaders: Sequence[mesh.Loader], limit: int | None = None) -> list[str]:
    """Return the hash of each global batch up to the end of the epoch, or of the first `limit`."""
    found = []
    for parts in zip(*loaders, strict=True):
        found.append(digest(parts))
        if len(found) == limit:
            break
    return found


def close_all(loaders: Sequence[mesh.Loader]) -> None:
    """End their passes."""
    for loader in loaders:
        loader.close()


def resume(daemon: Daemon, scale: Scale) -> None:
    """Stop in the middle, restart the daemon, go on in a new job of two ranks; compare with a run without
    a stop.
    """
    whole = rank_loaders(daemon, scale, 1)
    expected = global_digests(whole)
    stopped = rank_loaders(daemon, scale, 1)
    first = global_digests(stopped, limit=len(expected) // 2)
    saved = json.dumps(stopped[0].state_dict())
    close_all([*whole, *stopped])
    fact(f"stopped after step {len(first)} of {len(expected)}; the state is {len(saved)} bytes of JSON")
    daemon.restart()
    fact("restarted the daemon as well: no batch of before is in its memory, each is computed again")
    resumed = rank_loaders(daemon, scale, 2)
    for loader in resumed:
        loader.load_state_dict(json.loads(saved))
    rest = global_digests(resumed)
    close_all(resumed)
    hashes = f"{short(expected)} without a stop, {short([*first, *rest])} with one"
    check(
        [*first, *rest] == expected,
        f"identical batches after the resume, now with two ranks ({hashes})",
        hashes,
    )


def compare_worlds(daemon: Daemon, scale: Scale) -> None:
    """Load the same epoch at several world sizes; the global batches must be equal, byte for byte."""
    seen: dict[int, list[str]] = {}
    with progress() as bars:
        for world in WORLDS:
            loaders = rank_loaders(daemon, scale, world)
            task = bars.add_task(f"world size {world}", total=len(loaders[0]), note="")
            seen[world] = global_digests(loaders)
            bars.update(task, completed=len(seen[world]), note=f"epoch hash {short(seen[world])}")
            close_all(loaders)
    same = all(seen[world] == seen[WORLDS[0]] for world in WORLDS)
    check(same, f"equal hashes of all {len(seen[1])} global batches at world sizes 1, 2 and 3")
