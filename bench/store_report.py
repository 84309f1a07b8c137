"""The store's part of docs/benchmarks.md: the servers beside each other, and gather beside a GET for each.

Law: nothing is typed in by hand; every number is a median of the rows given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.gather_timing import GATHER, gather_rows
from bench.rows import store_rows
from bench.servers import SERVERS
from bench.tables import BARS_HEAD, number, percent, table, verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.results import RowResult
    from bench.rows import Row, Scale

STORE_TEXT = """wrk replays requests that were signed in advance (SigV4, by botocore) over kept-alive
connections: 16, 8 or 4, as given in the row. Small PUTs sign the hash of their payload, large ones send
UNSIGNED-PAYLOAD. Before a row is timed, the server must return the right bytes and refuse an unsigned
request with 403. A row with any failed request has no figure. Listings use separate buckets, which are
filled once and kept for later runs.

If the system's congestion control is BBR, servers that do not change it are paced over loopback too, and
meshd is not ([decision 5](decisions/0005-connections.md)); large GETs then favour meshd. After
`sysctl -w net.ipv4.tcp_congestion_control=reno` all servers send alike."""
CPU_TEXT = """Microseconds of CPU for a request, user and system time of all processes of the server over the
requests that it answered in the rounds above; the load generator's time is not in it."""
GATHER_TEXT = """One daemon and one client process read the same objects in the same order. *Our client* is
`meshsdk.Client.get`; *× 16* means sixteen threads over kept-alive connections. The result of the gather is
compared with what was put before anything is timed; during the timing, items are verified by their crc32c."""
FLAT_BAR = 0.8  # of the rate with a thousand keys must be left with a million


def metric_of(row: Row) -> tuple[str, str, int]:
    """(metric, unit, decimals) of the row's main figure."""
    return ("gigabytes", " GB/s", 2) if row.by_bytes else ("rate", "/s", 0)


def store_line(row: Row, result: RowResult) -> list[str]:
    """One row of the store table."""
    metric, unit, places = metric_of(row)
    ratio = result.ratio("meshd", "seaweedfs", metric)
    figures = [number(result.value(name, metric), places, unit) for name in SERVERS]
    tails = " / ".join(number(result.value(name, "p99_ms"), 1) for name in ("seaweedfs", "meshd"))
    return [row.title, *figures, number(ratio, 2, "×"), tails]


def store_section(rows: Mapping[str, RowResult], scale: Scale) -> list[str]:
    """The store side."""
    lines = [store_line(row, rows[row.name]) for row in store_rows(scale) if row.name in rows]
    if not lines:
        return []
    titles = [kind.title for kind in SERVERS.values()]
    head = ["", *titles, "meshd ÷ SeaweedFS", "p99 ms, SeaweedFS / meshd"]
    notes = [f"- **{kind.title}**: {kind.note}." for kind in SERVERS.values()]
    title = "## The store, beside SeaweedFS"
    return [
        title,
        STORE_TEXT,
        table(head, lines),
        "\n".join(notes),
        *cpu_table(rows, scale),
        "The bars of each row, and whether this run meets them:",
        table(BARS_HEAD, [line for row in store_rows(scale) for line in bar_lines(row, rows)]),
        *store_problems(rows),
        *store_limits(rows, scale),
    ]


def cpu_table(rows: Mapping[str, RowResult], scale: Scale) -> list[str]:
    """What a request costs each server; nothing for rows that were taken before this was measured."""
    lines = []
    for row in store_rows(scale):
        result = rows.get(row.name)
        if result is not None and result.value("meshd", "cpu_us") is not None:
            ratio = result.ratio("meshd", "seaweedfs", "cpu_us")
            figures = [number(result.value(name, "cpu_us"), 0) for name in SERVERS]
            lines.append([row.title, *figures, number(ratio, 2, "×")])
    titles = [kind.title for kind in SERVERS.values()]
    return [CPU_TEXT, table(["", *titles, "meshd ÷ SeaweedFS"], lines)] if lines else []


