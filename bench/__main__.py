"""`python -m bench`: measure rows, show them, keep their figures, write the report of all that is kept."""

from __future__ import annotations

import shutil
import signal
import sys
import traceback
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from bench import headlines, machine, report, results, scale_targets
from bench.catalogue import BY_NAME, ENTRIES, listing
from bench.photo_dataset import peers_python
from bench.progress import Progress
from bench.rows import FULL, QUICK, Scale
from bench.runner import Bench
from bench.tables import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.catalogue import Entry

ROOT = Path(__file__).resolve().parents[1]
KEPT, REPORT = ROOT / "bench" / "figures", ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
"""A few of the report's ratios stand there, too."""
WITHOUT_FIGURE, MISSED, INTERRUPTED = 1, 3, 130
"""Exit codes beside 0 and click's 2 for wrong usage."""
console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
"""In a file or a pipe lines are as long as a wide terminal's."""


def chosen(only: str) -> list[Entry]:
    """The rows asked for; raises a usage error naming an unknown one."""
    wanted = [name.strip() for name in only.split(",") if name.strip()] or list(BY_NAME)
    unknown = sorted(set(wanted) - set(BY_NAME))
    if unknown:
        raise click.UsageError(f"no row {', '.join(unknown)}; there are {', '.join(BY_NAME)}")
    return [entry for entry in ENTRIES if entry.name in wanted]


def show(result: results.RowResult) -> None:
    """One row's medians on the terminal."""
    table = Table(title=result.title, title_justify="left", header_style="bold")
    metrics = [name for name in SHOWN if any(name in figure.metrics for figure in result.figures)]
    for name in ("contender", *(SHOWN[metric] for metric in metrics), "problem"):
        table.add_column(name, justify="left" if name in ("contender", "problem") else "right")
    for name in result.contenders():
        values = [number(result.value(name, metric), 2) for metric in metrics]
        table.add_row(name, *values, result.problem(name)[:80])
    for name, why in result.skipped.items():
        table.add_row(name, *([""] * len(metrics)), why[:80])
    console.print(table)


SHOWN = {
    "rate": "a second",
    "gigabytes": "GB/s",
    "cpu_us": "CPU µs a request",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
    "first_rate": "first epoch/s",
    "second_rate": "next epoch/s",
    "again_rate": "again/s",
    "first_cpu": "CPU s/1000",
    "cpu": "CPU s/1000 ",
    "accelerators": "accelerators",
    "au_of_one": "AU of one, %",
    "first_wait": "first batch s",
    "warm_rate": "from memory/s",
    "seeks_sample": "seeks a sample",
    "disk_s": "disk s",
    "media_s": "of media s",
    "before": "before MiB",
    "worst": "highest MiB",
    "moved": "GB/s moved",
    "hits": "hits",
    "warm": "of what was read before",
    "ordered": "in one order",
    "carried": "GB carried",
    "p99_ratio": "p99 ÷ quiet",
    "cpu_mib": "CPU ms/MiB",
    "save": "saved MB/s",
    "load": "loaded MB/s",
}


@dataclass(frozen=True, slots=True)
class Run:
    """A run's sizes and folders: `scratch` for data, `kept` for figures."""

    scale: Scale
    scratch: Path
    kept: Path

    def measure(self, entries: Sequence[Entry]) -> dict[str, results.RowResult | None]:
        """Take the rows. Each is kept as soon as it is finished; of one that is interrupted the rounds that
        were finished are kept. One that ends with an error is None, and the next one begins."""
        rows: dict[str, results.RowResult | None] = {}
        with (
            Progress(entries, toy=self.scale.photographs < FULL.photographs) as progress,
            Bench(self.scratch, self.scale, progress.say) as bench,
        ):
            for entry in entries:
                progress.begin(entry)
                try:
                    rows[entry.name] = self._take(entry, bench)
                except Exception:
                    rows[entry.name] = None
                    console.print(f"{entry.name} ended with an error, its kept figures stay:")
                    console.print(traceback.format_exc(), markup=False)
        return rows

    def _take(self, entry: Entry, bench: Bench) -> results.RowResult:
        busy = machine.busy()
        title, figures, skipped = entry.run(bench)
        found: list[results.Figure] = []
        try:
            found.extend(figures)
        except KeyboardInterrupt:
            if whole := results.finished(found):
                row = self._result(entry.name, title, whole, skipped, busy)
                self._keep(row)
                console.print(f"{entry.name}: {row.setup['rounds']} finished rounds are kept")
            raise
        row = self._result(entry.name, title, tuple(found), skipped, busy)
        show(row)
        self._keep(row)
        return row

    def _result(
        self, name: str, title: str, figures: tuple[results.Figure, ...], skipped: dict[str, str], busy: float
    ) -> results.RowResult:
        taken = datetime.now(UTC).isoformat(timespec="seconds")
        sizes = {field: getattr(self.scale, field) for field in Scale.__slots__ if field != "loader_rounds"}
        rounds = len({figure.round for figure in figures})
        return results.RowResult(
            name,
            title,
            taken,
            machine.commit(),
            sizes | {"rounds": rounds, "busy": busy},
            figures,
            skipped,
            machine.describe(),
            machine.versions(peers_python(self.scratch)),
        )

    def _keep(self, row: results.RowResult) -> None:
        """A row that nobody could take part in does not replace one that has figures."""
        if row.figures or not (self.kept / f"{row.name}.json").exists():
            results.keep(self.kept, row)
        else:
            console.print(f"{row.name}: no figure ({'; '.join(row.skipped.values())}); the kept row stays")


