"""Changes: what would make loops faster or data safer, each with its forecast, reason and command.

Law: pure. A rule proposes a change only for what a loop was seen to wait for, and only if the forecast gains
at least `LEAST`. What no rule covers is a note, never a change.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from meshsdk.byte_sizes import format_size
from meshtools.simulator.durability import expected_losses
from meshtools.tune.loop_model import WORTH, LoopModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshtools.sizing.assumptions import Assumptions
    from meshtools.tune.observation import Loop, Observation, PlanFacts

LEAST: Final = 1.03
"""Forecasts of less are not worth a change."""
_ROOM: Final = 1.15  # of kept samples: nodes have unequal shares
_OPEN_SEGMENTS: Final = 1 / 16  # of a decoded cache: segments that are open count in full
_KEEP_FREE: Final = 0.1  # of a disk, or _MOST_FREE bytes: caches leave so much
_MOST_FREE: Final = float(32 << 30)
_CACHE_FILL: Final = 0.95  # of a cache of origins: the lower watermark of eviction
_BUSY: Final = 0.5  # of the time of transform processes: below it, more of them do not help
_REPAIR_SECONDS: Final = 36_000.0
_FAILURES: Final = 0.015  # of a disk in a year


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of a bucket, which nodes take over while they run: its value now, and the new one."""

    bucket: str
    field: str
    before: int | None
    value: int


@dataclass(frozen=True, slots=True)
class Change:
    """One change. kind: what it changes; target: of which loop, bucket or nodes. rate, forecast: samples per
    second of the loops concerned, now and predicted; both 0 if it makes nothing faster. setting: set if the
    change can be made live; undo: the command that reverts it."""

    kind: str
    target: str
    why: str
    command: str
    rate: float = 0.0
    forecast: float = 0.0
    setting: Setting | None = None
    undo: str = ""
    loops: tuple[str, ...] = ()

    @property
    def gain(self) -> float:
        """Foretold ÷ present rate; 1 if it makes nothing faster."""
        return self.forecast / self.rate if self.rate else 1.0

    @property
    def live(self) -> bool:
        """Whether it can be made while the nodes run."""
        return self.setting is not None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "gain": round(self.gain, 3), "live": self.live}


@dataclass(frozen=True, slots=True)
class Advice:
    """All changes, those of the largest gain first, and what else is to be known."""

    changes: tuple[Change, ...]
    notes: tuple[str, ...]


def advise(seen: Observation, assumed: Assumptions) -> Advice:
    """Return what to change in the observed mesh."""
    changes: list[Change] = []
    notes: list[str] = []
    for loop in seen.loops:
        use, facts = seen.plans.get(loop.plan), seen.facts.get(loop.plan)
        if use is None or facts is None:
            notes.append(
                f"{loop.name}: its plan is not known or rendered no row, so there is no forecast for it"
            )
            continue
        model = LoopModel(seen, loop, use, facts, assumed)
        found = [change for change in _for_loop(model, notes) if change.gain >= LEAST]
        changes += found
        if not model.bound:
            changes += _more_runs(model)
        elif not found:
            notes.append(f"{_waits(model)}: {_other(model)}")
    changes += _copies(seen)
    if not seen.loops:
        notes.append(_idle(seen))
    if seen.silent:
        notes.append(f"without the figures of {', '.join(seen.silent)}, which did not answer or restarted")
    if seen.buckets is None:
        notes.append("quotas and copies of buckets are not known: this needs root's access key")
    unique = {(change.kind, change.command): change for change in reversed(changes)}
    ordered = sorted(unique.values(), key=lambda change: (-change.gain, not change.live, change.kind))
    return Advice(tuple(ordered), tuple(dict.fromkeys(notes)))


def _idle(seen: Observation) -> str:
    busy = sum(plan.rows_per_second for plan in seen.plans.values())
    if busy:
        return (
            f"{busy:,.0f} rows a second are rendered for loops that do not report, so nobody knows what they "
            "wait for: give them a name, mesh.Loader(…, report=NAME) or MESH_REPORT=NAME"
        )
    return f"no loop has read anything in {seen.seconds:.0f} s: run this while training runs"


def _for_loop(model: LoopModel, notes: list[str]) -> Iterator[Change]:
    if model.bound == "decode":
        yield from _decode_more(model, notes)
        yield from _transforms(model)
        yield from _sharing(model)
    elif model.bound == "disk":
        yield from _origin(model)
        if model.rotational:
            yield from _order(model)
            yield from _read_ahead(model)
            yield from _sharing(model)


