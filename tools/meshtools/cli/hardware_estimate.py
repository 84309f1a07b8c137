"""`mesh sizing`: what to buy for a training job, what bounds it, and what it costs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshsdk.cli.bench import OP_HELP, parse_op
from meshsdk.cli.command_base import shared_options
from meshsdk.cli.path_arguments import RemoteType
from meshsdk.errors import ConfigurationError
from meshtools.cli.chart_file import ChartFile
from meshtools.sizing.estimate import Design, estimate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshsdk.admin.cluster_admin import Scrape
    from meshsdk.cli.command_base import Session
    from meshsdk.cli.path_arguments import Remote
    from meshtools.sizing.assumptions import Assumptions
    from meshtools.sizing.estimate import Estimate
    from meshtools.sizing.workload import Workload


_SIZES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_SIZE = re.compile(r"([0-9.]+)\s*([kmgtp]?)(i?)b?(/s)?", re.IGNORECASE)
_SPANS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_SPAN = re.compile(r"([0-9.]+)\s*(s|min|h|d)", re.IGNORECASE)
_MEASURED_ROWS = 64


class _Bytes(click.ParamType[float]):
    """Bytes, or bytes a second, such as `100TB`, `200MB/s` or `1PiB`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = _SIZE.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{value!r} is not a size such as 100TB", param, ctx)
        unit = match[2].lower()
        factor = 1024.0 ** (1 + "kmgtp".index(unit)) if match[3] and unit else _SIZES[unit]
        try:
            return float(match[1]) * factor
        except ValueError:
            self.fail(f"{value!r} is not a size such as 100TB", param, ctx)


