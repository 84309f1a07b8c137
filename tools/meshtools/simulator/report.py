"""Reports of simulations: figures, text, a chart, and a trace that Perfetto opens.

Law: shows what a simulation counted.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from meshtools.quantities import bytes_text, seconds_text
from meshtools.svg_chart import Bars, bars_svg
from meshwire.cluster.cluster_map import MAX_NODES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meshtools.simulator.durability import Durability
    from meshtools.simulator.epoch import EpochSimulation

_PARTS = 10  # of the time, in the chart of throughput


def epoch_figures(done: EpochSimulation) -> dict[str, Any]:
    """Return the figures of a run: seconds, bytes and shares 0…1, as the names say."""
    mesh, nodes = done.scenario.mesh, done.nodes
    seconds = max(job.end for job in done.jobs)
    waits = np.concatenate([np.array(job.waits) for job in done.jobs])
    samples = sum(job.samples for job in done.jobs)
    compute = done.scenario.jobs.step_seconds * waits.size
    size = done.scenario.data.sample_bytes if done.scenario.data else 0
    count = mesh.nodes
    disks = nodes.disk_seconds[:count] / mesh.disks_per_node / seconds
    more: dict[str, Any] = {}
    if (caches := done.caches) is not None:
        more |= {
            "origin_hit_share": round(1 - caches.fetched_bytes / max(1.0, nodes.wanted_bytes), 4),
            "origin_bytes": caches.fetched_bytes,
        }
    if done.writes is not None and done.writes.seconds:
        took = np.array(done.writes.seconds)
        more |= {
            "writes": took.size,
            "written_bytes": round(nodes.written_bytes),
            "write_p50_seconds": round(float(np.quantile(took, 0.5)), 4),
            "write_p99_seconds": round(float(np.quantile(took, 0.99)), 4),
            "write_longest_seconds": round(float(took.max()), 3),
        }
    return {
        **more,
        "scenario": done.scenario.name,
        "nodes": count,
        "jobs": len(done.jobs),
        "seconds": round(seconds, 3),
        "samples_per_second": round(samples / seconds, 1),
        "bytes_per_second": round(samples * size / seconds),
        "wait_share": round(float(waits.sum() / (waits.sum() + compute)), 4) if waits.size else 0.0,
        "wait_p99_seconds": round(float(np.quantile(waits, 0.99)), 4),
        "wait_longest_seconds": round(float(waits.max()), 3),
        "seeks_per_sample": round(nodes.seeks / max(1.0, nodes.samples), 5),
        "read_bytes": round(nodes.read_bytes),
        "read_over_wanted": round(nodes.read_bytes / max(1.0, nodes.wanted_bytes), 4),
        "cached_share": round(nodes.cached_bytes / max(1.0, nodes.wanted_bytes), 4),
        "shared_share": round(1 - nodes.computed_rows / max(1, nodes.sent_rows), 4),
        "sent_bytes": round(float(nodes.port_bytes.sum())),
        "disks_busy": round(float(disks.mean()), 4),
        "disks_busy_most": round(float(disks.max()), 4),
        "cores_busy": round(float(nodes.cpu_seconds[:count].mean() / mesh.cores_per_node / seconds), 4),
        "ports_busy": round(float(nodes.port_bytes[:count].mean() / mesh.nic_bytes_per_second / seconds), 4),
        "slots_most_over_mean": round(float(done.slots_per_node.max() / done.slots_per_node.mean()), 3),
        "nodes_without_slots": int((done.slots_per_node == 0).sum()),
        "map_bytes": done.cluster.map_bytes,
        "map_changes": done.cluster.changes,
        "map_sent_bytes": round(done.cluster.sent_bytes),
        "lease_renewals_per_second": round(done.cluster.renewals_per_second, 1),
        "etcd_cores": round(done.cluster.etcd_cores, 3),
        "repairs": [
            asdict(each)
            | {
                "bytes": round(each.bytes),
                "seconds": round(each.seconds, 1),
                "short_bytes": round(each.short_bytes),
                "short_seconds": round(each.short_seconds, 1),
            }
            for each in done.repairs
        ],
    }


def epoch_text(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report of a run for people."""
    each = figures
    yield f"{each['scenario']}: {each['nodes']:,} nodes, {each['jobs']} job{'s' * (each['jobs'] != 1)}"
    yield (
        f"  {each['seconds']:,.1f} s simulated; {each['samples_per_second']:,.0f} samples/s, "
        f"{bytes_text(each['bytes_per_second'])}/s"
    )
    yield (
        f"  jobs wait {each['wait_share']:.1%} of the time; 99 % of the waits for a batch are below "
        f"{each['wait_p99_seconds']:.3g} s, the longest is {each['wait_longest_seconds']:.3g} s"
    )
    yield (
        f"  disks busy {each['disks_busy']:.1%} on average, {each['disks_busy_most']:.1%} at most; cores "
        f"{each['cores_busy']:.1%}, ports {each['ports_busy']:.1%}"
    )
    yield (
        f"  {each['seeks_per_sample']:.4g} seeks a sample; {bytes_text(each['read_bytes'])} read, "
        f"{each['read_over_wanted']:.3f} × what was wanted, {each['cached_share']:.1%} cached; "
        f"{bytes_text(each['sent_bytes'])} sent"
    )
    yield (
        f"  placement: the fullest node has {each['slots_most_over_mean']:.2f} × the mean share, "
        f"{each['nodes_without_slots']:,} nodes have nothing"
    )
    yield (
        f"  the map has {bytes_text(each['map_bytes'])}; {each['map_changes']} changes, "
        f"{bytes_text(each['map_sent_bytes'])} sent to the nodes"
    )
    yield (
        f"  leases are renewed {each['lease_renewals_per_second']:,.4g} times a second: "
        f"{each['etcd_cores']:.2g} cores of etcd"
    )
    if "origin_hit_share" in each:
        yield (
            f"  caches had {each['origin_hit_share']:.1%} of the bytes read; "
            f"{bytes_text(each['origin_bytes'])} came from the origin"
        )
    if "writes" in each:
        yield (
            f"  {each['writes']:,} objects written, {bytes_text(each['written_bytes'])} on disks; half "
            f"took {each['write_p50_seconds']:.3g} s, 99 % below {each['write_p99_seconds']:.3g} s, at most "
            f"{each['write_longest_seconds']:.3g} s"
        )
    for repair in each["repairs"]:
        yield from _repair_text(repair)
    if each["nodes"] > MAX_NODES:
        yield f"  note: nodes accept maps of at most {MAX_NODES:,} nodes at present"