def _other(model: LoopModel) -> str:
    """Return what is left where no setting helps."""
    if model.bound == "network":
        return "`mesh doctor -- SCRIPT` says which argument of its loader to change"
    if model.bound == "decode" and model.transforms_busy < _BUSY:
        return (
            f"its transform processes compute for {model.transforms_busy:.0%} of the time only, so they wait "
            "for reads, or for cores that other programs use"
        )
    if model.bound == "decode":
        nodes = len(model.seen.nodes)
        more = replace(model.hardware, nodes=nodes + 1)
        gain = model.speed(model.workload, more) / model.loop.samples_per_second
        return f"its ops keep all cores busy; one more node with the role compute gains {gain:.2f}×"
    return "no setting helps; memory or faster disks would"


def _change(model: LoopModel, kind: str, target: str, why: str, command: str, forecast: float) -> Change:
    loop = model.loop
    return Change(kind, target, why, command, loop.samples_per_second, forecast, loops=(loop.name,))


def _waits(model: LoopModel) -> str:
    loop = model.loop
    return f"{loop.name} waits for {loop.stage} {loop.stalls[loop.stage]:.0%} of the time"


def _decode_more(model: LoopModel, notes: list[str]) -> Iterator[Change]:
    """Keep more of what ops make before the first random one."""
    seen, loop, facts = model.seen, model.loop, model.facts
    limit, kept, nodes = seen.total("decoded_limit"), seen.total("decoded_bytes"), max(1, len(seen.nodes))
    if not any("decode" in op for op in facts.ops):
        return
    if not limit:
        ratio = model.workload.cpu_seconds_per_sample and _assumed_share(model)
        cheaper = replace(
            model.workload, cpu_seconds_per_sample=model.workload.cpu_seconds_per_sample * ratio
        )
        yield _change(
            model,
            "decoded cache",
            "all nodes",
            f"{_waits(model)}, and no node keeps decoded samples; the forecast takes photographs, from the "
            "second epoch on",
            "meshd serve --decoded-cache auto (on each node, with a restart)",
            model.speed(cheaper),
        )
        return
    hits, saved, quota = seen.decoded_hits, seen.decoded_saved, _quota(seen, facts.bucket)
    if hits is None or hits > 1 - WORTH:
        return
    at_quota = quota is not None and seen.total("decoded_at_quota") > 0
    if loop.epochs < 1 and not at_quota:
        notes.append(f"{loop.name} is in its first epoch, which fills the decoded caches: ask again later")
        return
    now = model.workload.cpu_seconds_per_sample
    full = now + hits * saved if saved is not None else now
    spared = saved if saved is not None else full * (1 - _assumed_share(model))
    # A fixed part of the samples is kept, so the share of hits is the share of the bytes.
    whole = kept / hits if hits > WORTH / 5 and kept else facts.bytes * _assumed_growth(model)
    measured = "" if saved is not None and kept else ", by the assumed costs of photographs"
    reason = (
        f"{_waits(model)}; {hits:.0%} of its samples are decoded already, a hit spares "
        f"{1000 * spared:.2g} of {1000 * full:.2g} ms of processor{measured}"
    )

    def forecast(bytes_kept: float) -> float:
        cost = max(full - spared * min(1.0, bytes_kept / whole), full / 100)
        return model.speed(replace(model.workload, cpu_seconds_per_sample=cost))

    if quota is not None and at_quota:
        wanted = _round_up(min(limit, whole * _ROOM + limit * _OPEN_SEGMENTS) / nodes)
        if wanted <= quota:
            return
        share = min(1.0, wanted * nodes / whole)
        yield replace(
            _change(
                model,
                "decoded quota",
                facts.bucket,
                f"{reason}; the quota of {facts.bucket}, {format_size(quota)} a node, is the bound: "
                f"{format_size(wanted)} keep {share:.0%}, after one more epoch",
                f"mesh bucket change {facts.bucket} --decoded-quota {wanted}",
                forecast(wanted * nodes),
            ),
            setting=Setting(facts.bucket, "decoded_quota", quota, wanted),
            undo=f"mesh bucket change {facts.bucket} --decoded-quota {quota}",
        )
        return
    free = sum(
        node.decoded_limit + max(0.0, node.free_bytes - min(_KEEP_FREE * node.disk_bytes, _MOST_FREE))
        for node in seen.nodes.values()
    )
    wanted = _round_up(min(free, whole * _ROOM) / nodes)
    if kept >= 0.6 * limit and wanted > limit / nodes:
        yield _change(
            model,
            "decoded cache",
            "all nodes",
            f"{reason}; the cache of {format_size(int(limit / nodes))} a node is full, the disks have room "
            f"for {format_size(wanted)}",
            f"meshd serve --decoded-cache {wanted} (on each node, with a restart, which empties it)",
            forecast(wanted * nodes),
        )


