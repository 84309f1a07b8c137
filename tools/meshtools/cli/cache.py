"""`mesh cache`: simulates a cache on a trace of reads.

Law: the simulator runs the daemon's own pure code, which needs only the standard library. It is imported
when the command runs.
"""

from __future__ import annotations

import re
from typing import IO, TYPE_CHECKING, Any

import click

from meshsdk.byte_sizes import format_size
from meshsdk.cli.command_base import shared_options

if TYPE_CHECKING:
    from meshd.origins.eviction.policy_api import EvictionSettings
    from meshsdk.cli.command_base import Session
    from meshtools.cache_simulator.simulator import Result, TraceRead

_NAMES = ("segments", "segments+plan", "lru", "s3-fifo", "sieve", "belady")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"([0-9]+)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


class _Size(click.ParamType[float]):
    """A size such as `64MiB` or `4096`; with `share`, also `0.3` or `30%`."""

    name = "size"

    def __init__(self, *, share: bool = False) -> None:
        self.share = share

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        part = 0.0
        if (match := _SIZE.fullmatch(value.strip())) and int(match[1]):
            return int(match[1]) * _UNITS[match[2].upper()]
        if self.share and (match := re.fullmatch(r"(0?\.[0-9]+|[0-9]+(?:\.[0-9]+)?%)", value.strip())):
            part = float(match[1].rstrip("%")) / (100 if match[1].endswith("%") else 1)
        if 0 < part <= 1:
            return part
        form = "bytes (64MiB) or a share of the data (0.3, 30%)" if self.share else "bytes (64MiB)"
        raise click.BadParameter(f"{value!r} is not {form}", ctx, param)


@click.group("cache")
def cache() -> None:
    """Simulate a cache: replay traces of reads against eviction policies."""


@cache.command()
@click.argument("trace", type=click.File(encoding="utf-8"), required=False)
@click.option("--epochs", type=click.IntRange(1, 10_000), help="Generate a trace: every item once per epoch.")
@click.option("--sequential", is_flag=True, help="Every epoch in the same order, not shuffled.")
@click.option("--zipf", type=click.FloatRange(0, 10), help="Generate a trace: popularity with this exponent.")
@click.option("--items", type=click.IntRange(1, 10_000_000), default=2000, help="Items of a generated trace.")
@click.option("--item-size", type=_Size(), default="100KiB", help="Size of its items.")
@click.option("--reads", type=click.IntRange(1, 100_000_000), default=20_000, help="Reads with --zipf.")
@click.option("--seed", type=int, default=0, help="Seed of a generated trace.")
@click.option("--capacity", type=_Size(share=True), default="0.3", help="Bytes, or a share of the data.")
@click.option("--segment", type=_Size(), help="Bytes of a data file [default: 256MiB, or 1/64 of the cache].")
@click.option(
    "--policy", "policies", type=click.Choice(_NAMES), multiple=True, help="Only this policy; repeatable."
)
@shared_options
def simulate(
    session: Session, trace: IO[str] | None, capacity: float, segment: int | None, **made: Any
) -> int:
    """Print the hit ratio of each policy on the reads of TRACE.

    A trace (- is stdin) is JSON lines, {"key": "a.jpg", "size": 1000, "bucket": "photos"} for each read, or
    CSV with the columns key, size and optionally bucket. Use --epochs or --zipf instead of a file, or both
    for a mixture.

    `segments` is the policy of Shardmesh; `segments+plan` is the same policy with knowledge of future reads;
    `belady` is the upper bound of any policy, in bytes. `warm` counts only reads of items that were read
    before. The command sends no requests.

    \b
    mesh cache simulate reads.jsonl --capacity 64GiB
    mesh cache simulate --epochs 20 --capacity 0.3
    mesh cache simulate --epochs 5 --zipf 0.9 --policy segments --policy lru
    """
    from meshd.origins.eviction.policy_api import EvictionSettings
    from meshtools.cache_simulator.simulator import TraceError, default_segment, footprint, parse_trace
    from meshtools.cache_simulator.simulator import simulate as replay

    try:
        reads = _make_trace(made) if trace is None else parse_trace(trace)
    except (TraceError, UnicodeDecodeError) as error:
        raise click.UsageError(str(error)) from None
    if trace is not None and (made["epochs"] or made["zipf"] is not None):
        raise click.UsageError("give either a TRACE, or --epochs and --zipf")
    data = footprint(reads)
    room = capacity if isinstance(capacity, int) else max(1, int(capacity * data))
    settings = EvictionSettings(room, segment=segment or default_segment(room))
    _head(session, len(reads), data, settings)
    names = made["policies"] or _NAMES
    with session.steps("replaying", len(names)) as done:
        for name in names:
            done(name, 0)
            _show(session, replay(name, reads, settings))
            done()
    return 0


def _make_trace(made: dict[str, Any]) -> list[TraceRead]:
    """Raises UsageError."""
    from meshtools.cache_simulator.simulator import epoch_trace, mix_traces, zipf_trace

    items, size, seed = made["items"], made["item_size"], made["seed"]
    traces = []
    if made["epochs"]:
        traces.append(epoch_trace(made["epochs"], items, size, shuffled=not made["sequential"], seed=seed))
    if made["zipf"] is not None:
        traces.append(zipf_trace(made["zipf"], made["reads"], items, size, seed=seed))
    if not traces:
        raise click.UsageError("give a TRACE, --epochs or --zipf; see --help")
    return mix_traces(traces, seed=seed) if len(traces) > 1 else traces[0]


def _head(session: Session, reads: int, data: int, settings: EvictionSettings) -> None:
    if session.as_json:
        return
    click.echo(
        f"{reads} reads of {format_size(data)}; cache {format_size(settings.capacity)}"
        f" ({settings.capacity / data:.0%}), segments of {format_size(settings.segment)}"
    )
    click.echo(f"{'policy':14} {'reads':>7} {'bytes':>7} {'warm':>7} {'moved':>11} {'segments':>9}")


def _show(session: Session, result: Result) -> None:
    session.show(
        f"{result.policy:14} {result.objects:7.4f} {result.bytes:7.4f} {result.warm_bytes:7.4f}"
        f" {format_size(result.moved):>11} {result.evictions:9}",
        policy=result.policy,
        hit_ratio=result.objects,
        byte_hit_ratio=result.bytes,
        warm_hit_ratio=result.warm_objects,
        warm_byte_hit_ratio=result.warm_bytes,
        moved_bytes=result.moved,
        segments_evicted=result.evictions,
    )