class _Seconds(click.ParamType[float]):
    """A duration such as `10d`, `8h` or `30min`."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = _SPAN.fullmatch(str(value).strip())
        if match is None or match[1].count(".") > 1:
            self.fail(f"{value!r} is not a duration such as 10d, 8h or 30min", param, ctx)
        return float(match[1]) * _SPANS[match[2].lower()]


@click.command()
@click.argument("description", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
@click.option("--data", "data_bytes", type=_Bytes(), help="Bytes of one copy, such as 100TB.")
@click.option("--samples", type=click.FloatRange(1), help="Number of samples, such as 1.4e9.")
@click.option("--sample-bytes", type=_Bytes(), help="Bytes of a sample, instead of their number.")
@click.option("--like", type=RemoteType(), help="Measure a dataset: URL of its samples.")
@click.option("--like-op", "like_ops", multiple=True, help=f"Ops to measure there: {OP_HELP}")
@click.option("--ops", help="Ops with known costs: photo, raw, sound, video [raw].")
@click.option("--op-ms", type=click.FloatRange(0), help="CPU milliseconds of the ops for a sample.")
@click.option("--delivered-bytes", type=_Bytes(), help="Bytes of a sample after the ops.")
@click.option("--gpus", type=click.IntRange(1), help="GPUs of a job.")
@click.option("--gpu-rate", type=_Bytes(), help="Stored bytes that each GPU consumes, such as 200MB/s.")
@click.option("--gpu-samples", type=click.FloatRange(0), help="The same in samples per second.")
@click.option("--epochs", type=click.IntRange(1), help="Epochs of a job [1].")
@click.option("--jobs", type=click.IntRange(1), help="Jobs at the same time [1].")
@click.option("--share/--no-share", "sharing", default=None, help="The jobs share prepared samples.")
@click.option("--order", type=click.Choice(["blocks", "full"]), help="Blocks, or a full shuffle [blocks].")
@click.option("--within", "deadline_seconds", type=_Seconds(), help="Time for all epochs: 10d, 8h.")
@click.option(
    "--budget",
    "budget_usd",
    type=click.FloatRange(0),
    help="Maximum cost of hardware in USD; alternatives above it are marked.",
)
@click.option("--copies", type=click.IntRange(1, 7), default=2, show_default=True, help="Copies of the data.")
@click.option(
    "--cache-share",
    type=click.FloatRange(0.01, 1),
    default=0.3,
    show_default=True,
    help="Share of the data on NVMe in the alternative `tiered`.",
)
@click.option(
    "--assume",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML of other prices and rates.",
)
@click.option(
    "--set", "changes", multiple=True, metavar="NAME=NUMBER", help="Another price or rate; repeatable."
)
@click.option(
    "--assumptions", "show_assumptions", is_flag=True, help="Print all prices and rates, with sources."
)
@click.option("--plot", type=ChartFile(), help="Write a chart (SVG).")
@shared_options
def sizing(
    session: Session,
    description: Path | None,
    like: Remote | None,
    like_ops: Sequence[str],
    copies: int,
    cache_share: float,
    assume: Path | None,
    changes: Sequence[str],
    show_assumptions: bool,
    plot: Path | None,
    **given: Any,
) -> int:
    """Estimate the hardware for a training job: nodes, drives, memory, cores and network. For each
    alternative, print what limits it, the time and cost of an epoch, and how many such jobs fit at once.

    DESCRIPTION is a TOML file with the names of docs/sizing.md; options override it. No node is contacted,
    except with --like. The estimate is of average loads; `mesh simulate` shows what happens over time.

    \b
    mesh sizing --data 100TB --sample-bytes 70KB --gpus 16 --gpu-rate 200MB/s
    mesh sizing --data 1PB --sample-bytes 100KB --within 10d
    mesh sizing job.toml --ops photo --epochs 90 --plot job.svg
    mesh sizing --like s3://photos/train/ --like-op decode:image --gpus 8 --gpu-samples 2500
    """
    from meshtools.sizing import report
    from meshtools.sizing.workload import workload_of

    assumed = read_assumptions(assume, changes)
    if show_assumptions:
        _show_assumptions(session, assumed)
        return 0
    values = {} if description is None else _read_toml(description)
    if like is not None:
        values |= _measure_dataset(session, like, like_ops)
    workload = workload_of(_values(values, given, assumed))
    estimates = compare(workload, assumed, copies=copies, cache_share=cache_share)
    if session.as_json:
        for each in estimates:
            session.show("", **report.record(each, assumed))
    else:
        lines = [report.head(workload), "", *report.table(estimates, assumed), ""]
        lines += report.loads_text(estimates[0], assumed)
        click.echo("\n".join(lines))
        guessed = sum("to be replaced" in figure.source for _, figure in assumed.items())
        session.tell(
            f"prices and rates are assumptions, {guessed} of them round figures to be replaced by yours "
            "(--set, --assume): mesh sizing --assumptions shows them with sources"
        )
    if plot is not None:
        plot.write_text(report.plot(estimates, assumed), encoding="utf-8")
    return 0


def _read_toml(path: Path) -> dict[str, Any]:
    """Raises ConfigurationError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from None


def read_assumptions(path: Path | None, changes: Sequence[str]) -> Assumptions:
    """Raises ConfigurationError."""
    from meshtools.sizing.assumptions import parse_values, shipped_assumptions

    assumed = shipped_assumptions()
    if path is not None:
        assumed = assumed.changed(parse_values(path.read_text(encoding="utf-8"), str(path)), str(path))
    for change in changes:
        name, _, number = change.partition("=")
        try:
            value = float(number)
        except ValueError:
            raise ConfigurationError(f"--set {change!r}: expected NAME=NUMBER") from None
        assumed = assumed.changed({name: value}, "--set")
    return assumed