def _assumed_share(model: LoopModel) -> float:
    assumed = model.assumed
    return assumed["ops.photo.kept_cpu_seconds"] / assumed["ops.photo.cpu_seconds"]


def _assumed_growth(model: LoopModel) -> float:
    return model.assumed["ops.photo.kept_bytes"] / 70e3  # of the photographs that were measured


def _quota(seen: Observation, bucket: str) -> int | None:
    found = (seen.buckets or {}).get(bucket)
    return None if found is None else found.decoded_quota


def _round_up(size: float) -> int:
    """Round up to whole MiB."""
    return math.ceil(size / (1 << 20)) << 20


def _transforms(model: LoopModel) -> Iterator[Change]:
    seen = model.seen
    short = {name: node for name, node in seen.nodes.items() if 0 < node.transforms < node.cores}
    if not short or model.transforms_busy < _BUSY:
        return
    nodes = len(seen.nodes)
    more = replace(model.hardware, cores_per_node=max(1, round(seen.total("cores") / nodes)))
    node = next(iter(short.values()))
    yield _change(
        model,
        "transform processes",
        ", ".join(short),
        f"{_waits(model)}, and ops run in {seen.total('transforms'):.0f} processes on "
        f"{seen.total('cores'):.0f} cores; nodes on one machine share its cores, then this gains less",
        f"meshd serve --transform-workers {node.cores:.0f} (on each of them, with a restart)",
        model.speed(model.workload, more),
    )


def _sharing(model: LoopModel) -> Iterator[Change]:
    """Loops over the same data with the same ops prepare each for itself."""
    seen, loop, facts = model.seen, model.loop, model.facts

    def alike(other: Loop) -> bool:
        about = seen.facts.get(other.plan)
        return about is not None and _kind(about) == _kind(facts)

    group = [other for other in seen.loops if alike(other)]
    wanted = 1 - 1 / len(group)
    if len(group) < 2 or model.use.shared_share > wanted / 2 or group[0] is not loop:
        return
    rate = sum(other.samples_per_second for other in group)
    names = ", ".join(other.name for other in group)
    yield Change(
        "sharing",
        names,
        f"{len(group)} loops read the same samples through the same ops, and each has them prepared for "
        f"itself ({model.use.shared_share:.0%} of the batches are shared)",
        "mesh.Loader(…, seed=N, share=NAME) with the same seed and name in all of them",
        rate,
        rate * model.scaled(1 / len(group)) / loop.samples_per_second,
        loops=tuple(other.name for other in group),
    )


def _kind(facts: PlanFacts) -> tuple[str, str, tuple[str, ...]]:
    return facts.snapshot, facts.order, facts.ops


def _origin(model: LoopModel) -> Iterator[Change]:
    """Keep more of an origin's objects."""
    seen, loop, facts = model.seen, model.loop, model.facts
    bucket = (seen.buckets or {}).get(facts.bucket)
    if bucket is None or bucket.origin is None or seen.cached_hits is None or seen.cached_hits > 1 - WORTH:
        return
    why = f"{_waits(model)}, and {1 - seen.cached_hits:.0%} of the reads go to the origin of {facts.bucket}"
    quota, nodes = int(bucket.origin["quota"] or 0), max(1, len(seen.nodes))
    room = seen.total("cache_capacity") * _CACHE_FILL
    wanted = _round_up(min(facts.bytes * _ROOM, room) / nodes)
    if quota and wanted > quota and loop.epochs >= 1:
        left = max(0.0, 1 - wanted * nodes / facts.bytes)
        yield replace(
            _change(
                model,
                "cache quota",
                facts.bucket,
                f"{why}; its quota, {format_size(quota)} a node, does not hold its "
                f"{format_size(facts.bytes)}; {format_size(wanted)} hold {1 - left:.0%}, one epoch later",
                f"mesh bucket change {facts.bucket} --quota {wanted}",
                model.scaled(left / (1 - seen.cached_hits)),
            ),
            setting=Setting(facts.bucket, "quota", quota, wanted),
            undo=f"mesh bucket change {facts.bucket} --quota {quota}",
        )
    elif not quota and loop.epochs < 1 and seen.total("cache_capacity") > facts.bytes:
        yield _change(
            model,
            "prefetch",
            facts.bucket,
            f"{why}, since this is the first epoch; the cache has room for all of it",
            f"mesh prefetch s3://{facts.bucket}/",
            model.scaled(0.0),
        )


