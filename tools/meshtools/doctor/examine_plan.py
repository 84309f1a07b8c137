"""Diagnosis of a plan or view without a training script, and the facts the nodes report about it.

Law: it changes no data. It measures the batches of that very plan, and emulates the compute of a step by
waiting, as MLPerf Storage does. If too many samples are bad for the plan, it measures one that differs only
in `max_bad` and `on_bad`. A fact that a node does not report is left out, and the advice is less precise.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshsdk.admin.cluster_admin import scrape, show_bucket
from meshsdk.admin.op_catalog import show_op
from meshsdk.admin.views import show_view
from meshsdk.client.arena import Arena
from meshsdk.client.native_api import bad_samples, register_plan
from meshsdk.client.request import Request
from meshsdk.errors import BadSampleError, ConfigurationError, MeshError
from meshsdk.loader.loader_setup import MeasuredPlan
from meshsdk.loader.output_stage import NumpyStage
from meshtools.doctor.advice import Diagnosis, PlanFacts, advise, disk_notes
from meshtools.doctor.measurement_runs import MeasurementRuns
from meshtools.doctor.stage_times import TITLES, split
from meshwire.plan.plan_spec import parse_spec
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from meshsdk.admin.cluster_admin import Scrape
    from meshsdk.client.native_api import BadSample, FieldSchema
    from meshsdk.client.transport import Transport
    from meshtools.doctor.measurement_runs import Network
    from meshwire.plan.plan_spec import PlanSpec


_ARENA = 256 << 20


def plan_subject(transport: Transport, digest: str, batch: int, world: int = 1) -> MeasuredPlan:
    """Returns a registered plan as rank 0 of `world` reads it. Raises NotFoundError."""
    found = transport.json(Request("GET", f"/-/plans/{digest}"))
    plan = register_plan(transport, found["snapshot"], found["spec"], batch)
    stage = NumpyStage()
    return MeasuredPlan(transport, plan, batch, 0, world, stage, Arena(_ARENA, stage.memory), 0)


def view_subject(transport: Transport, name: str, batch: int | None, world: int | None) -> MeasuredPlan:
    """Returns the plan of a view of batches. Raises NotFoundError, and ConfigurationError for another kind of
    view."""
    view = show_view(transport, name)
    if view.kind != "batches":
        raise ConfigurationError(
            f"{name} is a view of {view.kind}: only a view of batches has a plan (mesh view create --batches)"
        )
    document = view.view
    ranks = world or int(document.get("world", 1))
    return plan_subject(transport, str(document["plan"]), batch or int(document["batch"]), ranks)


_PATIENCE: Final = 5.0  # seconds: advice is not worth a longer wait
_MOST: Final = 16  # nodes whose counters are read
_NAMED: Final = 5  # bad samples that a note names


@dataclass(slots=True)
class NodeSurvey:
    """Reads the nodes' counters before the first batch is requested, when the first run begins and when it
    has ended."""

    transport: Transport
    _before: dict[str, float] = field(default_factory=dict)
    _spent: dict[str, float] = field(default_factory=dict)
    _transforms: int = 0
    _cores: int = 0
    _ahead: tuple[float, float] = 0.0, 0.0

    def on_start(self) -> None:
        """Called before the first batch is requested: from then on, nodes read ahead."""
        self._ahead = _reads_ahead(read_counters(self.transport))

    def on_run_start(self, run: str) -> None:
        """Called when a run begins. The first run is `fetch`, the second `preprocessing`."""
        if run not in ("fetch", "preprocessing"):
            return
        counters = read_counters(self.transport)
        seconds: dict[str, float] = {}
        for node in counters:
            for op, taken in node.sum_by_label("meshd_op_seconds_total", "op").items():
                seconds[op] = seconds.get(op, 0.0) + taken
        if run == "fetch":
            self._before = seconds
        else:
            self._spent = {op: taken - self._before.get(op, 0.0) for op, taken in seconds.items()}
            samples, seeks = _reads_ahead(counters)
            self._ahead = samples - self._ahead[0], seeks - self._ahead[1]
            self._transforms = int(
                sum(node.sum_of("meshd_processes_up", role="transform") for node in counters)
            )
            self._cores = int(sum(node.sum_of("meshd_cores") for node in counters))

    def plan_facts(self, subject: MeasuredPlan, network: Network) -> PlanFacts:
        """Returns what the nodes report about the plan and its source."""
        spec = self._plan(subject.plan.hash)
        samples, seeks = self._ahead
        ops = dict.fromkeys(() if spec is None else (op.op for op in spec.ops), 0.0)
        for op in ops:
            # Ops that the nodes run as one step are counted under their joined names.
            ops[op] = sum(seconds for name, seconds in self._spent.items() if op in name.split("+"))
        return PlanFacts(
            spec=spec,
            dtypes=_widths(subject.plan.fields),
            source=subject.source,
            ops={op: seconds for op, seconds in ops.items() if seconds > 0},
            random=frozenset(op for op in ops if self._draws(op)),
            transforms=self._transforms,
            cores=self._cores,
            origin=self._from_origin(subject.source),
            connections=subject.connections,
            verify=subject.verify,
            network=network,
            seeks=seeks / samples if samples > 0 else None,
        )

    def _plan(self, digest: str) -> PlanSpec | None:
        with suppress(MeshError, PlanError, KeyError, TypeError):
            return parse_spec(self.transport.json(Request("GET", f"/-/plans/{digest}"), _PATIENCE)["spec"])
        return None

    def _draws(self, op: str) -> bool:
        with suppress(MeshError):
            return show_op(self.transport, op).random
        return False

    def _from_origin(self, source: str) -> bool:
        bucket = source.removeprefix("s3://").partition("/")[0]
        with suppress(MeshError, KeyError, TypeError):
            return bool(bucket) and bool(show_bucket(self.transport, bucket).origin)
        return False


def read_counters(transport: Transport) -> list[Scrape]:
    """Returns the present counters of the nodes that answer."""
    directory = transport.router.directory
    cluster = directory.current()
    asked = [transport.settings.endpoint]
    if cluster is not None:
        asked = [directory.endpoint(node) for node in cluster.nodes if node.state == "up"]
    found = []
    for endpoint in asked[:_MOST]:
        with suppress(MeshError):
            found.append(scrape(endpoint, _PATIENCE))
    return found


def _reads_ahead(scrapes: Iterable[Scrape]) -> tuple[float, float]:
    """Returns the samples that nodes have read ahead from rotational disks, and the seeks of that."""
    nodes = list(scrapes)
    return (
        sum(node.sum_of("meshd_read_ahead_samples_total") for node in nodes),
        sum(node.sum_of("meshd_read_ahead_seeks_total") for node in nodes),
    )


def _widths(fields: Mapping[str, FieldSchema]) -> dict[str, int]:
    """Returns the bytes of a row by dtype, without ragged fields, whose size is unknown."""
    found: dict[str, int] = {}
    for each in fields.values():
        if each.shape is not None:
            width = 2 if each.dtype == "bfloat16" else np.dtype(each.dtype).itemsize
            found[each.dtype] = found.get(each.dtype, 0) + prod(each.shape) * width
    return found


UNSURE = 0.1
"""A step time whose uncertainty is above this share gets a note."""


def examine(
    subject: MeasuredPlan,
    *,
    steps: int = 32,
    step_seconds: float = 0.0,
    progress: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """Diagnoses a plan. `step_seconds`: the time that a step would compute. If a batch has more bad samples
    than the plan allows, others are measured in their place, and a note names them. Raises MeshError."""
    seen: set[str] = set()

    def begins(run: str) -> None:
        if run not in seen:
            seen.add(run)
            progress(run)

    try:
        return _examine(subject, steps, step_seconds, begins)
    except BadSampleError:
        document = subject.transport.json(Request("GET", f"/-/plans/{subject.plan.hash}"))
        spec = document["spec"]
        lenient: dict[str, Any] = {"max_bad": 1.0}
        if spec["on_bad"] == "raise":
            lenient["on_bad"] = "substitute"
        plan = register_plan(subject.transport, document["snapshot"], {**spec, **lenient}, subject.batch)
        found = _examine(replace(subject, plan=plan), steps, step_seconds, begins)
        note = _bad_note(bad_samples(subject.transport, plan.hash), plan.hash, spec)
        return replace(found, notes=(note, *found.notes))


def _bad_note(bad: Sequence[BadSample], plan: str, spec: Mapping[str, Any]) -> str:
    """Returns which samples are bad, and what to change so that a job does not stop at them."""
    named = "; ".join(f"{each.key}: {each.op}: {each.error}" for each in bad[:_NAMED])
    rest = f"; {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    limit = f"at a batch with more than max_bad={spec['max_bad']} of its rows bad (one row is always allowed)"
    stops, fix = limit, "give the Loader a larger max_bad"
    if spec["on_bad"] == "raise":
        stops, fix = "at the first of them (on_bad='raise')", "give the Loader another on_bad"
    return (
        f"{len(bad)} of the samples read are bad: {named}{rest} (`mesh bad ls {plan[:16]}` lists them). "
        f"A job stops {stops}: repair or remove them, or {fix}. Here the rest was measured"
    )


def _examine(
    subject: MeasuredPlan, steps: int, step_seconds: float, progress: Callable[[str], None]
) -> Diagnosis:
    enquiry = NodeSurvey(subject.transport)

    def begins(run: str) -> None:
        enquiry.on_run_start(run)
        progress(run)

    enquiry.on_start()
    checkup = MeasurementRuns(subject, steps, alone=True, begins=begins)
    for batch in checkup.batches():
        del batch
        if step_seconds:
            time.sleep(step_seconds)
    found = split(checkup.runs, subject.world)
    about = enquiry.plan_facts(subject, checkup.network)
    notes = (
        []
        if step_seconds
        else [
            "no step computes anything: without a script or --step-time, the share of its time that a job "
            "computes is unknown"
        ]
    )
    timed = max(run.steps for run in checkup.runs.values())
    notes += [*disk_notes(about), *uncertainty_notes(checkup)]
    return Diagnosis((found,), advise(found, about), timed, notes)


def uncertainty_notes(checkup: MeasurementRuns) -> list[str]:
    """Returns notes on what limits the figures. The uncertainty of the compute time does not count where no
    step computes."""
    network, found = checkup.network, []
    computes = split(checkup.runs).computes
    unsure = {
        name: run.doubt
        for name, run in checkup.runs.items()
        if run.doubt > UNSURE and (computes or name != "compute")
    }
    if unsure:
        listed = ", ".join(f"{TITLES[name]} ±{doubt:.0%}" for name, doubt in unsure.items())
        found.append(
            f"step times vary ({listed} of a step with it): other programs may keep this machine busy. "
            "Use more --steps for figures that are more certain"
        )
    if network.missed > 0:
        found.append(
            f"the node dropped {network.missed} of {network.frames} prepared frames: the figure of network "
            "and copy contains preprocessing, too. Raise the node's --frame-cache, or use a smaller batch"
        )
    return found
