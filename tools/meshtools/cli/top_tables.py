"""Tables of `mesh top`.

Law: the tables fit into the given width. If the columns do not fit, the least informative ones are left
out, never those that identify a row.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from meshsdk.byte_sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType

    from meshtools.top.gpus import Gpu
    from meshtools.top.hosts import HostRates
    from meshtools.top.nodes import NodeRates, ReportedJob
    from meshtools.top.snapshot_diff import JobRates, Screen

_QUIET = 1024  # bytes per second: a disk or link below that is left out
_WORSE, _BAD = 0.05, 0.2
_LEAST_NAME: Final = 20  # characters
_SPARE_OF_JOBS: Final = ("GPU", "epoch", "network", "rank", "fetch", "prep")
"""Columns to leave out, in this order. The share of the network follows from the stall and the others."""
_SPARE_OF_NODES: Final = ("decoded", "in/s", "ready", "rows/s", "out/s", "prepared/s")


def render_screen(screen: Screen) -> RenderableType:
    """Returns the whole screen."""
    parts: list[RenderableType] = [_host(screen.host)]
    if screen.gpus.found:
        parts += ["", _gpus(screen.gpus.found)]
    none = Text("no loader runs on this machine", "dim")
    parts += ["", _Fitting(_jobs(screen.jobs), _SPARE_OF_JOBS) if screen.jobs else none]
    if screen.reported:
        parts += ["", _report_table(screen.reported)]
    if screen.nodes:
        parts += ["", _Fitting(_nodes(screen.nodes), _SPARE_OF_NODES)]
    parts += [Text(note, "dim") for note in screen.notes]
    return Group(*parts)


class _Fitting:
    """A table that fits into the available width: first its columns move closer together, then some are left
    out. Its first column names the rows."""

    def __init__(self, whole: Table, spare: Sequence[str]) -> None:
        """`spare`: columns that may be left out, in this order."""
        self._whole, self._spare = whole, spare

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        table = self._whole
        if not _fits(table, console, options):
            for count in range(len(self._spare) + 1):
                table = _without(self._whole, self._spare[:count])
                table.collapse_padding = True
                if _fits(table, console, options):
                    break
        yield table


def _fits(table: Table, console: Console, options: ConsoleOptions) -> bool:
    """Gives the first column the width that the others leave. Returns whether all columns fit and the first
    is wide enough."""
    unbounded = options.update(max_width=10_000)
    first = table.columns[0]
    whole = first.width = max(Measurement.get(console, unbounded, cell).maximum for cell in first.cells)
    room = whole + options.max_width - Measurement.get(console, unbounded, table).maximum
    first.width = max(min(whole, room), 1)
    return room >= min(whole, _LEAST_NAME)


def _without(table: Table, titles: Sequence[str]) -> Table:
    """Returns a new table without these columns: a rich column stores its index."""
    kept = [column for column in table.columns if column.header not in titles]
    made = _table(*(str(column.header) for column in kept))
    for row in zip(*(column.cells for column in kept), strict=True):
        made.add_row(*row)
    return made


def _table(*columns: str, left: int = 1) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, title in enumerate(columns):
        table.add_column(title, justify="left" if number < left else "right", no_wrap=True)
    return table


def _host(host: HostRates) -> RenderableType:
    lines = [
        f"CPU {host.cpu:.0%} of {host.cores} cores, load {host.load:.1f}   "
        f"memory {format_size(host.used)} of {format_size(host.memory)}"
    ]
    disks = [
        f"{name} read {format_size(disk['read'])}/s, written {format_size(disk['written'])}/s, "
        f"busy {disk['busy']:.0%}"
        for name, disk in host.disks.items()
        if disk["read"] + disk["written"] > _QUIET
    ]
    links = [
        f"{name} in {format_size(link['received'])}/s, out {format_size(link['sent'])}/s"
        for name, link in host.links.items()
        if link["received"] + link["sent"] > _QUIET
    ]
    lines.append("disks   " + ("; ".join(disks) or "quiet"))
    lines.append("network " + ("; ".join(links) or "quiet"))
    return Text("\n".join(lines))


def _gpus(found: Sequence[Gpu]) -> Table:
    table = _table("GPU", "name", "busy", "memory", "power", "°C", left=2)
    for gpu in found:
        memory = (
            "–"
            if gpu.used is None or gpu.memory is None
            else f"{format_size(gpu.used)} of {format_size(gpu.memory)}"
        )
        table.add_row(
            ("  MIG " if gpu.instance else "") + gpu.index,
            gpu.name,
            _share(gpu.busy),
            memory,
            "–" if gpu.watts is None else f"{gpu.watts:.0f} W",
            "–" if gpu.celsius is None else str(gpu.celsius),
        )
    return table


def _jobs(found: Sequence[JobRates]) -> Table:
    table = _table(
        "job",
        "rank",
        "pid",
        "GPU",
        "epoch",
        "step",
        "samples/s",
        "stall",
        "network",
        "prep",
        "fetch",
        "AU",
        "",
    )
    for each in found:
        job = each.job
        table.add_row(
            job.name or f"{job.source} {job.plan[:8]}",
            f"{job.rank}/{job.world}",
            str(job.pid),
            ",".join(each.gpus) or "–",
            str(each.epoch),
            f"{each.step}/{each.steps}",
            f"{each.rate:,.0f}",
            _bad(each.stall),
            _share(each.network),
            _share(each.preprocessing),
            _share(each.fetch),
            _share(each.au),
            each.state,
        )
    return table


def _report_table(found: Sequence[ReportedJob]) -> Table:
    table = _table(
        "reported to the nodes", "samples/s", "stall", "network", "prep", "fetch", "epoch", "to its end"
    )
    for job in found:
        parts = _share(job.network), _share(job.preprocessing), _share(job.fetch)
        place = "–" if job.epochs is None else f"{int(job.epochs)}, {job.epochs % 1:.0%}"
        left = "–" if job.left is None else f"{timedelta(seconds=round(job.left))}"
        table.add_row(job.name, f"{job.rate:,.0f}", _bad(job.stall), *parts, place, left)
    return table


def _nodes(found: Sequence[NodeRates]) -> Table:
    table = _table(
        "node",
        "requests/s",
        "5xx/s",
        "in/s",
        "out/s",
        "rows/s",
        "prepared/s",
        "ready",
        "saved",
        "decoded",
        "queue",
        "disk free",
    )
    for node in found:
        if node.why:
            table.add_row(node.endpoint, Text("no answer", "red"))
            continue
        table.add_row(
            node.endpoint,
            f"{node.requests:,.0f}",
            f"{node.errors:,.1f}",
            format_size(node.received),
            format_size(node.sent),
            f"{node.rows:,.0f}",
            f"{node.prepared:,.0f}",
            _share(node.hits),
            f"{node.saved:,.1f} cores" if node.saved else "–",
            _decoded_cell(node),
            f"{node.queue:,.0f}",
            _share(node.free),
        )
    return table


def _decoded_cell(node: NodeRates) -> str:
    """Return how full the decoded cache is, and how many buckets have reached their quota."""
    if not node.decoded_limit:
        return "–"
    full = f"{format_size(node.decoded)} of {format_size(node.decoded_limit)}"
    return full + (f", {node.at_quota:.0f} at quota" if node.at_quota else "")


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _bad(value: float) -> Text:
    style: Any = "red" if value > _BAD else "yellow" if value > _WORSE else "green"
    return Text(f"{value:.0%}", style)