def cpu_bars(row: Row, result: RowResult) -> list[list[str]]:
    """What the project asks of the CPU time of a request."""
    lines, cost = [], result.value("meshd", "cpu_us")
    if cost is None:
        return []
    if row.cpu.most is not None:
        title = f"{row.title}: CPU µs a request, meshd"
        lines.append([title, number(cost, 0), verdict(cost, row.cpu.most, at_most=True)])
    if row.cpu.ratio is not None:
        ratio = result.ratio("meshd", "seaweedfs", "cpu_us")
        title = f"{row.title}: CPU a request, meshd ÷ SeaweedFS"
        lines.append([title, number(ratio, 2, "×"), verdict(ratio, row.cpu.ratio, at_most=True)])
    return lines


def bar_lines(row: Row, rows: Mapping[str, RowResult]) -> list[list[str]]:
    """What the project asks of the row: its ratios, its p99, and that a listing costs the same anywhere."""
    result = rows.get(row.name)
    if result is None:
        return []
    titles = {name: kind.title for name, kind in SERVERS.items()}
    lines = []
    for bar in row.bars:
        ratio = result.ratio(bar.mine, bar.peer, metric_of(row)[0])
        names = f"{titles[bar.mine]} ÷ {titles[bar.peer]}"
        lines.append([f"{row.title}: {names}", number(ratio, 2, "×"), verdict(ratio, bar.least)])
    for mine in dict.fromkeys(bar.mine for bar in row.bars):
        tail = result.ratio(mine, "seaweedfs", "p99_ms")
        title = f"{row.title}: p99 of {titles[mine]} ÷ SeaweedFS"
        lines.append([title, number(tail, 2, "×"), verdict(tail, 1, at_most=True)])
    lines += cpu_bars(row, result)
    few = rows.get("list-few")
    if row.name == "list" and few is not None and result.comparable(few):
        here, there = result.value("meshd", "rate"), few.value("meshd", "rate")
        flat = here / there if here is not None and there else None
        title = f"{row.title}: against the bucket of 1,000"
        lines.append([title, number(flat, 2, "×"), verdict(flat, FLAT_BAR)])
    return lines


def store_problems(rows: Mapping[str, RowResult]) -> list[str]:
    """What went wrong, contender by contender."""
    found = [
        f"- {row.title}, {name}: {row.problem(name)}"
        for row in rows.values()
        for name in row.contenders()
        if name in SERVERS and row.problem(name)
    ]
    return ["**Without a figure:**", "\n".join(found)] if found else []


def store_limits(rows: Mapping[str, RowResult], scale: Scale) -> list[str]:
    """How near the store comes to a bare socket and to plain files."""
    lines = []
    limits, small, large = rows.get("limits"), rows.get("get-10k"), rows.get("get-64m")
    if limits and large and large.comparable(limits) and (bare := limits.value("socket", "gigabytes")):
        title = next(row.title for row in store_rows(scale) if row.name == "get-64m")
        share = percent(large.value("meshd", "gigabytes"), bare)
        lines.append(
            f"A bare `sendfile` to `recv_into` moves {bare:.2f} GB/s here; {title} is {share} of it."
        )
    if small and (bound := small.value("nginx", "rate")):
        share = percent(small.value("meshd", "rate"), bound)
        lines.append(
            f"GET 10 KiB is {share} of what nginx does with plain files, no signatures and no index."
        )
    return [f"**The limits.** {' '.join(lines)}"] if lines else []


def gather_section(rows: Mapping[str, RowResult], scale: Scale) -> list[str]:
    """Gather beside a GET for each object."""
    here = [row for row in gather_rows(scale) if row.name in rows]
    if not here:
        return []
    names = list(dict.fromkeys(name for row in here for name in rows[row.name].contenders()))
    lines, bars = [], []
    for row in here:
        result = rows[row.name]
        lines.append([row.title, *(number(result.value(name, "rate"), 0) for name in names)])
        for peer, least in row.bars:
            ratio = result.ratio(GATHER, peer, "rate")
            bars.append([f"{row.title}: gather ÷ {peer}", number(ratio, 1, "×"), verdict(ratio, least)])
        if row.least is not None:
            rate = result.value(GATHER, "rate")
            bars.append([f"{row.title}: items/s", number(rate, 0), verdict(rate, row.least)])
    table_of = table(["items a second", *names], lines)
    return ["## Gather, beside a GET for each", GATHER_TEXT, table_of, table(BARS_HEAD, bars)]
