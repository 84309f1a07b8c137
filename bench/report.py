"""docs/benchmarks.md out of the figures that are kept.

Law: nothing is typed in by hand; every number is a median of the rows given. Where a peer is ahead it says
so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bench import (
    accelerators,
    checkpoints,
    download_row,
    epochs,
    foretold,
    kept_row,
    loader_cpu_cost,
    loader_timing,
    long_texts,
    media_row,
    origins,
    owners,
    provenance,
    proxy_overhead,
    raw_row,
    re_replication,
    reshard_row,
    rotational_report,
    rotational_row,
    sandbox_overhead,
    shared_jobs,
    table_row,
    tokens,
    windows,
)
from bench.decode_cost import BARE, NODE, NOTES
from bench.gather_timing import gather_rows
from bench.loader_report import OURS, accelerator_section, best_peer, delivery_section, loader_section
from bench.peers import token_rows
from bench.rows import FULL, store_rows
from bench.store_report import gather_section, metric_of, store_section
from bench.tables import BARS_HEAD, MISSED, number, table, verdict
from meshtools.cache_simulator.simulator import BOUND, PLANNED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bench.results import RowResult
    from bench.rows import Scale

HEAD = """# Benchmarks

`make bench` generates this page; do not edit it. Servers, clients and load generator share the same two
cores, so a figure shows what a server leaves for the others, not what it could do alone. Read the ratios:
each comes from one run and is a median of interleaved rounds. Every other round runs in the opposite order
(ABBA), so that no contender always follows the same one. Absolute numbers depend on the machine."""
MEMORY_TEXT = """{memory_connections} connections stream objects of {mebibytes:,.0f} MiB for
{memory_seconds} s. The figure is the highest resident set size of any single process of the daemon,
including shared pages."""
OPS_TEXT = """The cost of preparing a photograph for training on one core, compared with decoding the same
files with libjpeg-turbo alone: CPU seconds of one process, contenders by turns, without a server and
without a store."""
RESTORE_TEXT = """One of three nodes is given up, and the other two restore its copies from each other, over
loopback and onto one disk. A rate counts the missing bytes, from the change of the map to the end of all
comparisons. During that time clients read 10 KiB objects from one of the two, one after the other.
Everything runs on the same two cores; *a plain copy* shows how much any process that writes at the same
time slows such a reader."""
RESHARD_TEXT = """A job (`mesh reshard`) reads tar shards that are stored in the daemon and writes shards of
1,000 files; `cp -r` copies the same shards as plain files on the same disk. The job hashes what it writes
(CRC-32C), and its outputs are durable when it finishes. The same is true of *cp, then sync*, but not of
`cp`. After each job, its shards are read and their files counted by name."""
ORIGINS_TEXT = """SeaweedFS runs behind a proxy that answers with a delay of 50 ms and gives each connection
100 MB/s. The same client reads from the proxy, and from a node of two workers in front of it. Every key is
read once, so each read through the node is cold, and the result is compared with what was put. Everything
runs on the same two cores. Before each read, as much memory as it takes is touched and freed, because a
virtual machine that has to get pages back from its host pays up to 2 ms per MiB for them. A fetch is
counted at the proxy, in units of the 8 MiB chunks that a read of the object takes."""
EPOCHS_TEXT = """Twenty shuffled epochs (and twenty in one order) over a cache of 0.3 of the data, replayed
with the code that makes the decisions in the node (`mesh cache simulate`). No clock is involved. *Belady*
is the upper bound in bytes that no policy exceeds."""
MEMORY_BAR, IDLE_BAR = 300, 250
OPS_BAR = 1.6  # times a bare decode: decode, random_resized_crop to 224, flip


def userops_section(rows: Mapping[str, RowResult]) -> list[str]:
    """What a confined process costs."""
    result = rows.get("userops")
    if result is None:
        return []
    lines = []
    for name in result.contenders():
        rate = result.value(name, "rate")
        each = number(1e6 / rate if rate else None, 0)
        lines.append([name, each, sandbox_overhead.NOTES[name]])
    return [
        "## Ops of users, there and back",
        "A 224×224×3 image is handed to a process with user code and taken back; microseconds each.",
        table(["", "µs a sample", ""], lines),
    ]


def reshard_section(rows: Mapping[str, RowResult]) -> list[str]:
    """Jobs beside `cp`."""
    result = rows.get(reshard_row.NAME)
    if result is None:
        return []
    names = result.contenders()
    lines = [[result.title, *(number(result.value(name, "gigabytes"), 2, " GB/s") for name in names)]]
    ratios = [
        (mine, peer, result.ratio(mine, peer, "gigabytes"), least) for mine, peer, least in reshard_row.BARS
    ]
    bars = [
        [f"{mine} ÷ {peer}", number(ratio, 2, "×"), verdict(ratio, least)]
        for mine, peer, ratio, least in ratios
    ]
    return [
        "## Shards of shards, beside cp",
        RESHARD_TEXT,
        table(["", *names], lines),
        table(BARS_HEAD, bars),
    ]


def windows_section(rows: Mapping[str, RowResult]) -> list[str]:
    """Windows of a Zarr series."""
    result = rows.get(windows.NAME)
    if result is None or not result.contenders():
        return []
    names = result.contenders()
    lines = [
        ["windows a second", *(number(result.value(name, "rate"), 0) for name in names)],
        ["client CPU µs a window", *(number(result.value(name, "client_us"), 0) for name in names)],
        ["server CPU µs a window", *(number(result.value(name, "server_us"), 0) for name in names)],
    ]
    bars = []
    for how, least in (("", windows.LEAST), (windows.ALONE, None)):
        ratio = result.ratio(windows.OURS + how, windows.NAIVE + how, "rate")
        bars.append([f"{windows.OURS} ÷ {windows.NAIVE}{how}", number(ratio, 1, "×"), verdict(ratio, least)])
    return [
        f"## {result.title}",
        windows.TEXT,
        table(["", *names], lines),
        table(BARS_HEAD, bars),
    ]


def tokens_section(rows: Mapping[str, RowResult]) -> list[str]:
    """Stored tokens."""
    result = rows.get(tokens.NAME)
    if result is None or not result.contenders():
        return []
    names = result.contenders()
    lines = [
        ["million tokens a second", *(number(_millions(result.value(name, "rate")), 2) for name in names)],
        ["client CPU µs a thousand tokens", *(number(result.value(name, "client_us"), 0) for name in names)],
    ]
    bars = []
    for ours, peers in token_rows.COMPARED.items():
        for name in peers:
            ratio, cpu = (result.ratio(ours, name, metric) for metric in ("rate", "client_us"))
            if ratio is None:
                continue
            bars.append([f"{ours} ÷ {name}", number(ratio, 1, "×"), verdict(ratio, tokens.LEAST)])
            met = verdict(cpu, tokens.MOST_CPU, at_most=True)
            bars.append([f"client CPU, {ours} ÷ {name}", number(cpu, 2, "×"), met])
    return [f"## {result.title}", tokens.TEXT, table(["", *names], lines), table(BARS_HEAD, bars)]


def _millions(rate: float | None) -> float | None:
    return None if rate is None else rate / 1e6


def tables_section(rows: Mapping[str, RowResult]) -> list[str]:
    """Rows of tables."""
    result = rows.get(table_row.NAME)
    if result is None or not result.contenders():
        return []
    names = result.contenders()
    lines = [
        ["rows a second", *(number(result.value(name, "rate"), 0) for name in names)],
        ["client CPU µs a row", *(number(result.value(name, "client_us"), 2) for name in names)],
        ["server CPU µs a row", *(number(result.value(name, "server_us"), 2) for name in names)],
    ]
    rate = result.value(table_row.OURS, "rate")
    ratios = {name: result.ratio(table_row.OURS, name, "rate") for name in names if name != table_row.OURS}
    bars = [
        [f"{table_row.OURS}, rows a second", number(rate, 0), verdict(rate, table_row.LEAST)],
        *(
            [f"{table_row.OURS} ÷ {name}", number(ratio, 1, "×"), verdict(ratio, None)]
            for name, ratio in ratios.items()
        ),
    ]
    return [f"## {result.title}", table_row.TEXT, table(["", *names], lines), table(BARS_HEAD, bars)]


def restore_section(rows: Mapping[str, RowResult]) -> list[str]:
    """Redundancy made again."""
    result = rows.get(re_replication.NAME)
    if result is None:
        return []
    names = result.contenders()
    lines = [[result.title, *(number(result.value(name, "gigabytes"), 2, " GB/s") for name in names)]]
    bars = []
    for mine, peer, least in re_replication.BARS:
        ratio = result.ratio(mine, peer, "gigabytes")
        bars.append([f"{mine} ÷ {peer}", number(ratio, 2, "×"), verdict(ratio, least)])
    slower = result.value(re_replication.BUSY, "p99_ratio")
    bars.append(
        [
            "p99 of readers, during ÷ before",
            number(slower, 2, "×"),
            verdict(slower, re_replication.P99, at_most=True),
        ]
    )
    copied = result.value(re_replication.COPY, "p99_ratio")
    bars.append(["p99 of readers during a plain copy ÷ before", number(copied, 2, "×"), ""])
    return [
        "## Redundancy restored",
        RESTORE_TEXT,
        table(["", *names], lines),
        table(BARS_HEAD, bars),
    ]


def passing_section(rows: Mapping[str, RowResult], scale: Scale) -> list[str]:
    """A mesh: any node answers, at what price."""
    result = rows.get(proxy_overhead.NAME)
    if result is None:
        return []
    lines, bars = [], []
    for size in proxy_overhead.sizes(scale):
        for name in (size.direct, size.passed):
            rate = number(result.value(name, "rate"), 0)
            costs = [number(result.value(name, metric), 0) for metric in proxy_overhead.COSTS]
            lines.append([name, rate, *costs])
        ratio, apart = proxy_overhead.ratio(result, size), proxy_overhead.apart(result, size)
        bars.append(
            [f"{size.title}: passed on ÷ direct", number(ratio, 2, "×"), verdict(ratio, proxy_overhead.LEAST)]
        )
        bars.append(
            [f"{size.title}: by processor time", number(apart, 2, "×"), verdict(apart, proxy_overhead.LEAST)]
        )
    return [
        "## Any node of a mesh",
        proxy_overhead.TEXT,
        table(["GET", "a second", "µs of the other node", "µs of the holder"], lines),
        table(BARS_HEAD, bars),
    ]


def origins_section(rows: Mapping[str, RowResult]) -> list[str]:
    """A node before an origin."""
    mesh, far = origins.MESH, origins.ORIGIN
    cold, eight, whole = (rows.get(name) for name in origins.NAMES)
    lines, bars = list[list[str]](), list[list[str]]()
    for result in (cold, whole):
        for name in () if result is None else (far, mesh):
            assert result is not None
            first, cost = number(result.value(name, "p50_ms"), 1), number(result.value(name, "cpu_mib"), 2)
            lines.append([result.title, name, number(result.value(name, "gigabytes"), 2), first, cost])
    if cold is not None:
        ratio = cold.ratio(mesh, far, "gigabytes")
        bars.append([f"{cold.title}: meshd ÷ origin", number(ratio, 2, "×"), verdict(ratio, origins.LEAST)])
        ours, theirs = cold.value(mesh, "p50_ms"), cold.value(far, "p50_ms")
        late = None if ours is None or theirs is None else ours - theirs
        told = verdict(late, origins.FIRST_MS, at_most=True)
        bars.append(["first byte, later than the origin's", number(late, 1, " ms"), told])
    if eight is not None:
        fetched = eight.value(mesh, "rate")
        bars.append([f"{eight.title}: fetches", number(fetched, 2), verdict(fetched, 1.0, at_most=True)])
    if whole is not None:
        ratio = whole.ratio(mesh, far, "gigabytes")
        told = verdict(ratio, origins.TIMES)
        bars.append([f"{whole.title}: meshd ÷ one connection", number(ratio, 2, "×"), told])
    if not bars:
        return []
    head = ["", "", "GB/s", "first byte, ms", "CPU of the node, ms a MiB"]
    return ["## Buckets with an origin", ORIGINS_TEXT, table(head, lines), table(BARS_HEAD, bars)]


def epochs_section(rows: Mapping[str, RowResult]) -> list[str]:
    """Policies replayed."""
    result = rows.get(epochs.NAME)
    if result is None:
        return []
    lines = [
        [name, *(number(result.value(name, each), 3) for each in ("hits", "warm", "ordered"))]
        for name in result.contenders()
    ]
    warm, ratio = result.value(epochs.OURS, "warm"), result.ratio(PLANNED, BOUND, "hits")
    bars = [
        ["hits of what was read before", number(warm, 3), verdict(warm, epochs.LEAST)],
        ["with plans ÷ Belady's", number(ratio, 3, "×"), verdict(ratio, epochs.OF_BOUND)],
    ]
    head = ["", "hits", "of what was read before", "the same, in one order"]
    return ["## What the cache keeps", EPOCHS_TEXT, table(head, lines), table(BARS_HEAD, bars)]


def ops_section(rows: Mapping[str, RowResult]) -> list[str]:
    """The ops on one core."""
    result = rows.get("ops")
    if result is None:
        return []
    bare = result.value(BARE, "rate")
    lines = []
    for name in result.contenders():
        rate = result.value(name, "rate")
        times = bare / rate if bare and rate else None
        each = number(1000 / rate if rate else None, 2)
        lines.append([name, number(rate, 0), each, number(times, 2, "×")])
    ratio = result.ratio(BARE, NODE, "rate")
    bars = [["meshd ÷ bare decode, time", number(ratio, 2, "×"), verdict(ratio, OPS_BAR, at_most=True)]]
    return [
        "## Ops, on one core",
        OPS_TEXT,
        table(["", "photographs/s", "ms each", "÷ bare decode"], lines),
        "\n".join(f"- **{name}**: {NOTES[name]}." for name in result.contenders()),
        table(BARS_HEAD, bars),
    ]


def memory_section(rows: Mapping[str, RowResult]) -> list[str]:
    """Resident memory under load."""
    result = rows.get("memory")
    if result is None:
        return []
    text = MEMORY_TEXT.format(mebibytes=result.setup["memory_bytes"] / (1 << 20), **result.setup)
    lines = []
    for name in (name for name in result.contenders() if name != "idle"):
        worst = result.value(name, "worst")
        figures = [number(result.value(name, key), 0) for key in ("before", "worst")]
        bar = result.problem(name) or verdict(worst, MEMORY_BAR, at_most=True)
        lines.append([name, *figures, number(result.value(name, "moved"), 2), bar])
    head = ["", "before, MiB", "highest, MiB", "GB/s during the run", "bar, MiB"]
    return ["## Memory under many large bodies", text, table(head, lines), *idle_memory(result)]


def idle_memory(result: RowResult) -> list[str]:
    """One sentence and its bar."""
    whole = result.value("idle", "whole")
    if whole is None:
        return []
    bar = verdict(whole, IDLE_BAR, at_most=True)
    return [
        f"An idle node uses {whole:,.0f} MiB over all its processes, with shared memory counted once "
        f"(bar, MiB: {bar})."
    ]


def behind_section(rows: Mapping[str, RowResult], scale: Scale) -> list[str]:
    """Where a peer is ahead."""
    lines = []
    for row in (row for row in store_rows(scale) if row.name in rows):
        ratio = rows[row.name].ratio("meshd", "seaweedfs", metric_of(row)[0])
        if ratio is not None and ratio < 1:
            lines.append(f"- {row.title}: {ratio:.2f}× SeaweedFS.")
        slower = rows[row.name].ratio("meshd", "seaweedfs", "p99_ms")
        if slower is not None and slower > 1:
            lines.append(f"- {row.title}, the slowest hundredth: p99 is {slower:.2f}× SeaweedFS's.")
    for loaders in (rows[name] for name in loader_timing.ROWS if name in rows):
        for key, words in (("first_rate", "The first epoch"), ("second_rate", "The next epoch")):
            best, mine = best_peer(loaders, key), loaders.value(OURS, key)
            if best and mine is not None and mine < best[1]:
                lines.append(f"- {words}: {best[0]} does {best[1]:,.0f} samples/s, meshsdk {mine:,.0f}.")
    return ["## Where a peer is ahead", "\n".join(lines or ["In none of the rows above."])]


def absent_section(rows: Mapping[str, RowResult]) -> list[str]:
    """Who could not take part, and why."""
    skipped = [f"- {name}: {why}" for result in rows.values() for name, why in result.skipped.items()]
    return ["## Left out", "\n".join(dict.fromkeys(skipped))] if skipped else []


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the report and the rows it is about, whose provenance stands below it."""

    write: Callable[[Mapping[str, RowResult], Scale], list[str]]
    names: tuple[str, ...]


