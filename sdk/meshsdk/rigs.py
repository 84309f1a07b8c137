"""What a loader runs on: the plan that its arguments register, and the memory and the feed that follow.

Law: arguments that make no sense, and what cannot work, are told here, before the first step; no place in an
epoch is known here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from meshsdk.addressing import Addresses
from meshsdk.arenas import Arena
from meshsdk.arguments import (
    arena_bytes,
    checked_batch,
    checked_connections,
    checked_normalize,
    checked_share,
    checked_verify,
    frame_bytes,
    plain_seed,
    takes_parts,
    too_small,
)
from meshsdk.feeds import Feed
from meshsdk.native import register_plan
from meshsdk.outputs import device_name, make_stage
from meshsdk.ranks import find_rank
from meshsdk.settings import checked_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshsdk.datasets import Dataset
    from meshsdk.meters import Meter
    from meshsdk.native import PlanInfo
    from meshsdk.normalizing import Normalize
    from meshsdk.orders import LengthBuckets, Shuffle
    from meshsdk.outputs import Stage
    from meshsdk.reporting import Reporter
    from meshsdk.watchers import Watchers
    from meshwire.slices import Tail

_log = logging.getLogger("meshsdk")


@dataclass(frozen=True, slots=True)
class Arguments:
    """Those of `Loader`, but for the dataset; which rank of which world it is was found."""

    global_batch: int
    seed: int
    shuffle: Shuffle
    buckets: LengthBuckets | None
    tail: Tail
    on_bad: Literal["substitute", "raise", "mask", "drop"]
    max_bad: float
    rank: int
    world: int
    device: str | None
    output: Literal["torch", "numpy"] | None
    prefetch_bytes: int | None
    share: str | None
    deadline: float
    verify: Literal[True, False, "all"]
    connections: int
    report: str | None
    normalize: Normalize | None
    rows_from: Literal["owners", "one"]

    def spec(self, dataset: Dataset) -> dict[str, Any]:
        """The plan's document; raises ConfigurationError naming a bad value."""
        return dataset.spec(
            seed=self.seed,
            shuffle=self.shuffle,
            tail=self.tail,
            on_bad=self.on_bad,
            max_bad=self.max_bad,
            batch=self.global_batch,
            buckets=self.buckets,
        )

    def again(self) -> dict[str, Any]:
        """What makes the same loader in another process."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def checked(given: Mapping[str, Any]) -> Arguments:
    """The arguments as they were given, where they make sense by themselves. Raises ConfigurationError."""
    rank, world = find_rank(given["rank"], given["world"])
    found = {
        "rank": rank,
        "world": world,
        "global_batch": checked_batch(given["global_batch"], world),
        "seed": plain_seed(given["seed"]),
        "share": checked_share(given["share"]),
        "deadline": checked_seconds("deadline", given["deadline"]),
        "connections": checked_connections(given["connections"]),
        "verify": checked_verify(given["verify"]),
        "device": device_name(given["device"]),
    }
    return Arguments(**{**given, **found})


@dataclass(frozen=True, slots=True)
class Rig:
    """`arena`: of the loader's own passes."""

    plan: PlanInfo
    arena: Arena
    feed: Feed


def make_rig(
    dataset: Dataset, arguments: Arguments, meter: Meter, watchers: Watchers, reporter: Reporter | None
) -> Rig:
    """Registers the plan. Raises ConfigurationError, and what registering raises."""
    transport, spec = dataset.client.transport, arguments.spec(dataset)
    stage = make_stage(arguments.device, arguments.output, arguments.normalize)
    plan = register_plan(transport, dataset.snapshot.hash, spec, arguments.global_batch, arguments.deadline)
    checked_normalize(arguments.normalize, plan.fields)
    expected = frame_bytes(plan.fields, -(-arguments.global_batch // arguments.world))
    alike = expected > 0 and not arguments.share and not spec.get("pack")
    addresses = Addresses(
        plan,
        arguments.global_batch,
        arguments.rank,
        arguments.world,
        arguments.tail,
        arguments.share,
        takes_parts(arguments.rows_from) and alike,
        reporter,
    )
    arena = _arena(arguments, stage, expected)
    feed = Feed(
        transport,
        addresses,
        stage,
        meter,
        watchers,
        expected,
        arena.budget,
        arguments.connections,
        arguments.deadline,
        arguments.verify,
    )
    return Rig(plan, arena, feed)


def _arena(arguments: Arguments, stage: Stage, expected: int) -> Arena:
    slot = stage.memory.capacity(expected)
    budget = arena_bytes(arguments.prefetch_bytes, slot)
    if expected and (told := too_small(budget, slot)):
        _log.warning("%s", told)
    return Arena(budget, stage.memory)
