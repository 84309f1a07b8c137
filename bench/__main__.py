"""`python -m bench`: measure rows, show them, keep the raw figures, write docs/benchmarks.md."""

from __future__ import annotations

import shutil
import signal
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench import machine, reporting, results
from bench.albums import peers_python
from bench.measuring import SPECIAL, Bench
from bench.rows import FULL, QUICK, Scale, store_rows
from bench.tables import number

ROOT = Path(__file__).resolve().parents[1]
console = Console(highlight=False)


def row_names(scale: Scale) -> list[str]:
    """All rows in the order they run."""
    return [*(row.name for row in store_rows(scale)), *SPECIAL]


def chosen(only: str, scale: Scale) -> list[str]:
    """The rows asked for; raises a usage error naming an unknown one."""
    names = row_names(scale)
    wanted = [name.strip() for name in only.split(",") if name.strip()] or names
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        raise click.UsageError(f"no row {', '.join(unknown)}; there are {', '.join(names)}")
    return [name for name in names if name in wanted]


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


def measure(names: list[str], scale: Scale, scratch: Path, raw: Path) -> dict[str, results.RowResult]:
    """Run the rows; every finished row is saved at once, so that Ctrl-C loses only the one at hand."""
    rows = results.load(raw)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("starting", total=None)
        with Bench(scratch, scale, lambda text: bars.update(task, description=text)) as bench:
            for name in names:
                bars.update(task, description=f"{name}: looking how busy the machine is")
                busy = machine.busy()
                title, figures, skipped = bench.run(name)
                taken = datetime.now(UTC).isoformat(timespec="seconds")
                setup = {field: getattr(scale, field) for field in Scale.__slots__} | {"busy": busy}
                rows[name] = results.RowResult(name, title, taken, machine.commit(), setup, figures, skipped)
                results.save(raw, rows)
                show(rows[name])
    return rows


def interrupt(_signal: int, _frame: object) -> None:
    """SIGTERM ends a run as Ctrl-C does: servers are stopped."""
    raise KeyboardInterrupt


@click.command()
@click.option("--only", default="", help="rows, comma-separated (see --list)")
@click.option("--rounds", type=click.IntRange(1), help="interleaved rounds a row; 5 by default, loaders 1")
@click.option("--quick", is_flag=True, help="toy sizes: shows that it runs; figures mean nothing")
@click.option("--list", "listing", is_flag=True, help="name the rows and end")
@click.option(
    "--scratch", type=click.Path(path_type=Path), default=ROOT / ".bench", help="data and raw figures"
)
@click.option("--output", type=click.Path(path_type=Path), help="the report; docs/benchmarks.md by default")
def main(
    only: str, rounds: int | None, quick: bool, listing: bool, scratch: Path, output: Path | None
) -> None:
    """Measure meshd and meshsdk beside SeaweedFS, nginx and five loaders, in one run on two cores."""
    scale = QUICK if quick else FULL
    if rounds:
        scale = replace(scale, rounds=rounds, loader_rounds=rounds)
    names = chosen(only, scale)
    if listing:
        click.echo("\n".join(names))
        return
    signal.signal(signal.SIGTERM, interrupt)
    machine.pin()
    raw = scratch / ("quick.json" if quick else "results.json")
    try:
        rows = measure(names, scale, scratch, raw)
    except KeyboardInterrupt:
        console.print("stopped; servers are stopped too, finished rows are kept")
        sys.exit(130)
    finally:
        shutil.rmtree(scratch / "run", ignore_errors=True)
    target = output or (scratch / "quick.md" if quick else ROOT / "docs" / "benchmarks.md")
    target.write_text(reporting.render(rows, scale, peers_python(scratch)))
    console.print(f"wrote {target.name}; raw figures in {raw.name}")
    if any(row.problem(name) for row in rows.values() for name in row.contenders()):
        sys.exit(1)


if __name__ == "__main__":
    main()