def interrupt(_signal: int, _frame: object) -> None:
    """SIGTERM ends a run as Ctrl-C does: servers are stopped."""
    raise KeyboardInterrupt


def shown(path: Path) -> str:
    """As a user would name it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


HELP = """Measure meshd and meshsdk beside SeaweedFS, nginx and five loaders, on two cores of this machine.

A row is measured in rounds, in which its contenders take turns. Its figures are kept in the file
bench/figures/ROW.json, in place of those it had, and docs/benchmarks.md is written from all that is kept:
`--only loaders` renews one row, no `--only` all of them (about an hour). Both belong into a commit. With
--quick or --figures neither is touched.

A line on stderr says what is being done. Ctrl-C stops the servers; rows that are done are kept, and of the
one at hand the rounds that are.

\b
Exit codes:
  0    measured
  1    a contender that took part has no figure (the table says why), or a row or command ended with an error
  2    wrong usage
  3    with --strict: a row or a command misses one of its bars
  130  interrupted
"""


@click.command(help=HELP)
@click.option("--only", default="", metavar="ROW,…", help="these rows alone; --list names them")
@click.option(
    "--rounds",
    type=click.IntRange(1),
    help="of each row: 5 by default, of loaders and sharing 1; an even number balances their order exactly",
)
@click.option("--quick", is_flag=True, help="toy sizes: shows that it runs; its figures mean nothing")
@click.option("--list", "listed", is_flag=True, help="the rows: how long each takes, what it needs; then end")
@click.option(
    "--report", "report_only", is_flag=True, help="write the report of the kept figures, measure nothing"
)
@click.option(
    "--targets",
    is_flag=True,
    help="the commands of docs/scale.md, one after the other, in 20 minutes; no row",
)
@click.option("--strict", is_flag=True, help="exit with 3 when a row or a command misses a bar")
@click.option(
    "--figures",
    type=click.Path(path_type=Path),
    help="folder for figures, and a report beside them; bench/figures by default, SCRATCH/quick with --quick",
)
@click.option("--output", type=click.Path(path_type=Path), help="the report; docs/benchmarks.md by default")
@click.option(
    "--scratch",
    type=click.Path(path_type=Path),
    default=ROOT / ".bench",
    show_default=".bench",
    help="photographs, servers' data, the peers' environment",
)
def main(
    only: str,
    rounds: int | None,
    quick: bool,
    listed: bool,
    report_only: bool,
    targets: bool,
    strict: bool,
    figures: Path | None,
    output: Path | None,
    scratch: Path,
) -> None:
    entries = chosen(only)
    if listed:
        click.echo(listing())
        return
    if targets:
        sys.exit(measured_targets(scale_targets.COMMANDS, strict=strict))
    scale = QUICK if quick else FULL
    if rounds:
        scale = replace(scale, rounds=rounds, loader_rounds=rounds)
    kept = figures or (scratch / "quick" if quick else KEPT)
    target = output or (REPORT if kept == KEPT else kept.with_name(f"{kept.name}.md"))
    rows: dict[str, results.RowResult | None] = {}
    code = 0
    if not report_only:
        signal.signal(signal.SIGTERM, interrupt)
        machine.pin()
        try:
            rows = Run(scale, scratch, kept).measure(entries)
        except KeyboardInterrupt:
            console.print("stopped; servers are stopped too")
            code = INTERRUPTED
        finally:
            shutil.rmtree(scratch / "run", ignore_errors=True)
    target.write_text(report.render(results.load(kept), QUICK if quick else FULL))
    console.print(f"wrote {shown(target)}, of what is kept in {shown(kept)}")
    if target == REPORT:
        README.write_text(headlines.placed(README.read_text(), results.load(kept)))
    sys.exit(code or judged(rows, scale, strict=strict))


def measured_targets(commands: Sequence[str], *, strict: bool) -> int:
    """Run the commands of docs/scale.md, and say which missed a target; the exit code."""
    signal.signal(signal.SIGTERM, interrupt)
    try:
        missed, failed = scale_targets.measure(commands, click.echo)
    except KeyboardInterrupt:
        return INTERRUPTED
    for command in missed:
        click.echo(f"a target is missed: python -m {command}")
    return WITHOUT_FIGURE if failed else MISSED if strict and missed else 0


def judged(rows: dict[str, results.RowResult | None], scale: Scale, *, strict: bool) -> int:
    """Say which bars the rows miss; the exit code."""
    taken = {name: row for name, row in rows.items() if row}
    missed = report.missed(taken, scale)
    for line in missed:
        console.print(f"bar: {line}", markup=False, soft_wrap=True)
    if len(taken) < len(rows) or any(
        row.problem(each) for row in taken.values() for each in row.contenders()
    ):
        return WITHOUT_FIGURE
    return MISSED if strict and missed else 0


if __name__ == "__main__":
    main()
