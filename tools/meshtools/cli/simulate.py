"""`mesh simulate`: what will happen in a mesh that does not exist yet."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshsdk.cli.command_base import shared_options
from meshsdk.errors import ConfigurationError
from meshtools.cli.chart_file import ChartFile

if TYPE_CHECKING:
    from meshsdk.cli.command_base import Session

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("scenario", required=False)
@click.option("--list", "listed", is_flag=True, help="List the built-in scenarios, and what each shows.")
@click.option("--show", is_flag=True, help="Print the scenario as TOML, and simulate nothing.")
@click.option("--seed", type=click.IntRange(0), help="Seed instead of the scenario's.")
@click.option("--trace", type=_FILE, help="Write a trace for Perfetto (JSON).")
@click.option("--plot", type=ChartFile(), help="Write a chart (SVG).")
@shared_options
def simulate(
    session: Session,
    scenario: str | None,
    listed: bool,
    show: bool,
    seed: int | None,
    trace: Path | None,
    plot: Path | None,
) -> int:
    """Simulate training on a mesh, with faults, or years of disk failures. SCENARIO is the name of a built-in
    scenario, or a TOML file as docs/simulator.md describes it. The same seed gives the same result. No mesh
    is needed.

    \b
    mesh simulate --list
    mesh simulate mission --plot mission.svg
    mesh simulate mission --show > mine.toml
    mesh simulate mine.toml --trace mine.json
    """
    from dataclasses import replace

    from meshtools.simulator import report
    from meshtools.simulator.durability import simulate_failures
    from meshtools.simulator.epoch import EpochSimulation
    from meshtools.simulator.scenario import parse_scenario, scenario_text, shipped_scenarios, summary

    if listed:
        for name in shipped_scenarios():
            about = summary(scenario_text(name))
            session.show(f"{name:16} {about}", scenario=name, about=about)
        return 0
    if scenario is None:
        raise ConfigurationError("no scenario given: name a built-in one (--list shows them), or a TOML file")
    text = scenario_text(scenario)
    if show:
        click.echo(text, nl=False)
        return 0
    found = parse_scenario(text, Path(scenario).stem)
    if trace is not None and not trace.name:
        raise ConfigurationError("--trace: the name of the file is empty")
    if trace is not None and not trace.absolute().parent.is_dir():
        raise ConfigurationError(f"--trace: there is no directory {str(trace.parent)!r}")
    if found.disks is not None and (trace is not None or plot is not None):
        raise ConfigurationError("a scenario with [disks] has neither a trace nor a chart")
    if seed is not None:
        found = replace(found, seed=seed)
    began = time.process_time()
    with session.share_bar(f"simulating {found.name}") as reached:
        if found.disks is not None:
            figures = report.durability_figures(found.name, simulate_failures(found, reached))
            lines = list(report.durability_text(figures))
        else:
            run = EpochSimulation(found, reached)
            run.run()
            figures = report.epoch_figures(run)
            lines = list(report.epoch_text(figures))
            if plot is not None:
                plot.write_text(report.epoch_plot(run, figures), encoding="utf-8")
            if trace is not None:
                trace.write_text(report.epoch_trace(run), encoding="utf-8")
    session.show("\n".join(lines), **figures)
    session.tell(f"simulated in {time.process_time() - began:.1f} s of processor time")
    return 0
