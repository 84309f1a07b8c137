"""`mesh simulate`: what will happen in a mesh that does not exist yet."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshsdk.cli.command_base import shared_options
from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from meshsdk.cli.command_base import Session

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("scenario", required=False)
@click.option("--list", "listed", is_flag=True, help="List the scenarios that ship.")
@click.option("--seed", type=click.IntRange(0), help="Instead of the scenario's.")
@click.option("--trace", type=_FILE, help="Write a trace that Perfetto opens (JSON).")
@click.option("--plot", type=_FILE, help="Write a chart as SVG.")
@shared_options
def simulate(
    session: Session,
    scenario: str | None,
    listed: bool,
    seed: int | None,
    trace: Path | None,
    plot: Path | None,
) -> int:
    """Simulates training on a mesh, with faults, or years of disk failures. SCENARIO is a TOML file
    (docs/simulator.md), or the name of one that ships. The same seed gives the same result; nothing is
    contacted.

    \b
    mesh simulate --list
    mesh simulate mission --plot mission.svg
    mesh simulate mine.toml --trace mine.json
    """
    from dataclasses import replace

    from meshtools.simulator import report
    from meshtools.simulator.durability import simulate_failures
    from meshtools.simulator.epoch import EpochSimulation
    from meshtools.simulator.scenario import read_scenario, shipped_scenarios

    if listed:
        for name in shipped_scenarios():
            session.show(name, scenario=name)
        return 0
    if scenario is None:
        raise ConfigurationError("which scenario? --list shows those that ship")
    found = read_scenario(scenario)
    if seed is not None:
        found = replace(found, seed=seed)
    began = time.process_time()
    with session.steps(f"simulating {found.name}", 1) as done:
        if found.disks is not None:
            if trace is not None or plot is not None:
                raise ConfigurationError("years of failures have no trace and no chart")
            figures = report.durability_figures(found.name, simulate_failures(found, done.reached))
            lines = list(report.durability_text(figures))
        else:
            run = EpochSimulation(found, done.reached)
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