def _values(values: dict[str, Any], given: dict[str, Any], assumed: Assumptions) -> dict[str, Any]:
    """Return the values of a workload: those of the description, then options, then what follows from them.
    Raises ConfigurationError."""
    sample_bytes, gpu_rate, gpu_samples, ops, op_ms, delivered = (
        given.pop(name)
        for name in ("sample_bytes", "gpu_rate", "gpu_samples", "ops", "op_ms", "delivered_bytes")
    )
    values = values | {name: value for name, value in given.items() if value is not None}
    ops = ops or values.pop("ops", None)
    if ops is not None and ops not in assumed.ops:
        raise ConfigurationError(f"--ops {ops!r}: known are {', '.join(assumed.ops)}")
    if ops is not None:
        values |= {
            "cpu_seconds_per_sample": assumed[f"ops.{ops}.cpu_seconds"],
            "delivered_bytes_per_sample": assumed[f"ops.{ops}.delivered_bytes"],
            "kept_bytes_per_sample": assumed[f"ops.{ops}.kept_bytes"],
            "kept_cpu_seconds_per_sample": assumed[f"ops.{ops}.kept_cpu_seconds"],
        }
    if op_ms is not None:
        values["cpu_seconds_per_sample"] = op_ms / 1000
    if delivered is not None:
        values["delivered_bytes_per_sample"] = delivered
    if sample_bytes and values.get("data_bytes"):
        values["samples"] = values["data_bytes"] / sample_bytes
    if gpu_samples and values.get("samples"):
        gpu_rate = gpu_samples * values.get("data_bytes", 0) / values["samples"]
    if gpu_rate is not None:
        values["bytes_per_gpu_second"] = gpu_rate
    return values


def _measure_dataset(session: Session, url: Remote, ops: Sequence[str]) -> dict[str, Any]:
    """Return the size of a dataset, and what its ops cost by the nodes' own counters."""
    from meshsdk.open_dataset import open as open_dataset
    from meshtools.doctor.examine_plan import read_counters

    with session.make_client() as client, session.steps("measuring", 2) as done:
        ds = open_dataset(str(url), client=client)
        stats = ds.stats()
        done("samples counted")
        values: dict[str, Any] = {"data_bytes": float(stats.bytes), "samples": float(stats.samples)}
        if not ops:
            return values
        before = _op_seconds(read_counters(client.transport))
        found = ds.map(*map(parse_op, ops)).preflight(rows=min(_MEASURED_ROWS, stats.samples))
        spent = _op_seconds(read_counters(client.transport)) - before
        done("rows prepared")
    if not spent:
        raise ConfigurationError(
            f"the nodes counted no time for the ops of {found.rows} rows: they kept the results. Give --op-ms"
        )
    session.tell(f"{url}: the ops of {found.rows} rows took {1000 * spent:.1f} ms of the nodes' processors")
    values["cpu_seconds_per_sample"] = spent / found.rows
    values["delivered_bytes_per_sample"] = float(found.row_bytes)
    return values


def _op_seconds(nodes: Sequence[Scrape]) -> float:
    return sum(node.sum_of("meshd_op_seconds_total") for node in nodes)


def _show_assumptions(session: Session, assumed: Assumptions) -> None:
    for name, figure in assumed.items():
        origin = f"{figure.source}{', ' * bool(figure.date)}{figure.date}"
        session.show(
            f"{name:34} {figure.value:<12g} {origin}",
            name=name,
            value=figure.value,
            source=figure.source,
            date=figure.date,
        )


def alternatives(workload: Workload, *, copies: int = 2, cache_share: float = 0.3) -> list[Design]:
    """Return the designs that make sense for a workload: kept samples and views only if there are ops, and
    what is kept only if there is a second epoch."""
    designs = [
        Design("rotational", "rotational", copies),
        Design("NVMe", "nvme", copies),
        Design(f"tiered {cache_share:.0%}", "rotational", copies, cache_share),
        Design(f"rotational, {copies + 1} copies", "rotational", copies + 1),
    ]
    if workload.cpu_seconds_per_sample and workload.epochs * workload.jobs > 1:
        if workload.kept_bytes_per_sample:
            designs.append(Design("rotational, decoded kept", "rotational", copies, form="decoded"))
            designs.append(Design("NVMe, decoded kept", "nvme", copies, form="decoded"))
        designs.append(Design("rotational, view", "rotational", copies, form="view"))
        designs.append(Design("NVMe, view", "nvme", copies, form="view"))
    return designs


def compare(
    workload: Workload, assumed: Assumptions, *, copies: int = 2, cache_share: float = 0.3
) -> list[Estimate]:
    """Return the estimates of all alternatives: those without problems first, the cheapest before others."""
    found = [
        estimate(workload, design, assumed)
        for design in alternatives(workload, copies=copies, cache_share=cache_share)
    ]
    return sorted(found, key=lambda each: (len(each.problems), each.hardware_usd))
