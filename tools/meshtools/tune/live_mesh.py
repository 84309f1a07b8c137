"""The live mesh: documents of its activity, facts about its plans and buckets, and changes of settings.

Law: reading asks one node, which asks the others. Nothing is changed but by `apply_setting`.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Final

from meshsdk.admin.cluster_admin import change_bucket, show_bucket
from meshsdk.admin.documents import list_documents
from meshsdk.client.read_costs import fetch_disk_cost
from meshsdk.client.request import Request
from meshsdk.errors import MeshError, ServerError
from meshtools.tune.observation import PlanFacts, observe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from meshsdk.admin.cluster_admin import BucketInfo
    from meshsdk.client.transport import Transport
    from meshtools.tune.changes import Change, Setting
    from meshtools.tune.observation import Observation

PARTS: Final = 5
"""Parts of a window: how much their rates differ is the noise."""
_MOST_PLANS: Final = 32


def watch(
    transport: Transport, seconds: float, wait: Callable[[float], object]
) -> tuple[Observation, list[Observation]]:
    """Observe a mesh for `seconds`, which `wait` waits. Returns the whole window, and its parts."""
    documents = [read_activity(transport)]
    for _ in range(PARTS):
        wait(seconds / PARTS)
        documents.append(read_activity(transport))
    parts = [observe(was, now) for was, now in pairwise(documents)]
    return observe(documents[0], documents[-1]), parts


def read_activity(transport: Transport) -> Any:
    """Return the document of `GET /-/activity`. Raises MeshError."""
    return transport.json(Request("GET", "/-/activity"))


def with_facts(seen: Observation, transport: Transport) -> Observation:
    """Add what the plans in use are, and their buckets. Raises MeshError."""
    wanted = sorted({loop.plan for loop in seen.loops} | set(seen.plans))[:_MOST_PLANS]
    hashes = [found.hash for found in list_documents(transport, "plans")] if wanted else []
    facts = {}
    for digits in filter(None, wanted):
        for digest in hashes:
            if digest.startswith(digits):
                with suppress(MeshError, KeyError, TypeError, IndexError):
                    facts[digits] = _facts(transport, digest, rotational=seen.total("rotational") > 0)
    return replace(seen, facts=facts, buckets=_buckets(transport, {each.bucket for each in facts.values()}))


def _facts(transport: Transport, digest: str, *, rotational: bool) -> PlanFacts:
    """Raises MeshError, KeyError and TypeError for a plan that is not of one snapshot."""
    plan = transport.json(Request("GET", f"/-/plans/{digest}"))
    snapshot, spec = plan["snapshot"], plan["spec"]
    about = transport.json(Request("GET", f"/-/snapshots/{snapshot}/statistics"))
    shuffle = spec.get("shuffle") or {}
    order = shuffle.get("kind", "global")
    return PlanFacts(
        digest,
        snapshot,
        about["buckets"][0],
        order,
        tuple(op["op"] for op in spec.get("ops", ())),
        int(about["samples"]),
        int(about["bytes"]),
        int(about["shards"]),
        fetch_disk_cost(transport, snapshot) if rotational and order == "global" else None,
        int(shuffle.get("shards") or 0),
    )


def _buckets(transport: Transport, names: Iterable[str]) -> dict[str, BucketInfo] | None:
    found = {}
    for name in names:
        try:
            found[name] = show_bucket(transport, name)
        except ServerError as error:
            if error.code == "AccessDenied":
                return None
    return found


def apply_setting(transport: Transport, setting: Setting) -> None:
    """Change a field of a bucket; all nodes know it when this returns. Raises MeshError."""
    change_bucket(transport, setting.bucket, {setting.field: setting.value})


def await_effect(
    transport: Transport, changes: Sequence[Change], patience: float, wait: Callable[[float], object]
) -> bool:
    """Wait until each loop of the changes is one epoch further, since what is kept serves the next epoch.
    False: this took longer than `patience` seconds, or a loop ended."""
    concerned = {name for change in changes for name in change.loops}
    begun = _epochs(read_activity(transport), concerned)
    waited = quiet = 0.0
    last = begun
    while any(last[name] < epochs + 1 for name, epochs in begun.items()):
        if waited >= patience or quiet >= patience / 4:
            return False
        wait(1.0)
        waited, before = waited + 1, last
        last = _epochs(read_activity(transport), concerned)
        quiet = quiet + 1 if last == before else 0.0
    return True


def _epochs(document: Any, names: Iterable[str]) -> dict[str, float]:
    return {
        name: max(
            (
                node["loaders"][name]["epochs"]
                for node in document["nodes"].values()
                if name in node["loaders"]
            ),
            default=0.0,
        )
        for name in names
    }


@dataclass(frozen=True, slots=True)
class Rate:
    """Samples a second: the mean of the parts of a window, and its standard error."""

    mean: float
    error: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a change has gained: rates before and after, and the predicted rate. `settled`: whether all loops
    were one epoch further when it was measured."""

    change: Change
    before: Rate
    after: Rate
    settled: bool

    @property
    def gain(self) -> float:
        return self.after.mean / self.before.mean if self.before.mean else 1.0

    @property
    def noise(self) -> float:
        """Two standard errors of `gain`."""
        shares = [rate.error / rate.mean for rate in (self.before, self.after) if rate.mean]
        return 2 * self.gain * math.hypot(*shares)

    @property
    def certain(self) -> bool:
        """Whether the rate differs by more than the noise."""
        return abs(self.gain - 1) > self.noise


def rate_of(parts: Sequence[Observation], loops: Iterable[str]) -> Rate:
    """Return the rate of some loops together."""
    names = set(loops)
    rates = [
        sum(loop.samples_per_second for loop in part.loops if loop.name in names)
        for part in parts
        if part.seconds > 0
    ]
    if not rates:
        return Rate(0.0, 0.0)
    error = stdev(rates) / math.sqrt(len(rates)) if len(rates) > 1 else 0.0
    return Rate(fmean(rates), error)
