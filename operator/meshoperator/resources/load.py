"""MeshLoad: loads a dataset, or part of it, into the mesh, or evicts it; once or on a schedule."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from meshoperator.resources.common import (
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


class MeshLoadSpec(Part, frozen=True, kw_only=True):
    """What is to be loaded or evicted, and when."""

    rules: ClassVar = (
        Rule("!(has(self.manifest) && size(self.paths) > 0)", "say either paths or manifest"),
        Rule(
            "(self.policy == 'Cron') == has(self.schedule)",
            "policy Cron needs a schedule, and a schedule needs policy Cron",
        ),
        Rule("!has(self.bandwidth) || self.action == 'Load'", "bandwidth is of the action Load"),
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
            max_length=256, description="Prefixes below the source. Empty: all of it.", extra_json_schema=SET
        ),
    ] = ()
    manifest: (
        Annotated[Path, Meta(description="Key of an object of the dataset that lists keys, one a line.")]
        | None
    ) = None
    policy: Annotated[
        Literal["Once", "Cron"],
        Meta(description="Once, or by `schedule`.", extra_json_schema=immutable("policy")),
    ] = "Once"
    schedule: (
        Annotated[
            str,
            Meta(
                min_length=9,
                max_length=100,
                pattern=r"^\S+( \S+){4}$",
                description="Minute, hour, day, month, day of the week, as cron has it; UTC.",
            ),
        ]
        | None
    ) = None
    bandwidth: (
        Annotated[
            Size,
            Meta(description="Bytes a second at most, of all daemons together; dealt out evenly to `paths`."),
        ]
        | None
    ) = None
    run_after: Annotated[
        tuple[Name, ...],
        Meta(max_length=16, description="MeshLoads that must have succeeded before.", extra_json_schema=SET),
    ] = ()
    suspend: Annotated[bool, Meta(description="Paused: what runs stops where it is, and goes on later.")] = (
        False
    )
    ttl_seconds_after_finished: (
        Annotated[Seconds, Meta(description="The MeshLoad goes by itself so long after its end.")] | None
    ) = None


class Failure(Part, frozen=True, kw_only=True):
    """What could not be loaded."""

    path: Annotated[Text, Meta(description="Which.")]
    error: Annotated[Text, Meta(description="Why.")]


class MeshLoadStatus(Part, frozen=True, kw_only=True):
    """How far it is."""

    observed_generation: ObservedGeneration = None
    phase: (
        Annotated[
            Literal["Pending", "Waiting", "Running", "Suspended", "Succeeded", "Failed"],
            Meta(description="In one word."),
        ]
        | None
    ) = None
    conditions: Conditions = ()
    job_id: Annotated[Text, Meta(description="The daemons' job.")] | None = None
    objects_done: Annotated[
        Count, Meta(description="Objects there; of a dataset with several homes each copy counts.")
    ] = 0
    objects_total: (
        Annotated[Count, Meta(description="Objects wanted; not said before the source was listed.")] | None
    ) = None
    bytes_done: Annotated[Count, Meta(description="Bytes there, at all homes together.")] = 0
    bytes_total: Annotated[Count, Meta(description="Bytes wanted, at all homes together.")] | None = None
    failed: Annotated[tuple[Failure, ...], Meta(max_length=100, description="The first hundred.")] = ()
    started_at: (
        Annotated[str, Meta(description="Of the last run.", extra_json_schema={"format": "date-time"})] | None
    ) = None
    finished_at: (
        Annotated[str, Meta(description="Of the last run.", extra_json_schema={"format": "date-time"})] | None
    ) = None
    next_run_at: (
        Annotated[str, Meta(description="With policy Cron.", extra_json_schema={"format": "date-time"})]
        | None
    ) = None


MeshLoad = Kind(
    "MeshLoad",
    "ml",
    "Bring data into the mesh or let it go, once or by a schedule.",
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
