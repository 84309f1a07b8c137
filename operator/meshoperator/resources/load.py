"""MeshLoad: loads a dataset, or part of it, into the mesh, decodes it for a plan, or evicts it; once or on a
schedule."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from meshoperator.resources.spec_types import (
    SET,
    Column,
    Conditions,
    Count,
    Kind,
    Name,
    ObservedGeneration,
    Part,
    Rule,
    Seconds,
    Size,
    Text,
    immutable,
)

Path = Annotated[str, Meta(min_length=1, max_length=1024)]
PlanHash = Annotated[str, Meta(min_length=64, max_length=64, pattern="^[0-9a-f]{64}$")]


class Warm(Part, frozen=True, kw_only=True):
    """What to decode once the objects are loaded."""

    plan: Annotated[
        PlanHash,
        Meta(description="Hash of a plan (`loader.plan.hash`, `mesh plans ls`) that reads the dataset."),
    ]
    epoch: Annotated[Count, Meta(description="The epoch that comes first.")] = 0


class MeshLoadSpec(Part, frozen=True, kw_only=True):
    """What to load or evict, and when."""

    rules: ClassVar = (
        Rule("!(has(self.manifest) && size(self.paths) > 0)", "set either paths or manifest"),
        Rule(
            "(self.policy == 'Cron') == has(self.schedule)",
            "policy Cron needs a schedule, and a schedule needs policy Cron",
        ),
        Rule("!has(self.bandwidth) || self.action == 'Load'", "bandwidth applies to the action Load only"),
        Rule("!has(self.warm) || self.action == 'Load'", "warm applies to the action Load only"),
    )

    dataset_ref: Annotated[
        Name, Meta(description="The MeshDataset.", extra_json_schema=immutable("datasetRef"))
    ]
    action: Annotated[
        Literal["Load", "Evict"], Meta(description="What to do.", extra_json_schema=immutable("action"))
    ] = "Load"
    paths: Annotated[
        tuple[Path, ...],
        Meta(
            max_length=256, description="Prefixes below the source. Empty: everything.", extra_json_schema=SET
        ),
    ] = ()
    manifest: (
        Annotated[Path, Meta(description="Key of an object of the dataset that lists keys, one per line.")]
        | None
    ) = None
    warm: (
        Annotated[
            Warm,
            Meta(
                description="Then fill the daemons' decoded caches with what a plan reads of the dataset, so "
                "that its first epoch decodes nothing.",
            ),
        ]
        | None
    ) = None
    policy: Annotated[
        Literal["Once", "Cron"],
        Meta(description="Run once, or by `schedule`.", extra_json_schema=immutable("policy")),
    ] = "Once"
    schedule: (
        Annotated[
            str,
            Meta(
                min_length=9,
                max_length=100,
                pattern=r"^\S+( \S+){4}$",
                description="Minute, hour, day, month, weekday, as in Debian's cron; UTC.",
            ),
        ]
        | None
    ) = None
    bandwidth: (
        Annotated[
            Size,
            Meta(description="Limit in bytes per second for all daemons together, shared evenly by `paths`."),
        ]
        | None
    ) = None
    run_after: Annotated[
        tuple[Name, ...],
        Meta(max_length=16, description="MeshLoads that must succeed first.", extra_json_schema=SET),
    ] = ()
    suspend: Annotated[bool, Meta(description="Paused: running jobs stop, and continue later.")] = False
    ttl_seconds_after_finished: (
        Annotated[Seconds, Meta(description="Delete the MeshLoad so many seconds after its end.")] | None
    ) = None


class Failure(Part, frozen=True, kw_only=True):
    """An object that could not be loaded."""

    path: Annotated[Text, Meta(description="Which.")]
    error: Annotated[Text, Meta(description="Why.")]


class MeshLoadStatus(Part, frozen=True, kw_only=True):
    """Observed state of a load."""

    observed_generation: ObservedGeneration = None
    phase: (
        Annotated[
            Literal["Pending", "Waiting", "Running", "Suspended", "Succeeded", "Failed"],
            Meta(description="Summary in one word."),
        ]
        | None
    ) = None
    conditions: Conditions = ()
    job_id: Annotated[Text, Meta(description="Jobs of the daemons.")] | None = None
    objects_done: Annotated[
        Count, Meta(description="Objects loaded; for a dataset with several homes each copy counts.")
    ] = 0
    objects_total: (
        Annotated[Count, Meta(description="Objects to load; absent until the source is listed.")] | None
    ) = None
    bytes_done: Annotated[Count, Meta(description="Bytes loaded, over all homes.")] = 0
    bytes_total: Annotated[Count, Meta(description="Bytes to load, over all homes.")] | None = None
    samples_done: (
        Annotated[Count, Meta(description="Samples that were decoded or left out, with `warm`.")] | None
    ) = None
    samples_total: Annotated[Count, Meta(description="Samples to decode, with `warm`.")] | None = None
    failed: Annotated[
        tuple[Failure, ...], Meta(max_length=100, description="The first hundred failures.")
    ] = ()
    started_at: (
        Annotated[str, Meta(description="Of the last run.", extra_json_schema={"format": "date-time"})] | None
    ) = None
    finished_at: (
        Annotated[str, Meta(description="Of the last run.", extra_json_schema={"format": "date-time"})] | None
    ) = None
    next_run_at: (
        Annotated[
            str, Meta(description="Next run, with policy Cron.", extra_json_schema={"format": "date-time"})
        ]
        | None
    ) = None


MeshLoad = Kind(
    "MeshLoad",
    "ml",
    "Loads data into the mesh or evicts it, once or on a schedule.",
    MeshLoadSpec,
    MeshLoadStatus,
    (
        Column("Dataset", ".spec.datasetRef"),
        Column("Action", ".spec.action"),
        Column("Phase", ".status.phase"),
        Column("Done", ".status.bytesDone", "integer"),
        Column("Total", ".status.bytesTotal", "integer"),
        Column("Next", ".status.nextRunAt", wide=True),
        Column("Age", ".metadata.creationTimestamp", "date"),
    ),
)