def _repair_text(repair: Mapping[str, Any]) -> Iterator[str]:
    yield f"  {repair['why']}: {bytes_text(repair['bytes'])} copied in {seconds_text(repair['seconds'])}"
    if repair["slots"]:
        yield (
            f"    {repair['slots']:,} copies of slots, from {repair['senders']:,} nodes to "
            f"{repair['receivers']:,} in {repair['racks']:,} racks, {repair['most']:,} at most to one"
        )
    if repair["short_bytes"]:
        yield (
            f"    {bytes_text(repair['short_bytes'])} had a copy fewer, for "
            f"{seconds_text(repair['short_seconds'])} at most"
        )


def epoch_plot(done: EpochSimulation, figures: Mapping[str, Any]) -> str:
    """Return SVG: what was busy, and throughput over time."""
    busy = [
        (name, float(figures[key]), f"{figures[key]:.1%}")
        for name, key in (
            ("disks", "disks_busy"),
            ("the busiest node's disks", "disks_busy_most"),
            ("cores", "cores_busy"),
            ("ports", "ports_busy"),
            ("jobs waiting", "wait_share"),
        )
    ]
    starts = np.concatenate([np.array(job.starts) for job in done.jobs])
    seconds = float(figures["seconds"])
    counts, edges = np.histogram(starts, _PARTS, (0.0, seconds))
    rates = counts * done.scenario.jobs.batch / (seconds / _PARTS)
    rows = [
        (f"{low:,.0f} to {high:,.0f} s", float(rate), f"{rate:,.0f}")
        for low, high, rate in zip(edges[:-1], edges[1:], rates, strict=True)
    ]
    return bars_svg([Bars("Busy, share of the time", busy), Bars("Samples a second, over time", rows)])


def epoch_trace(done: EpochSimulation) -> str:
    """Return a trace in the JSON format of Chrome, which Perfetto opens: waits and steps of each job, and
    faults. Times are of the simulation."""
    tracks = {name: number for number, name in enumerate(dict.fromkeys(span.track for span in done.spans), 1)}
    whole = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": done.scenario.name}}
    events: list[dict[str, Any]] = [whole] + [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": name}}
        for name, number in tracks.items()
    ]
    events += [
        {
            "ph": "X",
            "name": span.name,
            "pid": 1,
            "tid": tracks[span.track],
            "ts": round(span.start * 1e6, 1),
            "dur": round(span.seconds * 1e6, 1),
        }
        for span in done.spans
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def durability_figures(name: str, found: Durability) -> dict[str, Any]:
    """Return the figures of years of failures."""
    return {
        "scenario": name,
        "years": found.years,
        "disk_failures": found.failures,
        "parts": found.parts,
        "parts_lost": found.lost,
        "parts_lost_expected": round(found.expected, 6),
        "nines": round(found.nines, 2),
        "nines_simulated": round(found.simulated_nines, 2) if found.lost else None,
    }


def durability_text(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report of years of failures for people."""
    each = figures
    suffix = "" if each["nines_simulated"] is None else f", {each['nines_simulated']} simulated"
    yield f"{each['scenario']}: {each['years']:g} years, {each['disk_failures']:,} disks failed"
    yield (
        f"  {each['parts_lost']:,} of {each['parts']:,} parts of the data lost all copies; by the formula "
        f"{each['parts_lost_expected']:,.4g}"
    )
    yield f"  durability of a year: {each['nines']} nines by the formula{suffix}"
