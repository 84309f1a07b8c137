"""Every row of the benchmark in the order they run: what it is about, how long it takes, what it needs, and
which method of the bench takes it. A row is here or it does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from bench import (
    accelerators,
    checkpoints,
    download_row,
    epochs,
    foretold,
    kept_row,
    loader_cpu_cost,
    long_texts,
    media_row,
    origins,
    owners,
    proxy_overhead,
    raw_row,
    re_replication,
    reshard_row,
    rotational_drive,
    rotational_row,
    shared_jobs,
    table_row,
    tokens,
    windows,
)
from bench.gather_timing import gather_rows
from bench.load_generator import available
from bench.rows import FULL, store_rows
from bench.runner import NO_WRK, Bench
from bench.servers import SERVERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.runner import Outcome

WRK, WEED, NGINX, ETCD, PEERS, DRIVE = "wrk", "weed", "nginx", "etcd", "peers", "drive"
NEEDS: Final[dict[str, tuple[str, Callable[[], str]]]] = {
    WRK: ("wrk, the load generator", lambda: "" if available() else NO_WRK),
    WEED: ("SeaweedFS", SERVERS["seaweedfs"].missing),
    NGINX: ("nginx", SERVERS["nginx"].missing),
    ETCD: ("a real etcd, for nodes of a mesh", owners.missing),
    DRIVE: ("an emulated rotational drive: FUSE, loop devices, root", rotational_drive.missing),
    PEERS: ("the peers' loaders in an environment of their own, made by pip (2 GB)", str),
}
"""What a row may need: what it is, and what to do where it is missing (empty: nothing)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A row. `minutes`: about how long at full size on two cores, with the rounds it has by default, once
    what it needs is there; `needs`: names of NEEDS."""

    name: str
    about: str
    minutes: float
    needs: tuple[str, ...]
    run: Callable[[Bench], Outcome]

    def missing(self) -> list[str]:
        """What to install for it here."""
        return [reason for name in self.needs if (reason := NEEDS[name][1]())]


def _store_entries() -> tuple[Entry, ...]:
    seldom = {"list-few": "a small bucket", "list": "a large one; filling it takes ten minutes more, once"}
    found = []
    for row in store_rows(FULL):
        about = f"{row.title}: {seldom[row.name]}" if row.name in seldom else row.title
        needs = (WRK, WEED, *((NGINX,) if "nginx" in row.servers else ()))
        found.append(Entry(row.name, about, 1.5, needs, partial(Bench.store, name=row.name)))
    return tuple(found)


def _gather_entries() -> tuple[Entry, ...]:
    return tuple(
        Entry(row.name, f"gather of {row.title}", 0.5, (), partial(Bench.gather, name=row.name))
        for row in gather_rows(FULL)
    )


def _family(
    run: Callable[..., Outcome], needs: tuple[str, ...], rows: dict[str, tuple[str, float]]
) -> tuple[Entry, ...]:
    """Rows that one method takes, which is given their names."""
    return tuple(
        Entry(name, about, minutes, needs, partial(run, name=name)) for name, (about, minutes) in rows.items()
    )


ENTRIES: Final = (
    *_store_entries(),
    Entry("limits", "what the machine allows: a bare socket, the ops alone", 1, (), Bench.limits),
    Entry("ops", "preparing a photograph on one core, beside a bare decode", 0.5, (), Bench.ops),
    Entry("userops", "a confined process there and back, beside other ways", 1, (), Bench.userops),
    *_family(
        Bench.loaders,
        (WEED, PEERS),
        {
            "loaders": ("meshsdk beside five loaders that read from SeaweedFS", 4),
            "loaders-meshd": ("the same, all from meshd", 4),
        },
    ),
    Entry(
        rotational_row.NAME,
        "first epochs from an emulated rotational drive, ours and four peers'",
        8,
        (DRIVE, WEED, PEERS),
        Bench.rotational,
    ),
    Entry(kept_row.NAME, "later epochs of photographs that are decoded once", 3, (), Bench.keep),
    Entry(shared_jobs.NAME, "four jobs over the same photographs at once", 1.5, (WEED, PEERS), Bench.share),
    Entry(
        loader_cpu_cost.NAME,
        "what delivery costs the loader, beside a bare recv_into",
        0.5,
        (),
        Bench.deliver,
    ),
    *_family(
        Bench.accelerate,
        (WEED, PEERS),
        {each.name: (f"emulated accelerators, {each.title}", 2) for each in accelerators.WORKLOADS},
    ),
    Entry("memory", "resident memory under many large bodies; 64 GB of disk", 2, (), Bench.memory),
    *_gather_entries(),
    Entry(reshard_row.NAME, "tar shards made into others, beside cp", 3, (), Bench.reshard),
    Entry(re_replication.NAME, "a node of three lost, its copies made again", 5, (ETCD,), Bench.restore),
    Entry(
        proxy_overhead.NAME, "GET through a node that has not got the object", 1.5, (WRK, ETCD), Bench.pass_on
    ),
    *_family(
        Bench.origins,
        (WEED,),
        {
            origins.COLD: ("cold reads through a node before an origin", 1),
            origins.EIGHT: ("eight readers of one cold object", 0.5),
            origins.WHOLE: ("one large cold read", 1.5),
        },
    ),
    Entry(epochs.NAME, "hit ratios of the cache, replayed; no clock in it", 0.5, (), Bench.epochs),
    Entry(windows.NAME, "windows of a Zarr series, beside zarr in a Dataset", 1.5, (), Bench.windows),
    Entry(
        raw_row.NAME, "small samples without ops, beside the peers' formats", 2, (PEERS,), Bench.raw_samples
    ),
    Entry(tokens.NAME, "stored tokens, packed, beside the peers' formats", 2, (PEERS,), Bench.tokens),
    Entry(long_texts.NAME, "packed rows of long documents, beside short ones", 2, (), Bench.long_texts),
    Entry(table_row.NAME, "batches of a table's rows, beside pyarrow and Ray Data", 3, (), Bench.tables),
    Entry(
        media_row.SOUNDS.name,
        "windows of recordings as spectra, beside DataLoader",
        1,
        (),
        partial(Bench.media, media=media_row.SOUNDS),
    ),
    Entry(
        media_row.FILMS.name,
        "clips of films, beside DataLoader",
        1,
        (),
        partial(Bench.media, media=media_row.FILMS),
    ),
    Entry(
        checkpoints.NAME, "torch's checkpoints saved and loaded, beside others", 1.5, (), Bench.checkpoints
    ),
    *_family(
        Bench.downloads,
        (WEED,),
        {row.name: (f"{row.title}: the SDK beside others", 1) for row in download_row.ROWS},
    ),
    Entry(owners.NAME, "rows from the nodes that have their bytes", 2.5, (ETCD,), Bench.owners),
    Entry(foretold.NAME, "the simulator beside a real mesh", 4, (ETCD, DRIVE), Bench.foretold),
)
BY_NAME: Final = {entry.name: entry for entry in ENTRIES}


def listing() -> str:
    """The rows for a terminal: name, minutes, needs, what it is about; then what is missing here."""
    width = max(map(len, BY_NAME))
    lines = [f"{'row':{width}}  {'minutes':>7}  {'needs':17}  about"]
    for entry in ENTRIES:
        needs = ", ".join(entry.needs) or "–"
        lines.append(f"{entry.name:{width}}  {entry.minutes:7g}  {needs:17}  {entry.about}")
    whole = sum(entry.minutes for entry in ENTRIES)
    said = f"All of them: about {whole:.0f} minutes at full size, 5 rounds each (loaders, sharing: 1)."
    lines += ["", said, ""]
    for name, (what, missing) in NEEDS.items():
        reason = missing()
        lines.append(f"{name}: {what}" + (f" – MISSING HERE: {reason}" if reason else ""))
    return "\n".join(lines)