def _unscaled(write: Callable[[Mapping[str, RowResult]], list[str]], *names: str) -> Section:
    """A section that is written without the run's sizes."""
    return Section(lambda rows, _: write(rows), names)


SECTIONS: Final = (
    Section(store_section, (*(row.name for row in store_rows(FULL)), "limits")),
    Section(gather_section, tuple(row.name for row in gather_rows(FULL))),
    _unscaled(reshard_section, reshard_row.NAME),
    _unscaled(restore_section, re_replication.NAME),
    _unscaled(windows_section, windows.NAME),
    _unscaled(raw_row.section, raw_row.NAME),
    _unscaled(tokens_section, tokens.NAME),
    _unscaled(long_texts.section, long_texts.NAME),
    _unscaled(tables_section, table_row.NAME),
    _unscaled(media_row.section, *(media.name for media in media_row.ROWS)),
    _unscaled(checkpoints.section, checkpoints.NAME),
    Section(download_row.section, tuple(row.name for row in download_row.ROWS)),
    Section(passing_section, (proxy_overhead.NAME,)),
    _unscaled(owners.section, owners.NAME),
    _unscaled(foretold.section, foretold.NAME),
    _unscaled(origins_section, *origins.NAMES),
    _unscaled(epochs_section, epochs.NAME),
    _unscaled(ops_section, "ops"),
    _unscaled(userops_section, "userops"),
    _unscaled(rotational_report.section, rotational_row.NAME),
    _unscaled(loader_section, *loader_timing.ROWS, shared_jobs.NAME),
    _unscaled(kept_row.section, kept_row.NAME),
    _unscaled(delivery_section, loader_cpu_cost.NAME),
    _unscaled(accelerator_section, *accelerators.NAMES),
    _unscaled(memory_section, "memory"),
)
"""In the order of the report. Every row is of one section."""


def render(rows: Mapping[str, RowResult], scale: Scale) -> str:
    """The whole document."""
    parts = [HEAD]
    for each in SECTIONS:
        if written := each.write(rows, scale):
            parts += [*written, *provenance.taken(rows, each.names)]
    parts += [*behind_section(rows, scale), *absent_section(rows), *provenance.section(rows)]
    return "\n\n".join(parts) + "\n"


def missed(rows: Mapping[str, RowResult], scale: Scale) -> list[str]:
    """The bars that these rows miss: what was asked, the figure, the bar."""
    lines = [line for line in render(rows, scale).splitlines() if MISSED in line]
    cells = (line.replace("**", "").strip("| ").split("|") for line in lines)
    return [", ".join(cell.strip() for cell in each) for each in cells]