def _order(model: LoopModel) -> Iterator[Change]:
    loop, facts, cost = model.loop, model.facts, model.facts.disk_cost
    if facts.order != "global" or cost is None:
        return
    full, blocks = cost.orders[0], cost.orders[1]
    if full.disk_seconds <= 0:
        return
    yield _change(
        model,
        "order",
        loop.name,
        f"{_waits(model)}; by the estimate of {cost.node} an epoch takes its rotational disks "
        f"{full.disk_seconds:.0f} s in a full shuffle and {blocks.disk_seconds:.0f} s in {blocks.shuffle}, "
        f"which moves samples {blocks.distance:.0%} as far",
        f"mesh.Loader(…, shuffle=mesh.{blocks.shuffle}), which is another plan and another order",
        model.scaled(blocks.disk_seconds / full.disk_seconds),
    )


def _read_ahead(model: LoopModel) -> Iterator[Change]:
    seen, facts = model.seen, model.facts
    held, free = seen.total("read_ahead_bytes"), seen.total("memory_free_bytes")
    seeks = model.use.seeks_per_sample
    more = min(held + free / 2, float(facts.bytes))
    if facts.order != "global" or seeks is None or seeks < WORTH or more < 1.5 * held:
        return
    each = _round_up(more / max(1, len(seen.nodes)))
    yield _change(
        model,
        "read-ahead",
        "all nodes",
        f"{_waits(model)}, its disks seek {seeks:.2f} times a sample, and windows take "
        f"{format_size(int(held))} where {format_size(int(held + free))} are there",
        f"meshd serve --read-ahead {each} (on each node, with a restart)",
        model.speed(model.with_read_ahead(more)),
    )


def _more_runs(model: LoopModel) -> Iterator[Change]:
    """A loop that waits for nothing leaves room for others."""
    seen, loop = model.seen, model.loop
    alone, shared = model.runs(sharing=False), model.runs(sharing=True)
    running = len(seen.loops)
    if running > 1 or alone <= running or model.use.cpu_seconds_per_row <= 0:
        return
    # The loop's trainer is not slowed down by a run on another machine, so the rates add up.
    also = f", {shared:,} if they share samples (share=NAME)" if shared > alone else ""
    yield replace(
        _change(
            model,
            "parallel runs",
            loop.name,
            f"{loop.name} waits {loop.wait_share:.0%} of the time; by what it costs, the mesh carries "
            f"{alone:,} such runs at {model.assumed['limits.utilization']:.0%} of its cores, disks and "
            f"network{also}; the rate is that of all together",
            f"start up to {alone - running:,} more on other machines",
            loop.samples_per_second * alone,
        ),
    )


def _copies(seen: Observation) -> Iterator[Change]:
    """One copy of what is trained on is lost with a disk."""
    nodes = len(seen.nodes)
    active = {facts.bucket for plan, facts in seen.facts.items() if plan in seen.plans}
    for name in sorted(active):
        bucket = (seen.buckets or {}).get(name)
        if bucket is None or bucket.origin is not None or bucket.wanted != 1 or nodes < 2:
            continue
        bytes_of = sum({f.snapshot: f.bytes for f in seen.facts.values() if f.bucket == name}.values())
        if bytes_of > seen.total("free_bytes") * (1 - _KEEP_FREE):
            continue
        before, after = (expected_losses(copies, _FAILURES, _REPAIR_SECONDS) for copies in (1, 2))
        yield Change(
            "copies",
            name,
            f"{name} has one copy: if {_FAILURES:.1%} of disks fail in a year, so much of it is lost "
            f"({before:.1%}); with two, repaired in ten hours, {after:.0e} of it. This makes nothing faster, "
            f"and takes {format_size(bytes_of)} more",
            f"mesh bucket change {name} --copies 2",
            setting=Setting(name, "copies", 1, 2),
            undo=f"mesh bucket change {name} --copies 1",
        )
